"""The engine port of a server (launch.serve --engine_port): learners of RL sample from what it serves."""

import dataclasses
import os
import platform
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from composer_jax.checkpoint.checkpoint import NETWORK
from composer_jax.checkpoint.weight_chain import ChainFiles
from composer_jax.errors import UserError
from composer_jax.models.config import ModelConfig
from composer_jax.rl.engines.description import EngineDescription, EngineStatus, network_fingerprint
from composer_jax.rl.engines.engine_port import EnginePort, ServedEngine, bind_port
from composer_jax.rl.workers.handshake import read_token
from composer_jax.serve.service import Service

POLL_S = 2.0
"""Seconds from one look for a trainer's first version to the next."""


@dataclasses.dataclass(frozen=True)
class BoundPort:
    """A port at which learners will be let in."""

    listening: socket.socket
    token: str
    folder: str
    """Whose versions the server follows."""

    @property
    def address(self) -> str:
        """HOST:PORT."""
        host, port = self.listening.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def served(
        self,
        service: Service,
        network: ModelConfig,
        look: Callable[[], Awaitable[object]],
        reload: Callable[[], Awaitable[None]],
    ) -> EnginePort:
        """Returns what lets learners in and serves them.

        Args:
          network: of the weights, as their address describes it.
          look: takes the newest version of the folder, if the server has another one.
          reload: loads the newest version of the folder, whatever the server has.
        """
        sampler, limits = service.sampler, service.sampler.limits
        description = EngineDescription(
            name=f"{platform.node()}:{os.getpid()}",
            network=network_fingerprint(network),
            tokenizer=service.text.tokenizer.fingerprint,
            end_tokens=sampler.end_tokens,
            max_model_len=sampler.config.max_model_len,
            slots=limits.rows * limits.shards,
            fitting=limits.fitting * limits.shards,
            returns_routing=sampler.definition.config.cache_routing,
            follows=self.folder,
        )

        weights = sampler.version, sampler.checksums

        def status() -> EngineStatus:
            nonlocal weights
            if sampler.error is not None:
                raise sampler.error
            if not service.updating.locked():  # while weights are installed, the checksums change before the version
                weights = sampler.version, sampler.checksums
            progress = sampler.decoded_tokens + sampler.prefilled_tokens
            return EngineStatus(*weights, progress, sampler.is_paused)

        return EnginePort(ServedEngine(sampler, description, status, look, reload), self.token, self.listening)


def open_engine_port(host: str, port: int, token_file: str, folder: str, *, leads: bool) -> BoundPort | None:
    """Binds the port, and waits until a trainer has published a first version.

    Engines can so be started before their learner.

    Args:
      folder: whose versions the server follows.
      leads: False in a process that has no port and only waits; None is returned then.

    Raises UserError for a port in use, a token that is missing or too short, or a server that follows no folder.
    """
    if not token_file:
        raise UserError("--engine_port needs --token_file, the secret that a learner must know (launch.rl).")
    if not folder:
        raise UserError(
            f"--engine_port={port} serves a learner, whose versions the server has to follow; give "
            "--checkpoint=patches:FOLDER, or --follow=FOLDER beside other weights."
        )
    bound = None
    if leads:
        token = read_token(Path(token_file))
        try:
            bound = BoundPort(bind_port(host, port), token, folder)
        except (OSError, OverflowError) as error:
            raise UserError(
                f"cannot listen on {host}:{port} ({error}); use another --engine_port or --host."
            ) from error
    _wait_for_first_version(folder)
    return bound


def _wait_for_first_version(folder: str) -> None:
    said = False
    while not (files := ChainFiles(folder)).versions() or not _has(files, NETWORK):
        if not said:
            print(f"waits until a trainer publishes its first version into {folder}", file=sys.stderr, flush=True)
        said = True
        time.sleep(POLL_S)


def _has(files: ChainFiles, name: str) -> bool:
    try:
        files.read(name)
    except FileNotFoundError:
        return False
    return True
