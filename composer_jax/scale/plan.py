"""The plan of a stage on a slice of TPUs: its programs compiled by XLA's own compiler, their memory, predicted seconds,
and the largest costs."""

import dataclasses
import re
import tempfile
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from composer_jax.errors import UserError
from composer_jax.parallel.sharding import bytes_per_device
from composer_jax.scale.costs import Collective, CostAssumptions, Operation, Region, estimate_cost
from composer_jax.scale.efficiency import Efficiency
from composer_jax.scale.flat_jaxpr import per_device_programs
from composer_jax.scale.network import Network
from composer_jax.scale.programs import (
    LOOP_COUNTS,
    Program,
    Step,
    check_stage,
    expert_buffer_occupancy,
    stage_steps,
)
from composer_jax.scale.roofline import largest_costs, predict_times
from composer_jax.scale.schedule import HloSchedule, Waiting
from composer_jax.scale.topology import Slice, tpu_slice
from composer_jax.schema.run_config import run_config
from composer_jax.train.step_memory import arrays_in

_NEEDED = re.compile(r"\(([\d.]+)([KMGT])\) exceeds available HBM \(([\d.]+)([KMGT])\)")
_USED = re.compile(r"Used ([\d.]+)([KMGT]) of ([\d.]+)([KMGT]) hbm")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of one device while a program runs, as planned by the compiler."""

    arguments: float = 0.0
    outputs: float = 0.0
    """Without outputs that alias arguments."""
    temporary: float = 0.0
    """Includes the program's code."""


@dataclasses.dataclass(frozen=True)
class OutOfMemory:
    """The compiler's report that a program does not fit into a device's memory."""

    needed: float | None
    """Bytes of arguments, results and temporaries together; None if the message lacks them."""
    available: float | None
    message: str


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    jaxpr: ClosedJaxpr
    memory: Memory | OutOfMemory
    schedule: HloSchedule | None
    """None for a program that does not fit into memory."""
    seconds: float
    """Of tracing, lowering and compiling."""


@dataclasses.dataclass(frozen=True)
class PlacedStep:
    """A step on a slice."""

    tpus: Slice
    step: Step
    network: Network
    assumed: CostAssumptions


def place_steps(config: Mapping[str, Any], topology: str, stage: str) -> dict[str, PlacedStep]:
    """Returns the steps of a stage on a slice by name, the main step first.

    Raises:
      UserError: an unknown field, stage or slice, no libtpu, or sizes that do not fit each other.
    """
    run = run_config(config)
    check_stage(run, stage)
    tpus, placed = tpu_slice(topology), {}
    for name, step in stage_steps(run, stage, lambda mesh: tpus.mesh(mesh.axis_sizes)).items():
        occupancy = expert_buffer_occupancy(step.model_def.config, step.mesh)
        assumed = CostAssumptions(dict(step.mesh.shape), occupancy=occupancy, loop_counts=LOOP_COUNTS)
        network = Network(step.mesh, tpus.chip, tpus.torus, Efficiency())
        placed[name] = PlacedStep(tpus, step, network, assumed)
    return placed


