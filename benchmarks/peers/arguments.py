"""What the scripts of all peers share: their arguments, the file of conversations, and the figures they print."""

import argparse
import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Talks = list[dict[str, Any]]
"""The fields of benchmarks.conversations.Talk: `prompt`, `observations` and `lengths`."""


def write_talks(path: Path, talks: Sequence[Any]) -> None:
    """Writes conversations, each a dataclass with the fields of a Talk, for `read_talks`."""
    path.write_text(json.dumps([dataclasses.asdict(talk) for talk in talks]), encoding="utf-8")


def read_talks(path: Path) -> Talks:
    """Returns the conversations that `write_talks` wrote."""
    return json.loads(path.read_text(encoding="utf-8"))


def parse_arguments(description: str | None) -> argparse.Namespace:
    """Returns --talks and --model (paths) and --threads (a number) of a peer's script."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--talks", type=Path, required=True, help="file with the conversations")
    parser.add_argument("--model", type=Path, required=True, help="what the script's description says")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads (default: one for each core)")
    return parser.parse_args()


def count_useful_tokens(talks: Talks) -> int:
    """Returns the sampled tokens that conversations need; what a padded batch samples beyond them does not count."""
    return sum(sum(talk["lengths"]) for talk in talks)


def print_figures(talks: Talks, seconds: float, first_message: Sequence[int]) -> None:
    """Prints the figures of a play: tokens_per_s, and the tokens of the first conversation's first message."""
    rate = count_useful_tokens(talks) / seconds
    print(json.dumps({"tokens_per_s": rate, "seconds": seconds, "first_message": [int(t) for t in first_message]}))
