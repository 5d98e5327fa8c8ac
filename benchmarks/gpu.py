"""A GPU against its limits and its peers: `python -m benchmarks.gpu [train] [moe] [attention] [grouped] [decode] [rl]`.

Every part runs in a process of its own on one card; none named: all. Prints progress on stderr and, as the last line of
stdout, one JSON object with a key per part. docs/performance.md says what the keys mean. A part that fails
has {"error"} instead, and the exit status is 1. `--small` runs the parts in a tiny form, on a CPU, too.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu_parts.compare_training import compare_training
from benchmarks.gpu_parts.timing import note
from benchmarks.gpu_parts.worker import Figures, PartError, run_part
from launch.huge_pages import restart_with_huge_pages

PARTS = ("train", "moe", "attention", "grouped", "decode", "rl")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} (default: all)")
    parser.add_argument("--small", action="store_true", help="the tiny form, which any machine runs")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each side of train (default: 3)")
    parser.add_argument("--torch-python", default=sys.executable, help="Python with transformers (default: this one)")
    o = parser.parse_args(argv)
    if unknown := [part for part in o.parts if part not in PARTS]:
        parser.error(f"there is no part {unknown[0]}; use {', '.join(PARTS)}")
    if o.rounds < 1:
        parser.error(f"--rounds={o.rounds} measures nothing; use at least 1")
    small = ["--small"] * o.small
    figures: dict[str, Figures] = {}
    with tempfile.TemporaryDirectory(prefix="composer-gpu-") as folder:
        cache = Path(folder)

        def train() -> Figures:
            return compare_training(
                lambda: run_part("train", small, cache),
                lambda options: run_part("train_torch", [*options, *small], cache, o.torch_python),
                o.rounds,
                small=o.small,
            )

        for part in dict.fromkeys(o.parts or PARTS):
            note(f"{part} ...")
            try:
                figures[part] = train() if part == "train" else run_part(part, small, cache)
            except PartError as error:
                figures[part] = {"error": str(error)}
    print(json.dumps(figures))
    if any("error" in of_part for of_part in figures.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    restart_with_huge_pages()  # as every entry point does
    main()
