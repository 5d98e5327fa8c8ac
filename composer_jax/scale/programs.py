"""The compiled programs of each stage, as training and sampling run them, with abstract arguments on a mesh.

A stage is a list of steps. pretrain, its phases and sft have a training step: the learner's gradient under the stage's
loss, and its update. rl has the same under the policy loss on packed rows, and the steps of the sampler: a decode call
and a prefill call of each shape. evaluate has the steps of the sampler.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from composer_jax.errors import UserError
from composer_jax.models.attention_kinds import attention_form
from composer_jax.models.cache import abstract_cache
from composer_jax.models.config import ModelConfig
from composer_jax.models.flops import forward_flops, training_flops
from composer_jax.models.model_def import ModelDef
from composer_jax.models.route_dtypes import replay_dtype
from composer_jax.parallel.context import zigzag_order
from composer_jax.parallel.dispatch.rounds import ROUNDS
from composer_jax.parallel.mesh import BATCH_AXES, MeshConfig, batch_shards
from composer_jax.parallel.sharding import EXPERT_AXES
from composer_jax.rl.batch import FIELDS, REFERENCE_FIELDS
from composer_jax.sampler.config import SamplerConfig, make_limits
from composer_jax.sampler.decode import DECODE_LOOP, CarriedRows, DecodeRows
from composer_jax.sampler.programs import decode_program, prefill_program
from composer_jax.sampler.rollout_weights import rollout_model_def
from composer_jax.schema.run_config import RunConfig
from composer_jax.train.learner import Learner
from composer_jax.train.losses import Loss, make_loss
from composer_jax.train.optimizer import OptimizerConfig, make_optimizer
from composer_jax.train.teacher_kl import slot_shapes

LANGUAGE_FIELDS = ("tokens", "positions", "segments", "weights")
LOOP_COUNTS = {DECODE_LOOP: 1.0, ROUNDS: 1.0}
"""Iterations of loops whose length the traced program does not contain: a decode step is one token, and with balanced
load one round of rows holds all tokens of a device's experts."""

Shape = tuple[int, int]
"""(rows over all devices, tokens of a row)."""


@dataclasses.dataclass(frozen=True)
class Program:
    """A jitted function with abstract arguments."""

    function: Any
    arguments: tuple[Any, ...]
    """Trees of ShapeDtypeStructs with shardings."""
    keywords: Mapping[str, Any]
    resident: Mapping[str, Any]
    """All arrays in HBM while the program runs, arguments included, by purpose."""
    outputs: Mapping[str, Any]
    """Results that do not overwrite arguments, by purpose."""
    calls_per_step: int = 1
    is_update: bool = False
    """Whether the program is an optimizer's update: one pass over its arguments, and what runs under jax.shard_map."""


@dataclasses.dataclass(frozen=True)
class Step:
    """The programs of one step, on all devices of a mesh."""

    mesh: Mesh
    model_def: ModelDef
    programs: Mapping[str, Program]
    flops: float
    """Model FLOPs on all devices without recomputation, the numerator of MFU."""
    tokens: int
    """Tokens on all devices."""


def check_stage(config: RunConfig, stage: str) -> None:
    """Raises UserError for a stage that has no steps in this config."""
    stages = ("pretrain", *config.phases, "sft", "rl", "evaluate")
    if stage not in stages:
        raise UserError(f"--stage={stage} is unknown; the stages are {', '.join(stages)}.")


def stage_steps(config: RunConfig, stage: str, make_mesh: Callable[[MeshConfig], Mesh]) -> dict[str, Step]:
    """Returns the steps of a stage by name: "train", "decode", and "prefill ROWSxTOKENS" for each prefill shape.

    Args:
      stage: pretrain, sft, rl, evaluate, or a phase of the config.
      make_mesh: lays a mesh over the devices.

    Raises:
      UserError: an unknown stage, or sizes that do not fit each other.
    """
    check_stage(config, stage)
    if stage == "rl":
        return _rl(config, make_mesh)
    if stage == "evaluate":
        return _evaluate(config, make_mesh)
    return {"train": _language_step(config, stage, make_mesh(config.stage_mesh(stage)))}


