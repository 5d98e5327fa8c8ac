"""What differs between two runs: `python -m benchmarks.compare_workdirs RUN_A RUN_B [--tolerance=0]`.

Compares the workdirs of two runs stage by stage: the columns of metrics/STAGE.jsonl without times and counters of the
host, the arrays of the last checkpoint in checkpoints/STAGE, and the records in episodes/STAGE.jsonl (text, number of
tokens, tool calls and weight version of every message, and rewards). Prints one line per stage. The exit code is 1 if
tokens or rewards of an episode differ, if something exists in one run only, or if a metric or a weight differs by more
than --tolerance. Differences are relative: the largest |a - b| of an array or column divided by its largest magnitude.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

# And every column that ends in _s.
HOST_COLUMNS = ("time", "compilations", "sandbox_runs", "sandbox_hits", "groups_queued", "groups_playing")
STAGE_ORDER = ("pretrain", "sft", "before", "rl", "after")


@dataclass
class Comparison:
    """The largest relative difference of the arrays compared, the name of that array, and what has no counterpart."""

    largest: float = 0.0
    where: str = ""
    missing: list[str] = field(default_factory=list)  # "NAME (only in RUN)" or "NAME (shape or dtype)"

    def add(self, name: str, a: np.ndarray, b: np.ndarray) -> None:
        """Compares two arrays of one name; equal bits, NaN included, are not a difference."""
        if a.shape != b.shape or a.dtype != b.dtype:
            self.missing.append(f"{name} ({a.dtype}{list(a.shape)} against {b.dtype}{list(b.shape)})")
            return
        if a.tobytes() == b.tobytes():
            return
        wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
        same = (wide_a == wide_b) | (np.isnan(wide_a) & np.isnan(wide_b))
        distance = np.where(same, 0.0, np.abs(wide_a - wide_b))
        finite = np.isfinite(wide_a) & np.isfinite(wide_b)
        magnitude = max(np.abs(wide_a[finite]).max(initial=0.0), np.abs(wide_b[finite]).max(initial=0.0))
        relative = distance.max(initial=0.0) / magnitude if magnitude and finite[~same].all() else np.inf
        # 0.0 and -0.0 are equal as numbers and not as bits.
        relative = max(float(relative), np.finfo(np.float64).tiny)
        if relative > self.largest:
            self.largest, self.where = relative, name

    def add_all(self, a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray]) -> None:
        """Compares arrays of equal names and lists the names that only one run has."""
        self.missing += [f"{name} (only in A)" for name in a.keys() - b.keys()]
        self.missing += [f"{name} (only in B)" for name in b.keys() - a.keys()]
        for name in sorted(a.keys() & b.keys()):
            self.add(name, a[name], b[name])

    def within(self, tolerance: float) -> bool:
        return not self.missing and self.largest <= tolerance

    def describe(self, noun: str, equal: str = "equal") -> str:
        if self.missing:
            return f"{noun} not comparable: {', '.join(sorted(self.missing)[:4])}"
        if self.largest == 0:
            return f"{noun} {equal}"
        return f"{noun} differ by at most {self.largest:.1e} (relative, at {self.where})"


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a .jsonl file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def metric_columns(path: Path) -> dict[str, np.ndarray]:
    """{column: its numbers, float64[rows], NaN where a row lacks it}, without times and counters of the host."""
    rows = read_lines(path)
    names = {name for row in rows for name, value in row.items() if isinstance(value, int | float)}
    learned = [name for name in names if name not in HOST_COLUMNS and not name.endswith("_s")]
    return {name: np.array([row.get(name, np.nan) for row in rows], np.float64) for name in learned}


def read_checkpoint(folder: Path) -> dict[str, dict[str, np.ndarray]]:
    """{item: {path of the leaf: array}} of one step of an Orbax checkpoint; needs no model."""
    return {path.parent.name: read_item(path.parent) for path in sorted(folder.glob("*/_METADATA"))}


def read_item(folder: Path) -> dict[str, np.ndarray]:
    """Every array of one Orbax item, as NumPy arrays whatever devices it was saved from."""
    stored = json.loads((folder / "_METADATA").read_text())["tree_metadata"].values()
    paths = [tuple(key["key"] for key in leaf["key_metadata"]) for leaf in stored]
    restore_args: dict[str, Any] = {}
    for path in paths:
        node = restore_args
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = ocp.RestoreArgs(restore_type=np.ndarray)
    tree = ocp.PyTreeCheckpointer().restore(folder, restore_args=restore_args)
    leaves = {}
    for path in paths:
        leaf = tree
        for key in path:
            leaf = leaf[key]
        leaves[".".join(path)] = np.asarray(leaf)
    return leaves


def last_step(folder: Path) -> int | None:
    """The number of the last step in checkpoints/STAGE; None without any."""
    return max((int(path.name) for path in folder.glob("*") if path.name.isdigit()), default=None)


def episodes_in_order(path: Path) -> list[dict[str, Any]]:
    """Records by task, seed and step: the order in which episodes end is not part of a result."""

    def key(record: dict[str, Any]) -> str:
        return json.dumps([record.get(name) for name in ("task_id", "seed", "step", "segments")])

    return sorted(read_lines(path), key=key)


def compare_episodes(a: Path, b: Path) -> tuple[bool, str]:
    """(equal, what differs) of two files of episodes."""
    ours, theirs = episodes_in_order(a), episodes_in_order(b)
    if len(ours) != len(theirs):
        return False, f"{len(ours)} against {len(theirs)} episodes"
    pairs = list(zip(ours, theirs, strict=True))
    identities = ("task_id", "seed", "step")
    if any(x.get(name) != y.get(name) for x, y in pairs for name in identities):
        return False, "other episodes were played"
    tokens = sum(x.get("segments") != y.get("segments") for x, y in pairs)
    rewards = sum((x["reward"], x.get("parts")) != (y["reward"], y.get("parts")) for x, y in pairs)
    if tokens or rewards:
        return False, f"of {len(pairs)} episodes {tokens} differ in tokens and {rewards} in rewards"
    return True, "tokens and rewards equal"


@dataclass(frozen=True)
class StageFiles:
    """What a run left of one stage; None for what it did not."""

    metrics: Path | None
    step: Path | None
    episodes: Path | None


def stage_files(run: Path) -> dict[str, StageFiles]:
    """{stage: its files}; evaluate_before and evaluate_after count as before and after."""

    def by_stage(paths: list[Path]) -> dict[str, Path]:
        return {path.stem.removeprefix("evaluate_"): path for path in paths}

    metrics = by_stage(sorted((run / "metrics").glob("*.jsonl")))
    episodes = by_stage(sorted((run / "episodes").glob("*.jsonl")))
    folders = by_stage(sorted((run / "checkpoints").glob("*/")))
    steps = {stage: folder / str(last) for stage, folder in folders.items() if (last := last_step(folder)) is not None}
    stages = metrics.keys() | episodes.keys() | steps.keys()
    return {stage: StageFiles(metrics.get(stage), steps.get(stage), episodes.get(stage)) for stage in stages}


def compare_stage(a: StageFiles, b: StageFiles, tolerance: float) -> tuple[bool, str]:
    """(within the tolerance, the line that says so) of one stage."""
    parts, good = [], True
    for name in ("metrics", "step", "episodes"):
        if (getattr(a, name) is None) != (getattr(b, name) is None):
            good = False
            parts.append(f"{name} only in {'A' if getattr(b, name) is None else 'B'}")
    if a.metrics and b.metrics:
        metrics = Comparison()
        metrics.add_all(metric_columns(a.metrics), metric_columns(b.metrics))
        good &= metrics.within(tolerance)
        parts.append(metrics.describe("losses"))
    if a.episodes and b.episodes:
        equal, text = compare_episodes(a.episodes, b.episodes)
        good &= equal
        parts.append(text)
    if a.step and b.step:
        ours, theirs = read_checkpoint(a.step), read_checkpoint(b.step)
        if a.step.name != b.step.name or ours.keys() != theirs.keys():
            good = False
            parts.append(f"checkpoints {a.step.name} {sorted(ours)} against {b.step.name} {sorted(theirs)}")
        weights, rest = Comparison(), Comparison()
        for item in sorted(ours.keys() & theirs.keys()):
            (weights if item in ("params", "router_bias") else rest).add_all(ours[item], theirs[item])
        good &= weights.within(tolerance) and rest.within(tolerance)
        parts.append(weights.describe("weights", "equal bit for bit"))
        parts.append(rest.describe("optimizer state", "equal bit for bit"))
    return good, ", ".join(parts)


def compare_runs(run_a: Path, run_b: Path, tolerance: float) -> tuple[bool, list[str]]:
    """(within the tolerance, one line per stage) of two workdirs."""
    a, b = stage_files(run_a), stage_files(run_b)
    nothing = StageFiles(None, None, None)

    def position(stage: str) -> tuple[int, str]:
        return (STAGE_ORDER.index(stage) if stage in STAGE_ORDER else len(STAGE_ORDER), stage)

    results = {
        stage: compare_stage(a.get(stage, nothing), b.get(stage, nothing), tolerance)
        for stage in sorted(a.keys() | b.keys(), key=position)
    }
    return all(good for good, _ in results.values()), [f"{stage}: {text}" for stage, (_, text) in results.items()]


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0 if the runs agree, 1 if they differ, 2 if a folder is not a run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_a", type=Path, help="workdir of a run")
    parser.add_argument("run_b", type=Path, help="workdir of another")
    parser.add_argument("--tolerance", type=float, default=0.0, help="largest relative difference (default: 0)")
    options = parser.parse_args(argv)
    for run in (options.run_a, options.run_b):
        if not stage_files(run):
            parser.error(
                f"{run} has no metrics/*.jsonl, episodes/*.jsonl or checkpoints/STAGE/STEP: not a run's workdir"
            )
    # Orbax logs one error per array whose devices are not those that saved it, although NumPy arrays need none.
    logging.disable(logging.ERROR)
    try:
        good, lines = compare_runs(options.run_a, options.run_b, options.tolerance)
    finally:
        logging.disable(logging.NOTSET)
    print("\n".join(lines))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
