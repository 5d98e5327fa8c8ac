"""Entry points on several hosts: their flags, joining the other processes, and aborting together."""

from __future__ import annotations

import contextlib
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import NoReturn

from absl import flags as absl_flags

from composer_jax.errors import UserError

MULTI_PROCESS, SINGLE_PROCESS, NO_DEVICES = "multi-process", "single process", "no devices"
"""Kinds of entry points: works as one of several processes; refuses to; uses no devices, so it does not look for
others."""

FLAGS = ("coordinator", "processes", "process")


def define_flags(values: absl_flags.FlagValues) -> None:
    """Declares --coordinator, --processes and --process."""
    absl_flags.DEFINE_string(
        "coordinator",
        None,
        "HOST:PORT at which process 0 of several listens. Without it the process is alone, or one of those that the "
        "cluster started (TPU pods, SLURM, mpirun, indexed Kubernetes Jobs).",
        flag_values=values,
    )
    for name, least, meaning in (
        ("processes", 1, "Number of processes; 1 ignores the cluster environment."),
        ("process", 0, "Index of this process, from 0."),
    ):
        absl_flags.DEFINE_integer(name, None, meaning, lower_bound=least, flag_values=values)


def join(values: absl_flags.FlagValues, program: str, kind: str) -> Callable[[], None] | None:
    """Joins the other processes, if there are any.

    Returns:
      The function to call before a successful exit, or None in a single process.

    Raises:
      UserError: the flags do not fit each other or the entry point, or the other processes cannot be joined.
    """
    coordinator, processes, process = (values[name].value for name in FLAGS)
    if coordinator is None:
        if process is not None or processes not in (None, 1):
            passed = " and ".join(f"--{name}={values[name].value}" for name in FLAGS if values[name].value is not None)
            raise UserError(f"{passed} without --coordinator=HOST:PORT, the address at which process 0 listens.")
        if processes == 1 or kind == NO_DEVICES:
            return None
    elif processes is None or process is None:
        raise UserError("--coordinator needs --processes, their number, and --process, the index of this one.")
    # These modules import JAX, which takes seconds and is not needed to refuse the flags above.
    from composer_jax.parallel import cluster_env, failure
    from composer_jax.parallel.processes import join_processes

    if coordinator is None:
        processes = cluster_env.detect_process_count()
        if processes == 1:
            return None
    if kind != MULTI_PROCESS:
        raise UserError(
            f"{program} supports one process only for now, and there are {processes}; start it on one host."
        )
    print(f"{program}: waiting for all {processes} processes", file=sys.stderr, flush=True)
    with _default_ctrl_c():
        join_processes(coordinator, *((processes, process) if coordinator else ()))
    return failure.watch_for_failures(program)


def abort(error: BaseException, program: str, expected: tuple[int, str] | None) -> NoReturn:
    """Ends all processes because of `error` in this one.

    Args:
      expected: (exit code, sentence) for errors that have them; None prints the traceback and exits with 1.
    """
    from composer_jax.parallel.failure import abort_all_processes

    if expected is None:
        summary = traceback.format_exception_only(error)[-1].strip()
        abort_all_processes("".join(traceback.format_exception(error)), summary, 1)
    code, sentence = expected
    abort_all_processes(f"\n{program}: {sentence}", sentence, code)


@contextlib.contextmanager
def _default_ctrl_c() -> Iterator[None]:
    """Lets Ctrl-C end the process at once: Python's handler would not run while JAX waits in C++."""
    handler = signal.getsignal(signal.SIGINT)
    if callable(handler):  # in the background the signal is ignored, and stays ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
