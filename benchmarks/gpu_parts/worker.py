"""The processes of `benchmarks.gpu`: each part has the whole card, a peak memory and a first step of its own."""

import argparse
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

ROOT = Path(__file__).parents[2]
NO_CARD = 3
"""Exit status of a part that found no card."""
DEFAULTS = {"CUDA_VISIBLE_DEVICES": "0", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"}
"""Variables of a part's environment: one card, and the part of its memory that JAX takes."""

Figures = dict[str, Any]


class PartError(Exception):
    """A part's process failed; the text is the last line that it printed."""


def run_part(module: str, options: Sequence[str], cache: Path, python: str = sys.executable) -> Figures:
    """Returns the figures that a module of this package prints in a process of its own.

    Args:
      cache: folder of compiled programs, empty before the first part.
      python: of an environment that may have other packages.

    Raises:
      PartError: the process failed.
      SystemExit: it found no card.
    """
    environment = DEFAULTS | os.environ
    environment |= {
        "PYTHONPATH": str(ROOT),
        "JAX_COMPILATION_CACHE_DIR": str(cache / "jax"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
    }
    command = [python, "-m", f"benchmarks.gpu_parts.{module}", *options]
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        last = ""
        for line in process.stderr or ():
            print(line, end="", file=sys.stderr, flush=True)
            last = line.strip() or last
        printed = (process.stdout.read() if process.stdout else "").splitlines()
    if process.returncode == NO_CARD:
        raise SystemExit(NO_CARD)
    if process.returncode:
        raise PartError(last or f"{module} ended with status {process.returncode}")
    return json.loads(printed[-1])


def print_figures(measure: Callable[[bool], Figures]) -> None:
    """The main function of a part: prints what it measures as JSON, the last line of stdout.

    measure: from whether the form is the tiny one, which any machine runs.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--small", action="store_true")
    o = parser.parse_args()
    if not o.small and jax.default_backend() != "gpu":
        print("benchmarks.gpu needs a GPU and JAX finds none; --small runs its parts in a tiny form.", file=sys.stderr)
        raise SystemExit(NO_CARD)
    with contextlib.redirect_stdout(sys.stderr):  # what libraries print is no figure
        figures = measure(o.small)
    print(json.dumps(figures))
