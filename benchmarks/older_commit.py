"""An older commit of this repository, whose figures a benchmark compares with those of the working tree."""

import statistics
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path


def unpack(commit: str, folder: Path) -> Path:
    """Writes the files of a commit into a folder."""
    archive = subprocess.run(["git", "archive", commit], cwd=Path(__file__).parents[1], capture_output=True, check=True)
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
    return folder


def median_ratio(ours: Sequence[Mapping[str, float]], older: Sequence[Mapping[str, float]]) -> float:
    """Returns the median over the pairs of ours' tokens_per_s over the older commit's.

    The two of a pair were measured one after the other, so that a machine whose speed drifts changes both.
    """
    pairs = zip(ours, older, strict=True)
    return round(statistics.median(new["tokens_per_s"] / old["tokens_per_s"] for new, old in pairs), 3)
