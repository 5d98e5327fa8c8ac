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
from composer_jax.scale.compiling import Memory, Refusal, compile_program
from composer_jax.scale.costs import Operation, Region, Rules, cost_of
from composer_jax.scale.network import Network
from composer_jax.scale.programs import LOOPS, STAGES, Program, Stage, local_bytes, owned_share
from composer_jax.scale.roofline import largest, predict
from composer_jax.scale.settings import scale_settings
from composer_jax.scale.topology import Slice, tpu_slice


@dataclasses.dataclass(frozen=True)
class Job:
    """A stage of a configuration on a slice."""

    tpus: Slice
    mesh: Mesh
    work: Stage
    network: Network
    rules: Rules


def job(config: Mapping[str, Any], topology: str, stage: str) -> Job:
    """Puts together what was asked for.

    Raises:
      UserError: no such stage or slice, or sizes that do not fit each other.
    """
    if stage not in STAGES:
        raise UserError(f"--stage={stage} is unknown; the stages are {', '.join(STAGES)}.")
    settings, tpus = scale_settings(config), tpu_slice(topology)
    mesh = tpus.mesh(vars(settings.decode.mesh if stage == "decode" else settings.mesh))
    rules = Rules(dict(mesh.shape), owned=owned_share(settings.model, mesh), loops=LOOPS)
    network = Network(mesh, tpus.chip, tpus.torus, Efficiency())
    return Job(tpus, mesh, STAGES[stage](settings, mesh), network, rules)


def plan(config: Mapping[str, Any], topology: str, stage: str, say: Callable[[str], None] = lambda line: None) -> dict:
    """Compiles the programs of a stage for a slice and predicts a step; docs/scale.md explains every entry.

    Args:
      config: as configs/kimi_k2_5.py has it.
      topology: such as v5p:8x8x16.
      stage: pretrain, rl or decode.
      say: hears of the progress.

    Raises:
      UserError: no such stage or slice, or sizes that do not fit each other.
    """
    wanted = job(config, topology, stage)
    say(f"{stage} on {topology}: {len(wanted.tpus.devices)} devices, mesh {_listed(wanted.mesh.shape)}")
    programs, jaxprs, seconds_to_compile = {}, {}, 0.0
    for name, program in wanted.work.programs.items():
        say(f"compiling {name} ...")
        jaxprs[name], memory, seconds = compile_program(program.function, program.arguments, dict(program.keywords))
        seconds_to_compile += seconds
        programs[name] = memory_of(program, memory, wanted.tpus.chip.hbm_usable)
        say(f"compiled {name} in {seconds:.1f} s: {_gib(programs[name]['total'])} of one device's memory")
    largest_program = max(programs, key=lambda name: programs[name]["total"])
    return {
        "fits": all(m["total"] <= m["limit"] and "refused" not in m for m in programs.values()),
        "stage": stage,
        "topology": topology,
        "bytes_per_chip": programs[largest_program],
        "largest_program": largest_program,
        "bytes_per_chip_by_program": programs,
        **_predicted(wanted, jaxprs),
        "compile_seconds": seconds_to_compile,
        "versions": {"jax": jax.__version__, "libtpu": version("libtpu")},
        "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def prediction(config: Mapping[str, Any], topology: str, stage: str) -> dict:
    """What `plan` says of time, from tracing alone: nothing of memory, and in seconds instead of minutes."""
    wanted = job(config, topology, stage)
    jaxprs = {
        name: program.function.trace(*program.arguments, **program.keywords).jaxpr
        for name, program in wanted.work.programs.items()
    }
    return _predicted(wanted, jaxprs)


def _predicted(wanted: Job, jaxprs: Mapping[str, Any]) -> dict:
    work, network, sizes = wanted.work, wanted.network, wanted.mesh.shape
    step = Region("step")
    for name, program in work.programs.items():
        inner = _once_through(program) if program.elementwise else cost_of(jaxprs[name], wanted.rules)
        inner.times *= program.times
        step.regions.append(inner)
    times = predict(step, network)
    devices, chips = len(wanted.tpus.devices), wanted.tpus.chips
    return {
        "chips": chips,
        "devices": devices,
        "mesh": {axis: size for axis, size in sizes.items() if size > 1},
        "params_total": work.definition.parameter_count(),
        "params_active": work.definition.active_parameter_count(),
        "flops_per_step": work.flops,
        "tokens_per_step": work.tokens,
        "executed_flops_per_step": step.flops() * devices,
        "predicted_step_seconds": times.gathers,
        "predicted_mfu": work.flops / (times.gathers * wanted.tpus.chip.peak_flops * chips),
        "predicted_tokens_per_second_per_chip": work.tokens / (times.gathers * chips),
        "step_seconds": {
            "no_overlap": times.none,
            "weight_gathers_overlap": times.gathers,
            "full_overlap": times.full,
        },
        "profile_seconds": times.profile,
        "largest_seconds": largest(step, network),
        "collective_bytes": step.sent(sizes),
        "axes": {
            axis: {
                "bytes_per_second": network.bandwidth((axis,)),
                "torus": [{"chips": s.chips, "links": s.links} for s in network.spans((axis,))],
            }
            for axis, size in sizes.items()
            if size > 1
        },
        "assumed": vars(network.efficiency) | {"owned_share_of_sorted_rows": wanted.rules.owned},
    }


def memory_of(program: Program, memory: Memory | Refusal, limit: float) -> dict[str, Any]:
    """Bytes of one device while the program runs, by what they are for: what it holds, what it makes, temporaries, and
    whatever else the compiler adds (padding)."""
    parts = {name: local_bytes(tree) for name, tree in program.holds.items()}
    for name, tree in program.makes.items():
        parts[name] = parts.get(name, 0.0) + local_bytes(tree)
    arguments, made = local_bytes(program.arguments), local_bytes(program.makes)
    if isinstance(memory, Refusal):
        # Its number holds arguments and results; without a number there is nothing to say of the temporaries.
        needed = memory.needed if memory.needed is not None else arguments + made
        parts |= {"temporary": needed - arguments - made, "other": 0.0}
        extra = {"refused": memory.message}
    else:
        other = memory.arguments + memory.outputs - arguments - made
        parts |= {"temporary": memory.temporary, "other": other}
        extra = {}
    return parts | {"total": sum(parts.values()), "limit": limit} | extra


def _once_through(program: Program) -> Region:
    """An optimizer's update: reads all its arguments and overwrites the state; the gradient is read twice, for its norm
    and for its use."""
    state = local_bytes(program.arguments[0])
    gradient = local_bytes(program.arguments[1])
    return Region("update", operations=[Operation("hbm", 0.0, 2 * state + 2 * gradient, "update")])


def _listed(sizes: Mapping[str, int]) -> str:
    return " ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "of one device"


def _gib(number: float) -> str:
    return f"{number / 2**30:.2f} GiB"
