"""Sources on disk for the tests of preparation: source trees, git repositories, a tokenizer."""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Mapping
from pathlib import Path

from composer_jax.data.tokenizer import Tokenizer

WORDS = [f"{a}{b}" for a in ("load", "save", "count", "merge", "split", "parse") for b in range(60)]


def code(seed: int, lines: int = 30) -> str:
    """A Python file whose words are unlike those of another seed."""
    rng = random.Random(seed)
    return "".join(f"{rng.choice(WORDS)}_{seed} = {rng.choice(WORDS)}({rng.choice(WORDS)})\n" for _ in range(lines))


def write_files(folder: Path, files: Mapping[str, str | bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def git(folder: Path, *arguments: str, second: int = 0) -> str:
    """The output of git, in which it is the given second of the year 2020."""
    identity = ["-c", "user.name=A", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    environment = os.environ | {"GIT_COMMITTER_DATE": f"2020-01-01T00:00:{second:02d}Z"}
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout


def commit(folder: Path, message: str) -> None:
    """Commits what is added, a second later than the commits before."""
    count = len(git(folder, "rev-list", "--all").split())
    git(folder, "commit", "--quiet", "--date", "2020-01-01T00:00:00Z", "--message", message, second=count)


def make_repository(folder: Path, *commits: tuple[str, Mapping[str, str | bytes]]) -> Path:
    """A git repository with these commits: message, and the files that it changes."""
    folder.mkdir(parents=True, exist_ok=True)
    git(folder, "init", "--quiet")
    for message, files in commits:
        write_files(folder, files)
        git(folder, "add", "--all")
        commit(folder, message)
    return folder


def make_tokenizer(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    Tokenizer.train([code(seed) for seed in range(20)], 400).save(folder / "tokenizer.json")
    return folder
