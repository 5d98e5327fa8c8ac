"""The compiled programs of a stage, as training and sampling run them, with abstract arguments on a mesh.

pretrain: the learner's gradient under the language loss, and its update. rl: the same under the policy loss, on packed
rows. decode: one token in every slot of the sampler.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from composer_jax.errors import UserError
from composer_jax.models.config import ModelConfig
from composer_jax.models.flops import forward_flops
from composer_jax.models.model_def import ModelDef
from composer_jax.parallel.context import zigzag_order
from composer_jax.parallel.dispatch.rounds import ROUNDS
from composer_jax.parallel.mesh import BATCH_AXES, batch_shards
from composer_jax.parallel.sharding import EXPERT_AXES
from composer_jax.rl.batch import FIELDS
from composer_jax.sampler.decode import DECODE_LOOP, init_slots
from composer_jax.sampler.programs import decode_program, slot_specs
from composer_jax.scale.settings import BatchSettings, ScaleSettings
from composer_jax.train.learner import Learner
from composer_jax.train.losses import LanguageLossConfig, Loss, PolicyLossConfig, make_loss
from composer_jax.train.optimizer import OptimizerConfig, make_optimizer

LANGUAGE_FIELDS = ("tokens", "positions", "segments", "weights")


@dataclasses.dataclass(frozen=True)
class Program:
    function: Callable
    """Jitted."""
    arguments: tuple
    """Trees of ShapeDtypeStructs with shardings."""
    keywords: Mapping[str, Any]
    resident: Mapping[str, Any]
    """Every array that is in HBM while the program runs, arguments included, by what it is for."""
    outputs: Mapping[str, Any]
    """What it returns beside arguments that it overwrites."""
    calls_per_step: int = 1
    """Calls in a step."""
    elementwise: bool = False
    """It goes over its arguments once; its time is that of reading them and writing what it returns."""


@dataclasses.dataclass(frozen=True)
class StagePrograms:
    definition: ModelDef
    programs: Mapping[str, Program]
    flops: float
    """Of a step on all devices, without recomputation: what MFU is measured against."""
    tokens: int
    """Of a step on all devices."""


def pretrain(settings: ScaleSettings, mesh: Mesh) -> StagePrograms:
    weight = settings.pretrain.mtp_weight
    loss = make_loss(LanguageLossConfig(mtp_weight=weight))
    return _training_programs(settings, mesh, settings.batch, loss, LANGUAGE_FIELDS, mtp=bool(weight))


def rl(settings: ScaleSettings, mesh: Mesh) -> StagePrograms:
    loss = make_loss(PolicyLossConfig(ratio_low=settings.rl.ratio_low, ratio_high=settings.rl.ratio_high))
    return _training_programs(settings, mesh, settings.rl.batch, loss, tuple(FIELDS), mtp=False)


def decode(settings: ScaleSettings, mesh: Mesh) -> StagePrograms:
    config = dataclasses.replace(settings.model, param_dtype=settings.decode.param_dtype, n_mtp_modules=0)
    slots, capacity = settings.decode.slots, settings.decode.capacity
    definition, shards = ModelDef(config), batch_shards(mesh)
    _require_context("decode.capacity", capacity, config)
    if slots % shards:
        raise UserError(f"decode.slots={slots} do not divide over {shards} devices; use a multiple of {shards}.")
    weights = _weights(definition, mesh)
    state = jax.tree.map(
        lambda a, spec: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, spec)),
        jax.eval_shape(lambda: init_slots(config, slots, capacity)),
        slot_specs(definition),
    )
    rows = NamedSharding(mesh, PartitionSpec(BATCH_AXES))
    budget = jax.ShapeDtypeStruct((slots,), np.int32, sharding=rows)
    program = Program(
        decode_program(definition, mesh, capacity, steps=1, end_token=0),
        (*weights, state, budget),
        {},
        resident={"params": weights[0], "router_bias": weights[1], "cache": state, "batch": budget},
        outputs={},
    )
    flops = slots * (forward_flops(config, capacity) - forward_flops(config, capacity - 1))
    return StagePrograms(definition, {"decode": program}, flops, slots)


STAGES: dict[str, Callable[[ScaleSettings, Mesh], StagePrograms]] = {"pretrain": pretrain, "rl": rl, "decode": decode}
LOOP_COUNTS = {DECODE_LOOP: 1.0, ROUNDS: 1.0}
"""How often loops run whose length the program does not say: one token is decoded, and one round of rows holds what
belongs to a device's experts where load is balanced."""


