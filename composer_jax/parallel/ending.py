"""How several processes end when one of them fails: all of them, with its sentence.

Left to itself, a process whose partner is gone waits in its next collective until JAX misses the partner's heartbeat
and aborts it, minutes later and with a page of C++. So whoever fails says so at the coordinator (`end_all`), where a
thread of every other process listens (`listen`). A process that is gone without a word, by kill -9 or with its machine,
is still found out by its heartbeat.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

import jax
from jax._src.distributed import global_state

from composer_jax.parallel.processes import asked, from_first, process_count, process_index

LISTEN_EVERY_S = 1.0
GRACE_S = 5.0
"""How long a process may go on after another failed: what both know of (bad input, an agreed interrupt) it ends with by
itself, once its files are closed."""
PATIENCE_S = 5.0
"""How long, beyond that, the last ones wait for the others to leave; those that do not, JAX ends."""

_FAILED, _FINISHED = "composer_jax/failed", "composer_jax/finished"
_leaving = threading.Lock()  # its holder ends the process; nobody lets it go


def listen(program: str) -> Callable[[], None]:
    """From now on this process ends when another one does so by `end_all`; `program` is what it calls itself then.

    Returns the function to call before a good end: it waits until every process has come that far, so that none leaves
    while another may still fail, and stops listening.
    """
    finished = threading.Event()
    listener = threading.Thread(target=_listen, args=(program, finished), name="ending", daemon=True)
    listener.start()

    def finish() -> None:
        global_state.client.key_value_set(f"{_FINISHED}/{process_index()}", "")
        from_first(lambda: [asked(f"{_FINISHED}/{process}") for process in range(process_count())])
        finished.set()
        listener.join()  # Python cannot end while a thread is in the midst of a call to the coordinator

    return finish


def end_all(message: str, summary: str, code: int) -> NoReturn:
    """Prints the message and ends this process, and the others with the summary, all with the exit code.

    Skips what Python does at its end: there JAX would wait for processes that are not coming.
    """
    _leaving.acquire()
    print(message, file=sys.stderr, flush=True)
    try:
        said = json.dumps({"process": process_index(), "summary": summary, "code": code})
        global_state.client.key_value_set(_FAILED, said)
        first = True
    except jax.errors.JaxRuntimeError:  # another one failed before, or the coordinator is gone
        first = False
    _leave(code, last=first)


def _listen(program: str, finished: threading.Event) -> None:
    while not finished.wait(LISTEN_EVERY_S):
        try:
            failed = json.loads(global_state.client.key_value_try_get(_FAILED))
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" in str(error):
                continue
            return  # the coordinator is gone, of which JAX ends this process
        if failed["process"] == process_index():
            return
        time.sleep(GRACE_S)
        if _leaving.acquire(blocking=False):
            print(f"\n{program}: process {failed['process']} ended: {failed['summary']}", file=sys.stderr, flush=True)
            _leave(failed["code"], last=False)


def _leave(code: int, *, last: bool) -> NoReturn:
    """Ends this process; `last`: after the others, as their programs fail loudly once a partner is gone.

    Process 0 is the very last, for the coordinator is a part of it.
    """
    deadline = time.monotonic() + GRACE_S + PATIENCE_S
    try:
        if last:
            _wait_for_others(deadline)
        global_state.client.key_value_set(f"{_FAILED}/{process_index()}", "left")
        if process_index() == 0:
            _wait_for_others(deadline)
    except jax.errors.JaxRuntimeError:
        pass  # they hang or are gone; this process ends all the same
    sys.stdout.flush()
    os._exit(code)


def _wait_for_others(deadline: float) -> None:
    for other in range(process_count()):
        if other != process_index():
            left_ms = max(1, int(1000 * (deadline - time.monotonic())))
            global_state.client.blocking_key_value_get(f"{_FAILED}/{other}", left_ms)
