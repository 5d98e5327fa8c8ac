"""Counts how often files are opened."""

import builtins
import contextlib
import io
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from unittest import mock


@contextlib.contextmanager
def opened_files(folder: Path) -> Iterator[Counter[str]]:
    """Yields the counts, path in the folder -> times that Python code in the block opened it."""
    counts: Counter[str] = Counter()
    plain_open = builtins.open

    def counting_open(file, *args, **kwargs):
        if isinstance(file, str | Path) and Path(file).is_relative_to(folder):
            counts[str(Path(file).relative_to(folder))] += 1
        return plain_open(file, *args, **kwargs)

    with mock.patch.object(builtins, "open", counting_open), mock.patch.object(io, "open", counting_open):
        yield counts
