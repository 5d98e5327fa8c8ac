"""Results of the demo over several seeds: `python -m benchmarks.demo [--seeds=0,1,2] [--workdir=runs/seeds]`.

Runs `launch.pipeline` once per seed, one after the other, each in its own folder, with progress on stderr. A stopped
run is continued, and a finished one is read. The last line of stdout is one JSON object:
    seeds       results.json of each seed
    mean        {field: mean over the seeds}; minutes are those of the stages, memory is that of the training process
    checks      {check: whether the means pass it}
"""

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.seeded_runs import integers, run_pipeline

FIELDS = {
    "minutes": lambda r: r["wall_seconds"] / 60,
    "peak_rss_gb": lambda r: r["peak_rss_gb"],
    **{
        f"{part}.{field}": lambda r, part=part, field=field: r[part][field]
        for part, fields in {
            "cpt": ("heldout_nll_first", "heldout_nll_last"),
            "rl": (
                "pass_at_1_before",
                "pass_at_1_after",
                "pass_at_8_before",
                "pass_at_8_after",
                "unseen_family_before",
                "unseen_family_after",
            ),
            "summary": (
                "pass_uncompacted_before",
                "pass_before",
                "pass_uncompacted_after",
                "pass_after",
                "tokens_before",
                "tokens_after",
                "compaction_error_before",
                "compaction_error_after",
            ),
        }.items()
        for field in fields
    },
    "long.compaction_error": lambda r: r["summary"]["prompted_baseline"]["compaction_error"],
    "long.tokens": lambda r: r["summary"]["prompted_baseline"]["tokens"],
}


def checks(mean: Mapping[str, float]) -> dict[str, bool]:
    """Returns {check: whether the means pass it}, for runs of configs/tiny.py on two cores."""
    error, tokens = mean["summary.compaction_error_after"], mean["summary.tokens_after"]
    return {
        "at most 20 minutes": mean["minutes"] <= 20,
        "at most 6 GiB": mean["peak_rss_gb"] * 1e9 <= 6 * 2**30,
        "RL at least doubles the pass rate of two bugs": mean["rl.pass_at_1_after"] >= 2 * mean["rl.pass_at_1_before"],
        "pass@8 is not lower after RL": mean["rl.pass_at_8_after"] >= mean["rl.pass_at_8_before"],
        "RL at least halves the compaction error": error <= mean["summary.compaction_error_before"] / 2,
        "summaries are shorter after RL": tokens < mean["summary.tokens_before"],
        "at most half the compaction error of long reports": error <= mean["long.compaction_error"] / 2,
        "at most a fifth of their tokens": tokens <= mean["long.tokens"] / 5,
    }


def summarize(results: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the printed object, from {seed: results.json}."""
    mean = {name: round(statistics.fmean(field(r) for r in results.values()), 4) for name, field in FIELDS.items()}
    return {"seeds": dict(results), "mean": mean, "checks": checks(mean)}


def run(seed: int, workdir: Path) -> dict[str, Any]:
    """Runs the pipeline with one seed and returns its results.json."""
    run_pipeline(workdir, "full", seed)
    return json.loads((workdir / "results.json").read_text())


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2", type=integers, help="comma-separated integers")
    parser.add_argument("--workdir", type=Path, default=Path("runs/seeds"), help="parent of the runs' folders")
    options = parser.parse_args(argv)
    results = {seed: run(seed, options.workdir.absolute() / f"seed{seed}") for seed in options.seeds}
    print(json.dumps(summarize(results)))


if __name__ == "__main__":
    main()
