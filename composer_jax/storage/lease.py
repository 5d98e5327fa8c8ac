"""Lease: the right to write in a folder of a bucket, which one process holds and renews.

A bucket has no locks that end with their process. So the holder rewrites one object every RENEW_S seconds, and whoever
finds it unchanged for LEASE_S seconds may take it over. Every write names the generation that it replaces: of two
processes that try at once, the bucket accepts one. No two clocks are compared; each process measures the time between
events that it sees itself.
"""

import json
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from composer_jax.errors import UserError
from composer_jax.storage.bucket import BucketFolder, ChangedObject

NAME = ".lock"
LEASE_S = 60.0
"""Seconds without a renewal after which the lease of a dead process can be taken over."""
RENEW_S = 15.0
"""Seconds between two renewals."""
POLL_S = 2.0
"""Seconds between two looks at the lease of another process."""


class Lease:
    """The lease on a bucket folder; `acquire` it, and `require` it before every write.

    Args:
      folder: where the lease lies, used by this object alone.
      monotonic, sleep: the clock; tests bring their own.
      process: identifies this process: {"host", "pid", "machine", "started"}.
      renew_in_background: starts a thread that renews the lease.

    Attributes:
      token: differs for every Lease; other processes of the same run verify it (`require_holder`).
    """

    def __init__(
        self,
        folder: BucketFolder,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        process: dict[str, Any] | None = None,
        renew_in_background: bool = True,
    ):
        self.token = uuid.uuid4().hex[:8]
        self._folder, self._monotonic, self._sleep = folder, monotonic, sleep
        self._process = this_process() if process is None else process
        self._in_background = renew_in_background
        self._generation, self._renewals, self._renewed = 0, 0, 0.0
        self._new_holder: str | None = None
        self._mutex, self._released = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self) -> None:
        """Takes the lease if it is free; waits up to LEASE_S to see whether its holder is dead.

        Raises:
          UserError: another process holds and renews the lease; the sentence names it.
        """
        watched: int | None = None
        since = self._monotonic()
        while True:
            current = self._folder.read(NAME)
            record, generation = (_parse(current[0]), current[1]) if current else ({}, 0)
            if watched is not None and generation not in (0, watched):
                raise self._in_use(record)
            alive = is_alive_here(record, self._process)
            if alive:
                raise self._in_use(record)
            waited = self._monotonic() - since
            # The holder was renewing at a time of its own choice, so its whole period counts from the first look.
            expired = watched is not None and waited >= float(record.get("lease_s", LEASE_S))
            if generation == 0 or alive is False or expired:
                if self._take(generation):
                    return
                watched = watched or generation  # another process was faster
            elif watched is None:
                watched, since = generation, self._monotonic()
                print(
                    f"{self._folder.url} was in use by {_describe(record)}; waiting up to {LEASE_S:.0f} s to see "
                    "whether that process still runs",
                    file=sys.stderr,
                    flush=True,
                )
            self._sleep(POLL_S)

    def renew(self) -> None:
        """Renews the lease, or notices that it is lost. Raises a UserError if the bucket cannot be reached."""
        with self._mutex:
            if self._new_holder is not None or self._released.is_set():
                return
            began = self._monotonic()  # the answer can take long; the lease counts from the request
            self._renewals += 1
            try:
                self._generation = self._folder.write(NAME, self._content(), self._generation)
            except ChangedObject:
                current = self._folder.read(NAME)
                self._new_holder = _describe(_parse(current[0])) if current else "a process that has ended"
            else:
                self._renewed = began

    def require(self) -> None:
        """Raises a UserError if this process may no longer write in the folder."""
        if self._monotonic() - self._renewed > LEASE_S / 2:  # this process was suspended, or the network was away
            self.renew()
        if self._new_holder is not None:
            raise UserError(
                f"{self._folder.url} has been taken over by {self._new_holder}, because this process did not renew its "
                f"lease for {LEASE_S:.0f} s; it ends here, and the other one continues the run"
            )

    @property
    def held(self) -> bool:
        """Whether this process has the lease, as far as it knows."""
        return self._new_holder is None and not self._released.is_set()

    def release(self) -> None:
        """Gives the lease back, so that the next process need not wait; does nothing if it is lost."""
        self._released.set()
        if self._thread is not None:
            self._thread.join()
        with self._mutex:
            if self._new_holder is None:
                self._folder.delete(NAME, self._generation)

    def _take(self, generation: int) -> bool:
        began = self._monotonic()
        try:
            self._generation = self._folder.write(NAME, self._content(), generation)
        except ChangedObject:
            return False
        self._renewed = began
        if self._in_background:
            self._thread = threading.Thread(target=self._keep_renewing, name="lease", daemon=True)
            self._thread.start()
        return True

    def _keep_renewing(self) -> None:
        while self._new_holder is None and not self._released.wait(RENEW_S):
            try:
                self.renew()
            except UserError as error:
                # The next attempt may succeed; `require` renews before the next write and raises if it cannot.
                print(f"cannot renew the lease on {self._folder.url}: {error}", file=sys.stderr, flush=True)

    def _content(self) -> bytes:
        record = {**self._process, "token": self.token, "lease_s": LEASE_S, "renewals": self._renewals}
        return json.dumps(record).encode()

    def _in_use(self, record: dict[str, Any]) -> UserError:
        return UserError(
            f"{self._folder.url} is in use by {_describe(record)}; wait for it or choose another --workdir"
        )


def require_holder(folder: BucketFolder, token: str) -> None:
    """Raises a UserError unless the Lease with this token holds the folder."""
    current = folder.read(NAME)
    if current is None or _parse(current[0]).get("token") != token:
        raise UserError(
            f"{folder.url} on {socket.gethostname()} is not the folder that process 0 works in; give every process the "
            "same --workdir"
        )


def this_process() -> dict[str, Any]:
    """Returns what identifies this process among all that ever ran: host, pid, machine and start time.

    machine is the boot id with the namespace of process ids, so that containers of one host are told apart; "" where
    the system has no /proc.
    """
    pid = os.getpid()
    return {"host": socket.gethostname(), "pid": pid, "machine": _machine(), "started": _start_time(pid)}


def is_alive_here(record: dict[str, Any], here: dict[str, Any]) -> bool | None:
    """Whether the process of a lease runs on this machine; None if it belongs to another one."""
    if not here["machine"] or record.get("machine") != here["machine"]:
        return None
    return _start_time(int(record["pid"])) == record.get("started")


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _start_time(pid: int) -> int | None:
    """Returns the start of a process in clock ticks since boot; None if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *fields = stat.rpartition(")")[2].split()  # the name before it can hold anything
    return None if state in "ZX" else int(fields[18])


def _parse(content: bytes) -> dict[str, Any]:
    try:
        record = json.loads(content)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def _describe(record: dict[str, Any]) -> str:
    return f"process {record.get('pid', '?')} on {record.get('host', 'an unknown host')}"
