"""Runs of one config that differ in a seed and a few fields, and the file of their rows: what benchmarks compare."""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from composer_jax.atomic_write import write_atomically
from composer_jax.observe.metrics import read_metrics

SIZES = ("full", "smoke")
"""Of the configs that these benchmarks run."""
Row = dict[str, Any]
"""Of one run: seed, variant, and what was measured."""


def integers(text: str) -> list[int]:
    """Returns the seeds of a flag: integers with commas between them."""
    return [int(number) for number in text.split(",")]


def make_parser(
    doc: str | None, workdir: str, config: str = "configs/tiny.py", rows: str = "rows.json"
) -> argparse.ArgumentParser:
    """Returns a parser of the flags that all of these benchmarks have: --seeds, --workdir, --rows, --size.

    Args:
      doc: of the benchmark's module, printed by --help.
      workdir: default of --workdir. rows: name of the file in it that is the default of --rows, which is None.
      config: whose sizes --size names.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2", type=integers, help="comma-separated integers (default: 0,1,2)")
    parser.add_argument(
        "--workdir", type=Path, default=Path(workdir), help=f"parent of the runs' folders (default: {workdir})"
    )
    parser.add_argument("--rows", type=Path, help=f"file of the finished rows (default: {rows} in the workdir)")
    parser.add_argument("--size", choices=SIZES, default="full", help=f"size of {config} (default: full)")
    return parser


def run_entry(entry: str, *arguments: str) -> None:
    """Runs an entry point with its output on stderr; ends the program if it fails."""
    command = [sys.executable, "-m", entry, *arguments]
    process = subprocess.Popen(command, stdout=sys.stderr, cwd=Path(__file__).parents[1])
    try:
        code = process.wait()
    except KeyboardInterrupt:
        process.wait()  # Ctrl-C reaches the child as well; it saves and exits
        raise SystemExit(130) from None
    if code:
        raise SystemExit(code)  # the child has printed the reason


def run_pipeline(
    workdir: Path,
    size: str,
    seed: int,
    *arguments: str,
    config: str = "configs/tiny.py",
    entry: str = "launch.pipeline",
    **fields: Any,
) -> None:
    """Runs or continues launch.pipeline, or another entry point, with these fields of the config.

    Args:
      arguments: of the entry point, beside those about the config.
      fields: names in which two underlines stand for a dot.
    """
    flags = [f"--config.{name.replace('__', '.')}={value}" for name, value in fields.items()]
    run_entry(entry, *arguments, f"--config={config}:{size}", f"--workdir={workdir}", f"--config.seed={seed}", *flags)


def complete_rows(
    file: Path, seeds: Sequence[int], variants: Sequence[str], measure: Callable[[int, str], Row]
) -> list[Row]:
    """Returns the rows of a file and those it lacks, which `measure(seed, variant)` makes; each is stored at once."""
    rows: list[Row] = json.loads(file.read_bytes()) if file.exists() else []
    for seed in seeds:
        for variant in variants:
            if any((row["seed"], row["variant"]) == (seed, variant) for row in rows):
                continue
            rows.append(measure(seed, variant))
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, (json.dumps(rows, indent=1) + "\n").encode())
    return rows


def runs_of_common_seeds(rows: Sequence[Row], variants: Sequence[str]) -> dict[str, dict[int, Row]]:
    """Returns variant -> seed -> row, of the seeds that all variants have, in ascending order."""
    found = {name: {row["seed"]: row for row in rows if row["variant"] == name} for name in variants}
    seeds = sorted(set.intersection(*(set(runs) for runs in found.values())))
    return {name: {seed: runs[seed] for seed in seeds} for name, runs in found.items()}


def curves(metrics: Path, columns: Sequence[str]) -> dict[str, list[float | None]]:
    """Returns the means of columns over each tenth of the steps; None where no step has a number."""
    rows = read_metrics(metrics)
    parts = [rows[len(rows) * i // 10 : len(rows) * (i + 1) // 10] for i in range(10)] if rows else []

    def mean(part: Sequence[Mapping[str, Any]], name: str) -> float | None:
        values = [row[name] for row in part if row.get(name) is not None]
        return round(statistics.fmean(values), 5) if values else None

    return {name: [mean(part, name) for part in parts] for name in columns}