def _rl(config: RunConfig, make_mesh: Callable[[MeshConfig], Mesh]) -> dict[str, Step]:
    """A training step has one batch of every shape of rl.batches. The forward passes of a reference and of the teacher
    of hints, whose number depends on the episodes, are not in it."""
    rl = config.rl
    shapes = [(rows, length) for length, rows in rl.batches]
    step = _training_step(
        config.model,
        make_mesh(config.mesh),
        make_loss(rl.loss),
        rl.optimizer,
        0.0,
        tuple(FIELDS | REFERENCE_FIELDS if rl.algorithm.kl.coefficient else FIELDS),
        shapes,
        ("rl.batches: rows", "rl.batches: length"),
        config.mesh.reduce_dtype,
        has_reference=rl.algorithm.kl.coefficient > 0,
        route_shape=rl.route_shape(config.model),
        feedback_slots=rl.feedback.tokens_per_row if rl.feedback.weight else 0,
    )
    return {"train": step} | _evaluate(config, make_mesh)


def _evaluate(config: RunConfig, make_mesh: Callable[[MeshConfig], Mesh]) -> dict[str, Step]:
    mesh = make_mesh(config.sampler.mesh or config.mesh)
    model = config.rl.rollout_network(config.model) if "rl" in config.stages else config.model
    return _sampler_steps(model, config.sampler, mesh)


def expert_buffer_occupancy(config: ModelConfig, mesh: Mesh) -> float:
    """Returns the fraction of the rows in an expert layer's buffers that hold tokens if load is balanced.

    Dispatch allocates capacity_factor times that many rows, and never more than all rows of all devices. Without
    buffers (no experts, dense dispatch, one device) it is 1.
    """
    devices = math.prod(mesh.shape[axis] for axis in EXPERT_AXES)
    has_buffers = config.n_experts > 0 and config.dispatch != "dense" and devices > 1
    return 1 / min(config.capacity_factor, devices) if has_buffers else 1.0


def _language_step(config: RunConfig, stage: str, mesh: Mesh) -> Step:
    training, section = config.training(stage), config.section(stage)
    shape = (training.micro_batch_size, training.seq_len)
    return _training_step(
        config.stage_model(stage),
        mesh,
        make_loss(training.loss),
        training.optimizer,
        training.router_bias_update_rate,
        LANGUAGE_FIELDS,
        [shape],
        (
            f"{section}.batch_size" + (f" / {training.accumulate}" if training.accumulate > 1 else ""),
            f"{section}.seq_len",
        ),
        config.stage_mesh(stage).reduce_dtype,
        trains_mtp=bool(training.loss.mtp_weight),
        trains_trunk=training.loss.trained == "all",
        accumulate=training.accumulate,
    )


def _training_step(
    config: ModelConfig,
    mesh: Mesh,
    loss: Loss,
    optimizer: OptimizerConfig,
    router_bias_update_rate: float,
    fields: Sequence[str],
    shapes: Sequence[Shape],
    names: tuple[str, str],
    reduce_dtype: Literal["float32", "bfloat16"],
    *,
    trains_mtp: bool = False,
    trains_trunk: bool = True,
    has_reference: bool = False,
    route_shape: tuple[int, int] | None = None,
    feedback_slots: int = 0,
    accumulate: int = 1,
) -> Step:
    """Returns the gradient program of each batch shape, and the update.

    names: what errors call the rows and the tokens of a shape. has_reference: whether a second copy of the weights is
    resident. route_shape: (L, k) where routes are replayed. feedback_slots: rl.feedback.tokens_per_row, or 0 where
    there is no feedback. accumulate: batches of each shape in a step.
    """
    for rows, tokens in shapes:
        _check_batch(rows, tokens, config, mesh, names)
    how: Any = dict(reduce_dtype=reduce_dtype, router_bias_update_rate=router_bias_update_rate)
    learner = Learner(ModelDef(config), make_optimizer(optimizer, steps=1), loss, mesh, **how)
    accumulates = accumulate * len(shapes) > 1
    programs: dict[str, Program] = {}
    resident: dict[str, Any] = {}
    for shape in shapes:
        batch = _abstract_batch(shape, fields, route_shape, feedback_slots, config)
        gradient, arguments, _ = learner.programs(batch)["gradient"]
        part = learner.programs(batch)["update"][1][1]
        update, (state, total, rate), keywords = learner.programs(batch, accumulates=accumulates)["update"]
        resident = {
            "params": state.params,
            "optimizer": (state.optimizer, state.step),
            "router_bias": state.router_bias,
        } | ({"reference": (state.params, state.router_bias)} if has_reference else {})
        held = resident | {"batch": arguments[2:]} | ({"accumulated": total} if accumulates else {})
        name = "gradient" if len(shapes) == 1 else f"gradient {shape[0]}x{shape[1]}"
        programs[name] = Program(gradient, arguments, {}, held, {"gradient": part}, calls_per_step=accumulate)
        programs["update"] = Program(
            update, (state, total, rate), keywords, resident | {"gradient": total}, {}, is_update=True
        )
    flops = accumulate * sum(
        rows * training_flops(config, tokens, trains_mtp=trains_mtp, trains_trunk=trains_trunk)
        for rows, tokens in shapes
    )
    tokens_per_step = accumulate * sum(rows * tokens for rows, tokens in shapes)
    return Step(mesh, learner.definition, programs, flops, tokens_per_step)


