"""Ends all processes of a run, with one error message, when one of them fails.

Without this, a process whose partner has exited waits in its next collective until JAX misses the partner's heartbeat
and aborts minutes later with a page of C++. Instead, the failing process publishes its error at the coordinator
(`abort_all_processes`), and a thread in every other process watches for it (`watch_for_failures`). A process that
disappears without publishing, by kill -9 or with its machine, is detected by JAX's heartbeat, and at once by whoever
has a connection to it (`report_lost_process`).
"""

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import psutil

from composer_jax.parallel.processes import (
    broadcast_from_process0,
    coordinator_address,
    coordinator_client,
    process_count,
    process_index,
    wait_for_key,
)

POLL_S = 1.0
"""Seconds between two looks for a published failure."""
GRACE_S = 5.0
"""Seconds that a process may continue after another one failed. An error that both detect (bad input, an agreed
interrupt) ends it within that time through its own exception, after it has closed its files."""
DISCONNECT_POLL_S = 0.01
"""Seconds between two looks at the connections to the coordinator."""
EXIT_WAIT_S = 5.0
"""Further seconds that the last processes wait for the others to exit. JAX's heartbeat ends those that do not."""

_FAILED, _FINISHED = "composer_jax/failed", "composer_jax/finished"
_LOST = "it was killed, or its machine is gone"
_exiting = threading.Lock()  # acquired by the thread that ends the process and never released
_lost: set[int] = set()  # processes that no one needs to wait for
_program = "composer_jax"


def watch_for_failures(program: str) -> Callable[[], None]:
    """Starts a thread that ends this process when another one calls `abort_all_processes`.

    Args:
      program: the name of the entry point in the message that is then printed.

    Returns:
      The function to call before a successful exit: it waits until every process has called it, so that none exits
      while another may still fail, and stops the thread.
    """
    global _program
    _program, finished = program, threading.Event()
    watcher = threading.Thread(target=_watch, args=(program, finished), name="watch-for-failures", daemon=True)
    watcher.start()

    def finish() -> None:
        coordinator_client().key_value_set(f"{_FINISHED}/{process_index()}", "")
        broadcast_from_process0(lambda: [wait_for_key(f"{_FINISHED}/{process}") for process in range(process_count())])
        finished.set()
        watcher.join()  # Python cannot exit while a thread is inside a call to the coordinator

    return finish


def abort_all_processes(message: str, summary: str, code: int) -> NoReturn:
    """Prints `message` and ends this process; the others print `summary` and end with the same exit code.

    Python's exit handlers are skipped, because JAX's handler would wait for processes that never arrive.
    """
    _exiting.acquire()
    print(message, file=sys.stderr, flush=True)
    try:
        failure = json.dumps({"process": process_index(), "summary": summary, "code": code})
        coordinator_client().key_value_set(_FAILED, failure)
        failed_first = True
    except jax.errors.JaxRuntimeError:  # another process failed before, or the coordinator is gone
        failed_first = False
    _exit(code, last=failed_first)


def report_lost_process(process: int) -> str:
    """Ends all processes because a connection to `process` broke unannounced; returns the sentence that says so.

    The watching threads of all processes read the report, so that the caller's own exception can end this one first.
    Process 0 hosts the coordinator, without which JAX aborts the others within a tenth of a second. So if process 0 is
    lost, this function prints the sentence and ends the process at once.
    """
    if process == 0:
        _exiting.acquire()
        print(f"\n{_program}: process 0 ended: {_LOST}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(1)
    _lost.add(process)
    failure = {"process": process, "summary": _LOST, "code": 1}
    try:
        coordinator_client().key_value_set(_FAILED, json.dumps(failure))
    except jax.errors.JaxRuntimeError:  # a process failed before, and the lost one ended because of it
        failure = json.loads(coordinator_client().key_value_try_get(_FAILED))
    return _sentence(failure)


def wait_for_failure(seconds: float) -> str | None:
    """Returns the sentence about the process that failed first, or None if none is reported within so many seconds."""
    try:
        failure = json.loads(coordinator_client().blocking_key_value_get(_FAILED, int(1000 * seconds)))
    except jax.errors.JaxRuntimeError:
        return None
    return _sentence(failure)


def _sentence(failure: dict[str, Any]) -> str:
    return f"process {failure['process']} ended: {failure['summary']}"


def _watch(program: str, finished: threading.Event) -> None:
    while not finished.wait(POLL_S):
        try:
            failure = json.loads(coordinator_client().key_value_try_get(_FAILED))
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" in str(error):
                continue
            return  # the coordinator is gone, and JAX ends this process
        if failure["process"] == process_index():
            return
        time.sleep(GRACE_S)
        if _exiting.acquire(blocking=False):
            print(f"\n{program}: {_sentence(failure)}", file=sys.stderr, flush=True)
            _exit(failure["code"], last=False)


def _exit(code: int, *, last: bool) -> NoReturn:
    """Ends this process; `last`: after the others, because JAX prints errors in them once a partner has exited.

    Process 0 exits after all others, because it hosts the coordinator: JAX aborts a process that loses it.
    """
    deadline = time.monotonic() + GRACE_S + EXIT_WAIT_S
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # the others hang or have exited; this one exits all the same
        if last:
            _wait_for_others(deadline)
        coordinator_client().key_value_set(f"{_FAILED}/{process_index()}", "exited")
        if process_index() == 0:
            _wait_for_others(deadline)
            _wait_until_disconnected(deadline)
    sys.stdout.flush()
    os._exit(code)


def _wait_for_others(deadline: float) -> None:
    for other in range(process_count()):
        if other != process_index() and other not in _lost:
            remaining_ms = max(1, int(1000 * (deadline - time.monotonic())))
            coordinator_client().blocking_key_value_get(f"{_FAILED}/{other}", remaining_ms)


def _wait_until_disconnected(deadline: float) -> None:
    """Waits until no other process is connected to the coordinator: it announces its end a moment before it exits."""
    port, own = int(coordinator_address().rpartition(":")[2]), psutil.Process()
    while time.monotonic() < deadline:
        connections = [c for c in own.net_connections("tcp") if c.status == psutil.CONN_ESTABLISHED]
        ours = {_socket_address(c.laddr) for c in connections}
        if all(_socket_address(c.raddr) in ours for c in connections if c.laddr.port == port):
            return
        time.sleep(DISCONNECT_POLL_S)


def _socket_address(address: Any) -> tuple[str, int]:
    """(IP, port); an IPv4 address is the same whichever kind of socket shows it."""
    return address.ip.removeprefix("::ffff:"), address.port
