"""The result of a command: one JSON object, the last line of stdout."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from composer_jax.atomic_write import write_atomically


def print_json(result: Mapping[str, Any], out: str | None) -> None:
    """Prints `result` as one line; writes the line to the file `out`, too, atomically, unless that is None or ""."""
    line = json.dumps(result)
    if out:
        write_atomically(Path(out), f"{line}\n".encode())
    print(line)