def _abstract_batch(
    shape: Shape, fields: Sequence[str], route_shape: tuple[int, int] | None, feedback_slots: int, config: ModelConfig
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the fields of a batch; the arguments are those of `_training_step`."""
    batch = {name: jax.ShapeDtypeStruct(shape, (FIELDS | REFERENCE_FIELDS)[name]) for name in fields}
    if route_shape is not None:
        batch["routes"] = jax.ShapeDtypeStruct((*shape, *route_shape), replay_dtype(config.n_experts))
    if feedback_slots:
        slots = slot_shapes(shape[0], min(feedback_slots, shape[1]), config)
        batch |= {name: jax.ShapeDtypeStruct(*of_slots) for name, of_slots in slots.items()}
    return batch


def _sampler_steps(config: ModelConfig, sampler: SamplerConfig, mesh: Mesh) -> dict[str, Step]:
    """Returns a decode step (one token in every slot) and the prefill steps, with a cache of max_model_len tokens."""
    model_def, shards = rollout_model_def(ModelDef(config), sampler), batch_shards(mesh)
    config = model_def.config
    slots, max_model_len = sampler.slots, sampler.max_model_len
    _require_context("sampler.max_model_len", max_model_len, config)
    limits = make_limits(sampler, shards, config)
    pages_per_row = -(-max_model_len // limits.page_size)
    weights = model_def.abstract_weights(mesh)
    cache = abstract_cache(config, mesh, limits.cache_pages, limits.page_size)
    rows_sharding = NamedSharding(mesh, PartitionSpec(BATCH_AXES))

    def step(function: Any, inputs: tuple[jax.ShapeDtypeStruct, ...], name: str, flops: float, tokens: int) -> Step:
        resident = {"params": weights[0], "router_bias": weights[1], "cache": cache, "batch": inputs}
        return Step(
            mesh, model_def, {name: Program(function, (*weights, cache, *inputs), {}, resident, {})}, flops, tokens
        )

    def integers(*shape: int, dtype: type = np.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=rows_sharding)

    decode = decode_program(model_def, mesh, sampler.decode_steps, (0,), processed=False)
    row = integers(slots)
    contexts = DecodeRows(row, row, row, integers(slots, dtype=np.uint32), integers(slots, pages_per_row))
    inputs = (*contexts, row, *CarriedRows(row, row, row))
    decode_flops = slots * (forward_flops(config, max_model_len) - forward_flops(config, max_model_len - 1))
    steps = {"decode": step(decode, inputs, "decode", decode_flops, slots)}
    for per_device, length in sampler.prefill_shapes:
        rows = per_device * shards
        tokens = integers(rows, length)
        inputs = (tokens, integers(rows), integers(rows), integers(rows, pages_per_row))
        inputs += (tokens,) * config.cache_mtp
        name = f"prefill {rows}x{length}"
        flops = rows * forward_flops(config, length)
        steps[name] = step(prefill_program(model_def, mesh), inputs, name, flops, rows * length)
    return steps


def _check_batch(rows: int, tokens: int, config: ModelConfig, mesh: Mesh, names: tuple[str, str]) -> None:
    shards = batch_shards(mesh)
    _require_context(names[1], tokens, config)
    if rows % shards:
        raise UserError(
            f"{names[0]}={rows} does not divide over {shards} devices (mesh axes {', '.join(BATCH_AXES)}); use a "
            f"multiple of {shards}."
        )
    zigzag_order(tokens, mesh.shape["context"])  # raises a UserError if the row does not divide
    attention_form(config, mesh, tokens)  # raises a UserError if its form cannot run on these devices


def _require_context(name: str, tokens: int, config: ModelConfig) -> None:
    if not 2 <= tokens <= config.max_context:
        raise UserError(
            f"{name}={tokens} is not between 2 and the model's max_context={config.max_context}; use fewer, or a model "
            "with a longer context."
        )
