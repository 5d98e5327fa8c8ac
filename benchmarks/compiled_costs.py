"""What XLA says that training steps cost on TPUs: `python -m benchmarks.compiled_costs [CASE ...] [--against=COMMIT]`.

A case is a network and a slice: moonlight-v6e, and tiny-, qwen3- and kimi-, each with -v5e, -v5p and -tpu7x (tiny is
the demo's network, kimi is Kimi K2.5 with 32 experts). There is one layer of each kind, so that every loop runs once,
because XLA's cost analysis counts a loop body once. The programs are the gradient and the update of pretraining,
compiled by libtpu without a TPU, some minutes each. Without cases: moonlight-v6e.

Prints one JSON object, {case: {program: figures}} of one device:
    gigaflops, gigabytes      arithmetic and memory traffic by XLA's count, without Pallas kernels, such as attention's.
                              Its traffic includes values that stay on the chip and the operands of collectives.
    milliseconds              XLA's estimate of the time, without Pallas kernels
    our_gigaflops, our_gigabytes    our count of the gradient (composer_jax/scale/costs.py)
With --against, an older commit is compiled beside the working tree, and figures of XLA's are pairs [before, now].
"""

import argparse
import importlib
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from composer_jax.scale.topology import disable_tpu_hardware

Figures = dict[str, dict[str, Any]]
"""By program."""


class Case(NamedTuple):
    config: str
    """Module, and behind a colon the argument of get_config if there is one."""
    topology: str
    model: dict[str, Any]
    """What is changed in the network."""
    rows: int = 8
    length: int | None = None
    """Tokens of a row; None: those of the config."""


_ONCE = {"head_chunk": None, "expert_chunk": None, "vocab_size": 16_384}
NETWORKS = {
    "tiny": Case("tiny", "", {"n_layers": 2, "scan_unroll": 1}, rows=16),
    "qwen3": Case("qwen3_30b_a3b", "", _ONCE | {"n_layers": 1}, length=4096),
    "kimi": Case("kimi_k2_5:4k", "", _ONCE | {"n_layers": 2, "n_experts": 32}, length=2048),
}
SLICES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "tpu7x": "tpu7x:2x2x1"}
CASES = {"moonlight-v6e": Case("moonlight:v6e", "v6e:2x2", _ONCE | {"n_layers": 2})} | {
    f"{name}-{chip}": case._replace(topology=topology)
    for name, case in NETWORKS.items()
    for chip, topology in SLICES.items()
}


def place_case(case: Case) -> Any:
    """Returns the training step of a case on its slice."""
    from composer_jax.scale.plan import place_steps

    module, _, argument = case.config.partition(":")
    get_config: Callable[..., Any] = importlib.import_module(f"configs.{module}").get_config
    config = (get_config(argument) if argument else get_config()).to_dict()
    config["model"] |= case.model
    devices = 8 if case.topology.startswith("tpu7x") else 4
    config["mesh"] = {"replica": 1, "data": devices // 2, "expert": 2}
    config["pretrain"] |= {"batch_size": case.rows} | ({"seq_len": case.length} if case.length else {})
    return place_steps(config, case.topology, "pretrain")["train"]


def case_figures(name: str) -> Figures:
    """Returns the figures of both programs of a case."""
    from composer_jax.scale.costs import estimate_cost

    placed, figures = place_case(CASES[name]), {}
    for program_name, program in placed.step.programs.items():
        print(f"{name}: compiling {program_name} ...", file=sys.stderr, flush=True)
        traced = program.function.trace(*program.arguments, **program.keywords)
        theirs = traced.lower().compile().cost_analysis()
        figures[program_name] = {
            "gigaflops": round(theirs["flops"] / 1e9, 2),
            "gigabytes": round(theirs["bytes accessed"] / 1e9, 3),
            "milliseconds": round(1e3 * known_seconds(theirs["optimal_seconds"]), 3),
        }
        if not program.is_update:
            ours = estimate_cost(traced.jaxpr, placed.assumed)
            figures[program_name] |= {
                "our_gigaflops": round(ours.flops() / 1e9, 2),
                "our_gigabytes": round(ours.hbm_bytes() / 1e9, 3),
            }
    return figures


def known_seconds(optimal_seconds: float) -> float:
    """Returns XLA's estimate without operations whose time it does not know.

    It counts -1 s for each of those, such as the custom call ConcatBitcast. One layer takes less than a second.
    """
    return optimal_seconds - math.floor(optimal_seconds)


def older_figures(commit: str, cases: Sequence[str]) -> dict[str, Figures]:
    """Returns the figures of this script with the library of another commit."""
    from benchmarks.older_commit import unpack

    with tempfile.TemporaryDirectory() as folder:
        checkout = unpack(commit, Path(folder))
        command = [sys.executable, str(Path(__file__)), *cases]
        environment = os.environ | {"PYTHONPATH": str(checkout)}
        done = subprocess.run(command, cwd=checkout, env=environment, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def pair_figures(before: Mapping[str, Figures], now: Mapping[str, Figures]) -> dict[str, Figures]:
    """Returns `now` with each figure of XLA's as [before, now]."""

    def paired(case: str, program: str, name: str, value: float) -> Any:
        return value if name.startswith("our_") else [before[case][program][name], value]

    return {
        case: {
            program: {name: paired(case, program, name, value) for name, value in figures.items()}
            for program, figures in programs.items()
        }
        for case, programs in now.items()
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)} (default: moonlight-v6e)")
    parser.add_argument("--against", default="", metavar="COMMIT", help="an older commit to compare with")
    o = parser.parse_args(argv)
    cases = o.cases or ["moonlight-v6e"]
    if unknown := [case for case in cases if case not in CASES]:
        parser.error(f"there is no case {unknown[0]}; use {', '.join(CASES)}")
    figures = {case: case_figures(case) for case in cases}
    print(json.dumps(pair_figures(older_figures(o.against, cases), figures) if o.against else figures))


if __name__ == "__main__":
    disable_tpu_hardware()
    main()
