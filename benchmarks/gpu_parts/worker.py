"""The processes of `benchmarks.gpu`: each part has the whole card, a peak memory and a first step of its own."""

import argparse
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import jax

from benchmarks.gpu_parts.output import Figures, print_result

ROOT = Path(__file__).parents[2]
NO_CARD = 3
"""Exit status of a part that found no card."""
DEFAULTS = {"CUDA_VISIBLE_DEVICES": "0", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"}
"""Variables of a part's environment: one card, and the part of its memory that JAX takes."""


class PartError(Exception):
    """A part's process failed; the text is its error."""


class NoCardError(PartError):
    """A part's process found no card."""


def run_part(module: str, options: Sequence[str], cache: Path, limit_s: float, python: str = sys.executable) -> Figures:
    """Returns the figures that a module of this package prints in a process of its own.

    Args:
      cache: folder of compiled programs, empty before the first part.
      limit_s: seconds after which the process is killed.
      python: of an environment that may have other packages.

    Raises:
      PartError: the process failed or reached the limit.
      NoCardError: it found no card.
    """
    environment = DEFAULTS | os.environ
    environment |= {"JAX_COMPILATION_CACHE_DIR": str(cache / "jax"), "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor")}
    if python == sys.executable:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    command = [python, "-m", f"benchmarks.gpu_parts.{module}", *options]
    expired = threading.Event()
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:

        def stop() -> None:
            expired.set()
            process.kill()

        timer = threading.Timer(limit_s, stop)
        timer.start()
        last = ""
        try:
            for line in process.stderr or ():
                print(line, end="", file=sys.stderr, flush=True)
                last = line.strip() or last
            printed = (process.stdout.read() if process.stdout else "").splitlines()
        finally:
            timer.cancel()
    if process.returncode == 0:
        return json.loads(printed[-1])
    if expired.is_set():
        raise PartError(f"{module} was killed after {limit_s:g} s; --limit=SECONDS gives each process more")
    if process.returncode == NO_CARD:
        raise NoCardError(last)
    if printed and printed[-1].startswith('{"error"'):
        raise PartError(json.loads(printed[-1])["error"])
    raise PartError(f"{module} ended with status {process.returncode}: {last}")


def print_figures(measure: Callable[..., Figures], *switches: str) -> None:
    """The main function of a part: prints what it measures.

    Args:
      measure: takes `small`, whether the form is the tiny one, which any machine runs, and every switch by its name.
      switches: options of the part without a value.
    """
    parser = argparse.ArgumentParser()
    for switch in ("small", *switches):
        parser.add_argument(f"--{switch}", action="store_true")
    o = parser.parse_args()
    if not o.small and jax.default_backend() != "gpu":
        print("benchmarks.gpu needs a GPU and JAX finds none; --small runs its parts in a tiny form.", file=sys.stderr)
        raise SystemExit(NO_CARD)
    print_result(lambda: measure(**vars(o)))
