"""A GPU against its limits and its peers: `python -m benchmarks.gpu [train] [moe] [attention] [grouped] [decode] [rl]`.

Runs every part in processes of their own on one card; all parts if none is named. Prints progress and the figures of
each part on stderr and, as the last line of stdout, one JSON object with a key per part. docs/performance.md says what
the keys mean. A part that fails has {"error"}, and the exit status is 1. `--small` runs the parts in a tiny form, on a
CPU, too.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from benchmarks.gpu_parts.compare_training import compare_training
from benchmarks.gpu_parts.output import Figures, note
from benchmarks.gpu_parts.worker import NO_CARD, NoCardError, PartError, run_part
from launch.huge_pages import restart_with_huge_pages

PARTS = ("train", "moe", "attention", "grouped", "decode", "rl")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} (default: all)")
    parser.add_argument("--small", action="store_true", help="the tiny form, which any machine runs")
    parser.add_argument("--rounds", type=int, default=2, help="processes of each side of train (default: 2)")
    parser.add_argument("--limit", type=float, default=300, help="seconds of a process (default: 300)")
    parser.add_argument(
        "--torch-python",
        default=sys.executable,
        help="Python of an environment of their own for PyTorch and transformers, without our extra [gpu]",
    )
    o = parser.parse_args(argv)
    if unknown := [part for part in o.parts if part not in PARTS]:
        parser.error(f"there is no part {unknown[0]}; use {', '.join(PARTS)}")
    if o.rounds < 1:
        parser.error(f"--rounds={o.rounds} measures nothing; use at least 1")
    small = ["--small"] * o.small
    figures: dict[str, Figures] = {}
    with tempfile.TemporaryDirectory(prefix="composer-gpu-") as folder:
        cache = Path(folder)

        def run(part: str, options: Sequence[str] = (), python: str = sys.executable) -> Figures:
            return run_part(part, [*options, *small], cache, o.limit, python)

        def train() -> Figures:
            peer = lambda options: run("train_torch", options, o.torch_python)  # noqa: E731
            return compare_training(recomputing_where_needed("train", run), peer, o.rounds, small=o.small)

        measures = {part: partial(run, part) for part in PARTS}
        measures |= {"train": train, "moe": recomputing_where_needed("moe", run)}
        for part in dict.fromkeys(o.parts or PARTS):
            note(f"{part} ...")
            try:
                figures[part] = measures[part]()
            except PartError as error:
                if isinstance(error, NoCardError) and not figures:
                    raise SystemExit(NO_CARD) from None
                figures[part] = {"error": str(error)}
            note(json.dumps({part: figures[part]}))
    print(json.dumps(figures))
    if any("error" in of_part for of_part in figures.values()):
        raise SystemExit(1)


def recomputing_where_needed(part: str, run: Callable[[str, Sequence[str]], Figures]) -> Callable[[], Figures]:
    """Returns a function that measures a training part, with layers recomputed once activations did not fit.

    The attempt that fits has a process of its own, so first step and peak memory leave out the one that did not.

    run: measures a part with these options.
    """
    options: list[str] = []

    def measure() -> Figures:
        if not options:
            try:
                return run(part, ())
            except PartError as error:
                if "RESOURCE_EXHAUSTED" not in str(error):
                    raise
            note("  too little memory for all activations: layers are recomputed in the backward pass")
            options.append("--recompute")
        return run(part, options)

    return measure


if __name__ == "__main__":
    restart_with_huge_pages()  # as every entry point does
    main()
