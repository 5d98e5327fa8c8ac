"""What a part prints: progress on stderr and, as the last line of stdout, one JSON object, its figures or its error.

Imports neither JAX nor our package, so that train_torch.py runs without them.
"""

import contextlib
import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

Figures = dict[str, Any]


def note(text: str) -> None:
    """Prints progress."""
    print(text, file=sys.stderr, flush=True)


def digits(value: float) -> float:
    """Returns a figure with four digits."""
    return float(f"{value:.4g}")


def error_line(error: Exception) -> str:
    """Returns the type of an error and the first line of its text, at most 300 characters."""
    name, lines = type(error).__name__, str(error).strip().splitlines()
    return f"{name}: {lines[0]}"[:300] if lines else name


def print_result(measure: Callable[[], Figures]) -> None:
    """Prints the figures that `measure` returns, or {"error"}, and then ends the process with status 1."""
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what libraries print is no figure
            figures = measure()
    except Exception as error:
        traceback.print_exc()
        print(json.dumps({"error": error_line(error)}))
        raise SystemExit(1) from None
    print(json.dumps(figures))
