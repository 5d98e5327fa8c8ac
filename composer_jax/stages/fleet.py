"""The engines of an RL run that sample elsewhere (rl.engines), as the run's policy."""

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from absl import logging

from composer_jax.checkpoint.weight_shards import BackgroundPublisher
from composer_jax.errors import UserError
from composer_jax.event_loop import EventLoop
from composer_jax.frames import FrameError
from composer_jax.models.model_def import ModelDef, Params
from composer_jax.rl.engines.config import engine_addresses
from composer_jax.rl.engines.connection import connect_engine
from composer_jax.rl.engines.description import RequiredEngine, network_fingerprint
from composer_jax.rl.engines.engine_places import EngineRefused
from composer_jax.rl.engines.fleet import FleetPolicy, Publishing
from composer_jax.sampler.weight_checksums import ChecksumProgram, WeightChecksums, checked_weights
from composer_jax.stages.engine_placement import engine_places
from composer_jax.stages.run import Run

PUBLISHED = "bfloat16"
"""Dtype of published weights (weight_shards.py)."""


def check_engines(run: Run, required: RequiredEngine) -> None:
    """Refuses engines that answer and cannot be used, before weights are loaded. Raises UserError.

    Engines that do not answer yet may wait for the first version of the run.
    """
    if run.config.rl.engines == "ray":  # they do not run yet
        engine_places(run.config, run.services.worker_options)
        return
    addresses = engine_addresses(run.config.rl.engines)
    token, silence_s = _token(run), run.config.rl.fleet.silence_s

    async def look(address: str) -> str | None:
        """Returns why an engine cannot be used, "" if it can, None if it does not answer."""
        try:
            _, writer, description = await connect_engine(address, token, silence_s)
        except EngineRefused as error:
            return str(error)
        except (OSError, FrameError, TimeoutError, asyncio.IncompleteReadError):
            return None
        writer.close()
        reason = required.find_refusal(description)
        return f"cannot be used: {reason}" if reason else ""

    async def look_at_all() -> list[str | None]:
        return await asyncio.gather(*map(look, addresses))

    with EventLoop() as loop:
        states = dict(zip(addresses, loop.run(look_at_all()), strict=True))
    for address, reason in states.items():
        if reason:
            raise UserError(f"The engine {address} {reason}.")
    if silent := [address for address, reason in states.items() if reason is None]:
        logging.warning(
            "No engine answers at %s yet; the run waits for the first one up to %g s before it ends.",
            ", ".join(silent),
            run.config.rl.fleet.patience_s,
        )


def open_fleet(
    run: Run, publisher: BackgroundPublisher, version: int, checksums: WeightChecksums, episodes_here: int | None
) -> FleetPolicy:
    """Returns the policy of process 0.

    Args:
      publisher: of this process; it has written the version.
      version, checksums: of the weights that the run goes on from.
      episodes_here: those that play at once, if this process alone plays them.
    """
    config = run.config.rl

    def begin(params: Any, router_bias: Any, version: int) -> None:
        fleet.call_followers({"publish": version})
        publisher.publish(params, router_bias, version)

    fleet = FleetPolicy(
        engine_places(run.config, run.services.worker_options),
        _token(run),
        required_engine(run),
        config.fleet,
        Publishing(begin, publisher.wait),
        vocab_size=run.config.model.vocab_size,
        version=version,
        checksums=checksums,
        only_fitting=config.deterministic,
        most_sessions=episodes_here,
    )
    return fleet


def required_engine(run: Run) -> RequiredEngine:
    """Returns what the engines of a run have to be. Several processes call it alike the first time."""
    network = run.config.stage_model("rl")
    return RequiredEngine(
        network=network_fingerprint(network),
        tokenizer=run.model.tokenizer.fingerprint,
        end_tokens=tuple(run.model.chat.end_tokens),
        max_model_len=run.config.sampler.max_model_len,
        route_shape=run.config.rl.route_shape(network),
        n_experts=network.n_experts,
    )


def _token(run: Run) -> str:
    if run.config.rl.engines == "ray" and (options := run.services.worker_options) is not None:
        return options.token
    if not run.services.engine_token:
        raise UserError(
            "rl.engines needs the secret that engines know; run launch.rl with --token_file=FILE, a copy of theirs."
        )
    return run.services.engine_token


def published_checksums(definition: ModelDef) -> Callable[[Params], WeightChecksums]:
    """Returns a function: a learner's weights -> the checksums of an engine that has read them as a version.

    They are those of engines that store weights as they are published, in bfloat16, and of engines that store them in
    the network's own dtype. Every process of a learner calls the function alike.
    """
    names = checked_weights(definition)
    dtypes = dict.fromkeys((PUBLISHED, definition.config.param_dtype))
    programs = [
        ChecksumProgram(ModelDef(dataclasses.replace(definition.config, param_dtype=dtype))) for dtype in dtypes
    ]

    def checksums(params: Params) -> WeightChecksums:
        rounded: dict[str, Any] = {}
        for name in names:
            *path, last = name.split("/")
            from_node, to_node = params, rounded
            for key in path:
                from_node, to_node = from_node[key], to_node.setdefault(key, {})
            to_node[last] = jnp.astype(from_node[last], PUBLISHED)
        return tuple(checksum for program in programs for checksum in program.of_learner(rounded))

    return checksums