def plan_stage(
    config: Mapping[str, Any],
    topology: str,
    stage: str,
    log: Callable[[str], None] = lambda line: None,
    options: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Compiles the programs of a stage for a slice and predicts its steps; docs/scale.md explains every entry.

    The figures of the main step (training, or decoding in evaluate) are at the top level. The sampler's steps of rl and
    evaluate are under "decode" and "prefill".

    Args:
      config: a config of any run, such as configs/kimi_k2_5.py.
      topology: such as v5p:8x8x16.
      stage: pretrain, sft, rl, evaluate, or a phase of the config.
      log: receives progress, a line at a time.
      options: of XLA's compiler, such as {"xla_tpu_enable_sparse_core_collective_offload_all_gather": "true"}.

    Raises:
      UserError: an unknown field, stage or slice, sizes that do not fit each other, or an option that the compiler
        refuses.
    """
    steps = {
        name: plan_step(name, placed, topology, log, options)
        for name, placed in place_steps(config, topology, stage).items()
    }
    main, *_ = steps.values()
    sampling: dict[str, Any] = {}
    if "decode" in steps:
        prefill = {name: figures for name, figures in steps.items() if name.startswith("prefill")}
        sampling = {"decode": steps["decode"], "prefill": prefill}
    return {
        **main,
        **sampling,
        "fits": all(step["fits"] for step in steps.values()),
        "stage": stage,
        "topology": topology,
        "compile_seconds": sum(step["compile_seconds"] for step in steps.values()),
        "versions": {"jax": jax.__version__, "libtpu": version("libtpu")},
        "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def predict_step(placed: PlacedStep) -> dict[str, Any]:
    """Returns the figures of `plan_stage` about time, by tracing alone; takes seconds instead of minutes."""
    jaxprs = {
        name: program.function.trace(*program.arguments, **program.keywords).jaxpr
        for name, program in placed.step.programs.items()
    }
    return _predicted(placed, jaxprs)


def plan_step(
    name: str,
    placed: PlacedStep,
    topology: str,
    log: Callable[[str], None],
    options: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Compiles the programs of one step; returns the figures of `plan_stage` about it."""
    axes = " ".join(f"{axis}={size}" for axis, size in placed.step.mesh.shape.items() if size > 1)
    log(f"{name} on {topology}: {len(placed.tpus.devices)} devices, mesh {axes or 'of one device'}")
    compiled: dict[str, CompiledProgram] = {}
    programs = {}
    for program_name, program in placed.step.programs.items():
        log(f"compiling {program_name} ...")
        result = compiled[program_name] = compile_program(
            program.function, program.arguments, dict(program.keywords), options or {}
        )
        figures = programs[program_name] = memory_breakdown(program, result.memory, placed.tpus.chip.hbm_usable)
        total = figures["total"] / 2**30
        log(f"compiled {program_name} in {result.seconds:.1f} s: {total:.2f} GiB of a device's memory")
    largest_program = max(programs, key=lambda name: programs[name]["total"])
    predicted = _predicted(placed, {name: result.jaxpr for name, result in compiled.items()})
    communication = _compiled_communication(placed, compiled)
    if communication:
        computing = predicted["step_seconds"]["no_overlap"] - predicted["communication_seconds"]
        predicted["step_seconds"]["as_compiled"] = computing + sum(communication["exposed"].values())
    return {
        "fits": all(m["total"] <= m["limit"] and "refused" not in m for m in programs.values()),
        "bytes_per_chip": programs[largest_program],
        "largest_program": largest_program,
        "bytes_per_chip_by_program": programs,
        "host_bytes_per_chip": max(
            bytes_per_device(arrays_in(program.resident, host=True)) for program in placed.step.programs.values()
        ),
        **predicted,
        "compiled_communication": communication,
        "compile_seconds": sum(result.seconds for result in compiled.values()),
    }


def compile_program(function, arguments: tuple, keywords: dict, options: Mapping[str, str]) -> CompiledProgram:
    """Traces and lowers a jitted function at abstract arguments, and compiles it with XLA's own compiler for TPUs.

    Args:
      options: of XLA's compiler.

    Raises:
      UserError: an option that the compiler does not know or refuses.
    """
    began = time.perf_counter()
    traced = function.trace(*arguments, **keywords)
    lowered = traced.lower()
    # JAX's own XLA cannot print every program of libtpu's newer one, so libtpu writes the text.
    with tempfile.TemporaryDirectory() as folder:
        try:
            compiled = lowered.compile({**options, "xla_dump_to": folder, "xla_dump_hlo_as_text": True})
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" in str(error):
                memory = parse_out_of_memory(str(error))
                return CompiledProgram(traced.jaxpr, memory, None, time.perf_counter() - began)
            if options:
                raise UserError(f"the compiler refuses an option of {dict(options)}: {error}") from error
            raise
        # The largest text: parts of the program, such as those of SparseCores, have files of their own.
        dumped = max(Path(folder).glob("*after_optimizations.txt"), key=lambda path: path.stat().st_size)
        schedule = HloSchedule(dumped.read_text(encoding="utf-8"))
    stats = compiled.memory_analysis()
    memory = Memory(
        float(stats.argument_size_in_bytes),
        float(stats.output_size_in_bytes - stats.alias_size_in_bytes),
        float(stats.temp_size_in_bytes + stats.generated_code_size_in_bytes),
    )
    return CompiledProgram(traced.jaxpr, memory, schedule, time.perf_counter() - began)


def parse_out_of_memory(message: str) -> OutOfMemory:
    """Parses the compiler's RESOURCE_EXHAUSTED message; numbers that it lacks are None."""
    match = _NEEDED.search(message) or _USED.search(message)
    if match is None:
        return OutOfMemory(None, None, message)
    size, unit, available, available_unit = match.groups()
    return OutOfMemory(float(size) * _UNITS[unit], float(available) * _UNITS[available_unit], message.splitlines()[0])


def _compiled_communication(
    placed: PlacedStep, compiled: Mapping[str, CompiledProgram]
) -> dict[str, dict[str, float]] | None:
    """Returns the seconds of communication of one step by mesh axes, all and exposed; None if a program has no
    schedule."""
    total = Waiting()
    for name, program in placed.step.programs.items():
        schedule = compiled[name].schedule
        if schedule is None:
            return None
        waiting = schedule.wait_seconds(placed.network, placed.assumed)
        total.add(waiting, program.calls_per_step)
    return {"sent": total.sent, "exposed": total.exposed}


def _predicted(placed: PlacedStep, jaxprs: Mapping[str, Any]) -> dict[str, Any]:
    step, network, sizes = placed.step, placed.network, placed.step.mesh.shape
    whole = Region("step")
    for name, program in step.programs.items():
        if program.is_update:
            inner = _update_cost(program, jaxprs[name], placed.assumed)
        else:
            inner = estimate_cost(jaxprs[name], placed.assumed)
        inner.times *= program.calls_per_step
        whole.regions.append(inner)
    times = predict_times(whole, network)
    devices, chips = len(placed.tpus.devices), placed.tpus.chips
    seconds = times.weight_gathers_overlap
    return {
        "chips": chips,
        "devices": devices,
        "mesh": {axis: size for axis, size in sizes.items() if size > 1},
        "params_total": step.model_def.parameter_count(),
        "params_active": step.model_def.active_parameter_count(),
        "flops_per_step": step.flops,
        "tokens_per_step": step.tokens,
        "executed_flops_per_step": whole.flops() * devices,
        "predicted_step_seconds": seconds,
        "predicted_mfu": step.flops / (seconds * placed.tpus.chip.peak_flops * chips),
        "predicted_tokens_per_second_per_chip": step.tokens / (seconds * chips),
        "step_seconds": {
            "no_overlap": times.no_overlap,
            "weight_gathers_overlap": times.weight_gathers_overlap,
            "full_overlap": times.full_overlap,
        },
        "communication_seconds": sum(
            count * network.seconds(part) for count, part in whole.walk() if isinstance(part, Collective)
        ),
        "profile_seconds": times.profile,
        "largest_seconds": largest_costs(whole, network),
        "collective_bytes": whole.bytes_sent(sizes),
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
    """Returns the bytes of one device by purpose: resident arrays, outputs, temporaries, and other (padding)."""
    on_device = lambda tree: bytes_per_device(arrays_in(tree, host=False))  # noqa: E731
    parts = {name: on_device(tree) for name, tree in program.resident.items()}
    for name, tree in program.outputs.items():
        parts[name] = parts.get(name, 0.0) + on_device(tree)
    arguments, outputs = on_device(program.arguments), on_device(program.outputs)
    if isinstance(memory, OutOfMemory):
        # The compiler's number includes arguments and results; without a number the temporaries are unknown.
        needed = memory.needed if memory.needed is not None else arguments + outputs
        parts |= {"temporary": needed - arguments - outputs, "other": 0.0}
        extra = {"refused": memory.message}
    else:
        # The difference is negative if the program leaves arguments unused (the output head in prefill).
        other = max(0.0, memory.arguments + memory.outputs - arguments - outputs)
        parts |= {"temporary": memory.temporary, "other": other}
        extra = {}
    return parts | {"total": sum(parts.values()), "limit": limit} | extra


def _update_cost(program: Program, jaxpr: Any, assumed: CostAssumptions) -> Region:
    """Returns the cost of an optimizer's update.

    It reads all its arguments, overwrites the state, and reads the gradient twice: for its norm and for its use. What
    it computes under jax.shard_map, as Muon does, comes on top.
    """
    state = bytes_per_device(program.arguments[0])
    gradient = bytes_per_device(program.arguments[1])
    elementwise = Operation("hbm", 0.0, 2 * state + 2 * gradient, "update")
    inner = [estimate_cost(part, assumed) for part in per_device_programs(jaxpr)]
    return Region("update", operations=[elementwise], regions=inner)
