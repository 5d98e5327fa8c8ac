"""Several hosts run one entry point together: the flags that say so, and how they begin and end as one."""

from __future__ import annotations

import contextlib
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import NoReturn

from absl import flags as absl_flags

from composer_jax.errors import UserError

SEVERAL, ALONE, WITHOUT_DEVICES = "several", "alone", "without devices"
"""What an entry point does as one of several processes: work together; refuse; or, using no devices, not even ask."""

FLAGS = ("coordinator", "processes", "process")


def define(values: absl_flags.FlagValues) -> None:
    absl_flags.DEFINE_string(
        "coordinator",
        None,
        "Of several processes, HOST:PORT at which process 0 listens. Left out, this one is alone, or among those the "
        "machine says it started (TPU pods, SLURM, mpirun, indexed Jobs of Kubernetes).",
        flag_values=values,
    )
    for name, least, meaning in (
        ("processes", 1, "How many there are; 1 is alone, whatever the machine says."),
        ("process", 0, "Which of them this is, from 0."),
    ):
        absl_flags.DEFINE_integer(name, None, meaning, lower_bound=least, flag_values=values)


def join(values: absl_flags.FlagValues, program: str, kind: str) -> Callable[[], None] | None:
    """Joins the other processes if there are any, and returns what to call before a good end; else None.

    Raises:
      UserError: the flags do not fit each other or the entry point, or the others cannot be joined.
    """
    coordinator, processes, process = (values[name].value for name in FLAGS)
    if coordinator is None:
        if process is not None or processes not in (None, 1):
            given = " and ".join(f"--{name}={values[name].value}" for name in FLAGS if values[name].value is not None)
            raise UserError(f"{given} without --coordinator=HOST:PORT, the address at which process 0 listens.")
        if processes == 1 or kind == WITHOUT_DEVICES:
            return None
    elif processes is None or process is None:
        raise UserError("--coordinator needs --processes, how many there are, and --process, which of them this is.")
    # With JAX, which is not needed to refuse what is above.
    from composer_jax.parallel import announced, ending
    from composer_jax.parallel import processes as meeting

    if coordinator is None:
        processes = announced.announced()
        if processes == 1:
            return None
    if kind != SEVERAL:
        raise UserError(f"{program} runs in one process only for now, and here are {processes}; start it on one host.")
    print(f"{program}: waits for all of {processes} processes", file=sys.stderr, flush=True)
    with _ctrl_c_at_once():
        meeting.join(coordinator, *((processes, process) if coordinator else ()))
    return ending.listen(program)


def end(error: BaseException, program: str, expected: tuple[int, str] | None) -> NoReturn:
    """Ends all processes because of an error in this one; `expected` is (exit code, sentence) if it has them."""
    from composer_jax.parallel import ending

    if expected is None:
        summary = traceback.format_exception_only(error)[-1].strip()
        ending.end_all("".join(traceback.format_exception(error)), summary, 1)
    code, sentence = expected
    ending.end_all(f"\n{program}: {sentence}", sentence, code)


@contextlib.contextmanager
def _ctrl_c_at_once() -> Iterator[None]:
    """Python hears Ctrl-C between its own instructions only, and JAX waits for others in C++."""
    handler = signal.getsignal(signal.SIGINT)
    if callable(handler):  # in the background it is ignored, and stays so
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