def expert_buffer_occupancy(config: ModelConfig, mesh: Mesh) -> float:
    """The share of the rows in an expert layer's buffers that belong to somebody, load being balanced: dispatch makes
    room for capacity_factor times as many, and never for more than all rows of all devices."""
    devices = math.prod(mesh.shape[axis] for axis in EXPERT_AXES)
    return 1.0 if config.dispatch == "dense" or devices == 1 else 1 / min(config.capacity_factor, devices)


def bytes_per_device(tree) -> float:
    """Bytes of a tree of sharded arrays on one device."""
    return float(
        sum(math.prod(a.sharding.shard_shape(a.shape)) * np.dtype(a.dtype).itemsize for a in jax.tree.leaves(tree))
    )


def _training_programs(
    settings: ScaleSettings, mesh: Mesh, batch: BatchSettings, loss: Loss, fields: tuple[str, ...], *, mtp: bool
) -> StagePrograms:
    config, shards = settings.model, batch_shards(mesh)
    _require_context("batch.seq_len", batch.seq_len, config)
    if batch.rows % shards:
        raise UserError(
            f"batch.rows={batch.rows} do not divide over {shards} devices (mesh axes {', '.join(BATCH_AXES)}); use a "
            f"multiple of {shards}."
        )
    zigzag_order(batch.seq_len, mesh.shape["context"])  # refuses rows that do not divide
    definition = ModelDef(config)
    optimizer = make_optimizer(OptimizerConfig(**dataclasses.asdict(settings.optimizer)), steps=1)
    learner = Learner(definition, optimizer, loss, mesh, bias_rate=settings.pretrain.bias_rate)
    shape = (batch.rows, batch.seq_len)
    functions = learner.programs({name: jax.ShapeDtypeStruct(shape, FIELDS[name]) for name in fields})
    gradient, arguments, _ = functions["gradient"]
    update, (state, total, rate), keywords = functions["update"]
    kept = {"params": state.params, "optimizer": (state.optimizer, state.step), "router_bias": state.router_bias}
    accumulated = {"accumulated": total} if batch.accumulate > 1 else {}
    programs = {
        "gradient": Program(
            gradient,
            arguments,
            {},
            resident=kept | {"batch": arguments[2:]} | accumulated,
            outputs={"gradient": total},
            calls_per_step=batch.accumulate,
        ),
        "update": Program(
            update, (state, total, rate), keywords, resident=kept | {"gradient": total}, outputs={}, elementwise=True
        ),
    }
    tokens = batch.rows * batch.accumulate * batch.seq_len
    counted = config if mtp else dataclasses.replace(config, n_mtp_modules=0)
    flops = 3 * batch.rows * batch.accumulate * forward_flops(counted, batch.seq_len)
    return StagePrograms(definition, programs, flops, tokens)


def _weights(definition: ModelDef, mesh: Mesh):
    return jax.tree.map(
        lambda a, sharding: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding),
        definition.shapes(),
        definition.shardings(mesh),
    )


def _require_context(name: str, tokens: int, config: ModelConfig) -> None:
    if not 2 <= tokens <= config.max_context:
        raise UserError(
            f"{name}={tokens} is not between 2 and the model's max_context={config.max_context}; choose a shorter one, "
            "or a model with a longer context."
        )
