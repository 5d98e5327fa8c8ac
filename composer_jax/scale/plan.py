"""One stage of a configuration on one slice of TPUs: does it fit, how long is a step, and what takes the time."""

import dataclasses
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

import jax
from jax.sharding import Mesh

from composer_jax.errors import UserError
from composer_jax.scale.chips import Efficiency
from composer_jax.scale.compiler import Memory, OutOfMemory, compile_program
from composer_jax.scale.costs import CostAssumptions, Operation, Region, estimate_cost
from composer_jax.scale.network import Network
from composer_jax.scale.programs import (
    LOOP_COUNTS,
    STAGES,
    Program,
    StagePrograms,
    bytes_per_device,
    expert_buffer_occupancy,
)
from composer_jax.scale.roofline import largest_costs, predict_times
from composer_jax.scale.settings import scale_settings
from composer_jax.scale.topology import Slice, tpu_slice


@dataclasses.dataclass(frozen=True)
class PlacedStage:
    """A stage of a configuration on a slice."""

    tpus: Slice
    mesh: Mesh
    stage: StagePrograms
    network: Network
    assumed: CostAssumptions


def place_stage(config: Mapping[str, Any], topology: str, stage: str) -> PlacedStage:
    """Puts together what was asked for.

    Raises:
      UserError: no such stage or slice, or sizes that do not fit each other.
    """
    if stage not in STAGES:
        raise UserError(f"--stage={stage} is unknown; the stages are {', '.join(STAGES)}.")
    settings, tpus = scale_settings(config), tpu_slice(topology)
    mesh = tpus.mesh(vars(settings.decode.mesh if stage == "decode" else settings.mesh))
    assumed = CostAssumptions(
        dict(mesh.shape), occupancy=expert_buffer_occupancy(settings.model, mesh), loop_counts=LOOP_COUNTS
    )
    network = Network(mesh, tpus.chip, tpus.torus, Efficiency())
    return PlacedStage(tpus, mesh, STAGES[stage](settings, mesh), network, assumed)


def plan_stage(
    config: Mapping[str, Any], topology: str, stage: str, log: Callable[[str], None] = lambda line: None
) -> dict:
    """Compiles the programs of a stage for a slice and predicts a step; docs/scale.md explains every entry.

    Args:
      config: as configs/kimi_k2_5.py has it.
      topology: such as v5p:8x8x16.
      stage: pretrain, rl or decode.
      log: hears of the progress.

    Raises:
      UserError: no such stage or slice, or sizes that do not fit each other.
    """
    placed = place_stage(config, topology, stage)
    log(f"{stage} on {topology}: {len(placed.tpus.devices)} devices, mesh {_format_axes(placed.mesh.shape)}")
    programs, jaxprs, seconds_to_compile = {}, {}, 0.0
    for name, program in placed.stage.programs.items():
        log(f"compiling {name} ...")
        jaxprs[name], memory, seconds = compile_program(program.function, program.arguments, dict(program.keywords))
        seconds_to_compile += seconds
        programs[name] = memory_breakdown(program, memory, placed.tpus.chip.hbm_usable)
        log(f"compiled {name} in {seconds:.1f} s: {_format_gib(programs[name]['total'])} of one device's memory")
    largest_program = max(programs, key=lambda name: programs[name]["total"])
    return {
        "fits": all(m["total"] <= m["limit"] and "refused" not in m for m in programs.values()),
        "stage": stage,
        "topology": topology,
        "bytes_per_chip": programs[largest_program],
        "largest_program": largest_program,
        "bytes_per_chip_by_program": programs,
        **_predicted(placed, jaxprs),
        "compile_seconds": seconds_to_compile,
        "versions": {"jax": jax.__version__, "libtpu": version("libtpu")},
        "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def predict_stage(config: Mapping[str, Any], topology: str, stage: str) -> dict:
    """What `plan` says of time, from tracing alone: nothing of memory, and in seconds instead of minutes."""
    placed = place_stage(config, topology, stage)
    jaxprs = {
        name: program.function.trace(*program.arguments, **program.keywords).jaxpr
        for name, program in placed.stage.programs.items()
    }
    return _predicted(placed, jaxprs)


def _predicted(placed: PlacedStage, jaxprs: Mapping[str, Any]) -> dict:
    stage, network, sizes = placed.stage, placed.network, placed.mesh.shape
    step = Region("step")
    for name, program in stage.programs.items():
        inner = _elementwise_cost(program) if program.elementwise else estimate_cost(jaxprs[name], placed.assumed)
        inner.times *= program.calls_per_step
        step.regions.append(inner)
    times = predict_times(step, network)
    devices, chips = len(placed.tpus.devices), placed.tpus.chips
    return {
        "chips": chips,
        "devices": devices,
        "mesh": {axis: size for axis, size in sizes.items() if size > 1},
        "params_total": stage.definition.parameter_count(),
        "params_active": stage.definition.active_parameter_count(),
        "flops_per_step": stage.flops,
        "tokens_per_step": stage.tokens,
        "executed_flops_per_step": step.flops() * devices,
        "predicted_step_seconds": times.weight_gathers_overlap,
        "predicted_mfu": stage.flops / (times.weight_gathers_overlap * placed.tpus.chip.peak_flops * chips),
        "predicted_tokens_per_second_per_chip": stage.tokens / (times.weight_gathers_overlap * chips),
        "step_seconds": {
            "no_overlap": times.no_overlap,
            "weight_gathers_overlap": times.weight_gathers_overlap,
            "full_overlap": times.full_overlap,
        },
        "profile_seconds": times.profile,
        "largest_seconds": largest_costs(step, network),
        "collective_bytes": step.bytes_sent(sizes),
        "axes": {
            axis: {
                "bytes_per_second": network.bandwidth((axis,)),
                "torus": [{"chips": s.chips, "links": s.links} for s in network.spans((axis,))],
            }
            for axis, size in sizes.items()
            if size > 1
        },
        "assumed": vars(network.efficiency) | {"expert_buffer_occupancy": placed.assumed.occupancy},
    }


def memory_breakdown(program: Program, memory: Memory | OutOfMemory, limit: float) -> dict[str, Any]:
    """Bytes of one device while the program runs, by what they are for: what it holds, what it makes, temporaries, and
    whatever else the compiler adds (padding)."""
    parts = {name: bytes_per_device(tree) for name, tree in program.resident.items()}
    for name, tree in program.outputs.items():
        parts[name] = parts.get(name, 0.0) + bytes_per_device(tree)
    arguments, made = bytes_per_device(program.arguments), bytes_per_device(program.outputs)
    if isinstance(memory, OutOfMemory):
        # Its number holds arguments and results; without a number there is nothing to say of the temporaries.
        needed = memory.needed if memory.needed is not None else arguments + made
        parts |= {"temporary": needed - arguments - made, "other": 0.0}
        extra = {"refused": memory.message}
    else:
        other = memory.arguments + memory.outputs - arguments - made
        parts |= {"temporary": memory.temporary, "other": other}
        extra = {}
    return parts | {"total": sum(parts.values()), "limit": limit} | extra


def _elementwise_cost(program: Program) -> Region:
    """An optimizer's update: reads all its arguments and overwrites the state; the gradient is read twice, for its norm
    and for its use."""
    state = bytes_per_device(program.arguments[0])
    gradient = bytes_per_device(program.arguments[1])
    return Region("update", operations=[Operation("hbm", 0.0, 2 * state + 2 * gradient, "update")])


def _format_axes(sizes: Mapping[str, int]) -> str:
    return " ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "of one device"


def _format_gib(number: float) -> str:
    return f"{number / 2**30:.2f} GiB"
