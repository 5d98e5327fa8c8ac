"""Commands of one sandbox: how they are started, watched and stopped, and how they ended.

A command ends when its first process ends. Processes that it left running are killed then, so none of them outlives the
command or evades its time limit. Processes of the persistent shell (shell.py) are spared. Outcomes:

    timeout         wall-clock limit reached, or the CPU limit (SIGXCPU, or SIGKILL with the CPU time used up)
    output_limit    stdout and stderr together passed the hard limit
    out_of_memory   the processes together held more than the limit; or the program ended with MemoryError (reported
                    by the fork that runs `python`), or failed with the words of an allocation failure last on stderr;
                    or it was killed while its peak was above half of the limit (the machine's own memory killer)
    ok, nonzero     everything else, by exit code (128 + N for signal N). Where the kernel does not enforce a limit of
                    files or processes, a command beyond the limit is `nonzero`, and the last line of stderr says so
"""

import fcntl
import mmap
import os
import resource
import select
import signal
import time
from collections.abc import Callable, Collection
from typing import Any

from . import namespaces, processes, python
from .confinement import Confinement
from .truncated_output import TruncatedOutput

WATCH_S = 0.05  # between two sums of the memory; shorter commands have none
ASLEEP_S = 1.0  # a delay above this is not charged to the command
EXIT_CODES = {"timeout": 124, "out_of_memory": 137, "output_limit": 153}
PIPE = 1 << 16  # bytes that a pipe holds
ALLOCATION_FAILURES = (b"MemoryError", b"bad_alloc", b"Cannot allocate memory", b"out of memory", b"memory exhausted")


class Stream:
    """The read end of a pipe to which a command prints, and its truncated output."""

    def __init__(self, fd: int, keep: int):
        self.fd, self.keep = fd, keep
        self.output = TruncatedOutput(keep)
        self.before = 0  # bytes that earlier commands and their jobs printed
        os.set_blocking(fd, False)

    @property
    def size(self) -> int:
        """Bytes that belong to the running command."""
        return self.output.total - self.before

    def empty(self) -> bool:
        """Reads what the pipe holds, and no more: the writer may never stop. Returns False at end of file."""
        return self.drain(self.size + PIPE)

    def drain(self, limit: int) -> bool:
        """Reads what is there, up to `limit` bytes of the command. Returns False at end of file."""
        while self.size <= limit:
            try:
                data = os.read(self.fd, 65536)
            except BlockingIOError:
                return True
            if not data:
                return False
            self.output.add(data)
        return True

    def add_line(self, sentence: str) -> None:
        """Appends a line of the worker itself to the tail."""
        self.output.add_to_tail(sentence.encode() + b"\n")


class Commands:
    """Runs one command at a time, in the folder `root`."""

    def __init__(
        self,
        root: str,
        limits: dict[str, int],
        isolation: str,
        report: mmap.mmap,
        confinement: Confinement | None = None,
    ):
        self.root = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.limits, self.isolation, self.report, self.confinement = limits, isolation, report, confinement
        self.can_signal_all = isolation == "namespaces" or (confinement is not None and confinement.confines_signals)
        self.on_exit: Callable[[int, int], None] = lambda pid, status: None  # called for children that ended
        self.spared_pids: Callable[[], Collection[int]] = tuple  # returns pids that no command started
        self.dev_null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self.rlimits = [
            (resource.RLIMIT_CORE, 0, 0),
            (resource.RLIMIT_CPU, limits["cpu_s"], limits["cpu_s"] + 1),  # one second between SIGXCPU and SIGKILL
            (resource.RLIMIT_FSIZE, limits["file_bytes"], limits["file_bytes"]),
            (resource.RLIMIT_NOFILE, limits["open_files"], limits["open_files"]),
            (resource.RLIMIT_AS, limits["memory_bytes"], limits["memory_bytes"]),
        ]
        if isolation != "none":  # without a user namespace, this limit counts all processes of the user
            most = confinement.most_threads if confinement else limits["processes"]
            self.rlimits.append((resource.RLIMIT_NPROC, most, most))

    def run(self, argv: list[str], stdin: bytes, timeout_s: float) -> tuple[dict[str, Any], bytes]:
        """Runs `argv`; returns header and body of the reply. The body is head and tail of stdout, then of stderr."""
        self.report[0] = 0
        started = time.monotonic()
        spared = set(self.spared_pids())
        out, out_end = os.pipe()
        err, err_end = os.pipe()
        source, feed = os.pipe() if stdin else (self.dev_null, -1)
        pid = self.start(argv, source, out_end, err_end)
        os.close(out_end)
        os.close(err_end)
        if stdin:
            os.close(source)
        keep = self.limits["output_bytes"]
        streams = (Stream(out, keep), Stream(err, keep))
        end = os.pidfd_open(pid)
        stopped = self.watch([end], streams, feed, stdin, started + timeout_s)
        os.close(end)
        status, usage = self._kill_rest(pid, spared)
        code = os.waitstatus_to_exitcode(status)
        for stream in streams:
            stream.drain(self.limits["output_stop_bytes"])
        reply = self.reply(stopped or self._judge(code, usage, streams[1]), code, started, streams)
        for stream in streams:
            os.close(stream.fd)
        return reply

    def reply(
        self, outcome: str, code: int, started: float, streams: tuple[Stream, Stream]
    ) -> tuple[dict[str, Any], bytes]:
        """Returns header and body that say how a command ended."""
        if self.confinement and (excess := self.confinement.quota.finish_command()):
            streams[1].add_line(f"the sandbox's limit is passed: {excess}")
            if outcome in ("ok", "nonzero"):
                outcome, code = "nonzero", code or 1
        outputs = [stream.output for stream in streams]
        pieces = [piece for output in outputs for piece in (output.head, output.tail)]
        header = {
            "outcome": outcome,
            "exit_code": EXIT_CODES.get(outcome, code if code >= 0 else 128 - code),
            "seconds": round(time.monotonic() - started, 6),
            "pieces": [len(piece) for piece in pieces],
            "dropped": [output.dropped for output in outputs],
        }
        return header, b"".join(pieces)

    def start(self, argv: list[str], source: int, out: int, err: int, others: Collection[int] = ()) -> int:
        """Forks a process that executes `argv`; returns its pid. others: descriptors that it gets as 3, 4, ..."""
        pid = os.fork()
        if pid == 0:
            code = 126
            try:
                code = self._exec(argv, (source, out, err, *others))
            finally:
                os._exit(code)
        return pid

    def _exec(self, argv: list[str], descriptors: tuple[int, ...]) -> int:
        """In the child: executes the command. Returns an exit code when it could not, or when it ran in this fork."""
        os.setsid()
        os.fchmod(self.root, 0o755)
        os.fchdir(self.root)
        if self.confinement:
            self.confinement.confine_command()  # opens descriptors, so before the numbers are assigned
        # First to numbers above all targets: a descriptor may have the number of another target.
        count = len(descriptors)
        ends = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, count) for fd in descriptors]
        for target, fd in enumerate(ends):
            os.dup2(fd, target)
        os.closerange(count, os.sysconf("SC_OPEN_MAX"))  # also the socket to the host
        namespaces.make_dumpable()
        for kind, soft, hard in self.rlimits:
            resource.setrlimit(kind, (soft, hard))
        if python.can_fork(argv):
            signal.signal(signal.SIGINT, signal.default_int_handler)
            return python.run_program(argv, lambda: self.report.__setitem__(0, 1))
        for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these; other programs expect the default
            signal.signal(ignored, signal.SIG_DFL)
        try:
            os.execvp(argv[0], argv)
        except OSError as error:
            os.write(2, f"{argv[0]}: {error.strerror}\n".encode(errors="replace"))
            return 127 if isinstance(error, FileNotFoundError) else 126

    def watch(
        self, ends: Collection[int], streams: tuple[Stream, Stream], feed: int, stdin: bytes, deadline: float
    ) -> str | None:
        """Feeds stdin and reads output until one of `ends` is readable; closes `feed`.

        Returns the outcome if the command has to be stopped, else None.
        """
        poll = select.poll()
        by_fd = {stream.fd: stream for stream in streams}
        for fd in (*ends, *by_fd):
            poll.register(fd, select.POLLIN)
        if feed >= 0:
            os.set_blocking(feed, False)
            poll.register(feed, select.POLLOUT)
        rest, stop_at = memoryview(stdin), self.limits["output_stop_bytes"]
        next_look = time.monotonic() + WATCH_S
        try:
            while True:
                now = time.monotonic()
                if now >= deadline:
                    return "timeout"
                if now >= next_look:
                    if self.confinement and self.confinement.quota.is_exceeded():
                        return "nonzero"
                    if self.exceeds_memory():
                        return "out_of_memory"
                    next_look = now + WATCH_S
                wait = max(0.0, min(deadline, next_look) - now) + 0.0001
                events = poll.poll(wait * 1000)
                late = time.monotonic() - now - wait
                if late > ASLEEP_S:  # the machine was suspended, not the command: virtual machines are paused and moved
                    deadline += late
                for fd, _ in events:
                    if fd in by_fd:
                        if not by_fd[fd].drain(stop_at):
                            poll.unregister(fd)
                    elif fd == feed:
                        rest = _write_some(feed, rest)
                        if not rest:
                            poll.unregister(feed)
                            os.close(feed)
                            feed = -1
                if sum(stream.size for stream in streams) > stop_at:
                    return "output_limit"
                if any(fd in ends for fd, _ in events):
                    for stream in streams:  # written before the end
                        stream.drain(stop_at)
                    return None
        finally:
            if feed >= 0:
                os.close(feed)

    def _kill_rest(self, pid: int, spared: set[int]) -> tuple[int, resource.struct_rusage]:
        """Kills what is left of the command; returns status and usage of its first process."""
        if not spared:
            return processes.kill_all_descendants(self.can_signal_all)[pid]
        os.kill(pid, signal.SIGKILL)
        _, status, usage = os.wait4(pid, 0)
        self.kill_all_but(spared, self.on_exit, spared)
        return status, usage

    def other_pids(self) -> list[int]:
        """Returns the pids of all processes of the sandbox except the worker."""
        if self.isolation == "namespaces":
            return [int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1"]
        return processes.descendants(os.getpid())

    def kill_all_but(
        self, spared: Collection[int], reaped: Callable[[int, int], None], families: Collection[int] = ()
    ) -> None:
        """Kills every process except those spared and the descendants of `families`, and what they start meanwhile.

        Where the isolation allows it, all processes are stopped during the search: a process that forks faster than it
        is killed, or does not reap its children, would otherwise keep the worker busy until the host gives up.
        """
        while True:
            self.reap(reaped)
            if not self._pids_to_kill(spared, families):
                return
            stopped = [pid for pid, state in self._states().items() if state[0] == b"T"]
            if self.can_signal_all:
                processes.send_signal(-1, signal.SIGSTOP)
            for pid in self._pids_to_kill(spared, families):
                processes.send_signal(pid, signal.SIGKILL)
            if self.can_signal_all:
                for pid in self.other_pids():
                    if pid not in stopped:
                        processes.send_signal(pid, signal.SIGCONT)
            time.sleep(0.0005)

    def _pids_to_kill(self, spared: Collection[int], families: Collection[int]) -> list[int]:
        """Returns the pids to kill: no zombies, except children of the worker, which it reaps."""
        states, me = self._states(), os.getpid()

        def is_in_family(pid: int) -> bool:
            while pid in states:
                if pid in families:
                    return True
                pid = states[pid][1]
            return False

        alive = [pid for pid, (state, parent) in states.items() if state not in b"ZX" or parent == me]
        return [pid for pid in alive if pid not in spared and not is_in_family(pid)]

    def _states(self) -> dict[int, tuple[bytes, int]]:
        """Returns pid -> (state, parent) of every process except the worker."""
        states = {}
        for pid in self.other_pids():
            try:
                with open(f"/proc/{pid}/stat", "rb") as file:
                    state, parent = file.read().rpartition(b")")[2].split()[:2]
            except (FileNotFoundError, ProcessLookupError):  # it has ended
                continue
            states[pid] = state, int(parent)
        return states

    def reap(self, reaped: Callable[[int, int], None]) -> None:
        """Reaps the children that have ended and calls `reaped` (pid, status) for each."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            reaped(pid, status)

    def _judge(self, code: int, usage: resource.struct_rusage, err: Stream) -> str:
        """Returns the outcome of a command that ended by itself."""
        if code == 0:
            return "ok"
        cpu_s = usage.ru_utime + usage.ru_stime
        if code == -signal.SIGXCPU or (code == -signal.SIGKILL and cpu_s >= self.limits["cpu_s"]):
            return "timeout"
        if self.report[0]:
            return "out_of_memory"
        if reports_allocation_failure(err):
            return "out_of_memory"
        if code == -signal.SIGKILL and usage.ru_maxrss * 1024 > self.limits["memory_bytes"] // 2:
            return "out_of_memory"
        return "nonzero"

    def exceeds_memory(self) -> bool:
        """Whether all processes except the worker hold more memory than the limit; shared pages count once.

        The exact sum is slow, so it is taken only when a cheap upper bound exceeds the limit. A process that hides its
        exact number counts in full.
        """
        if self.isolation == "none":
            return False
        pids, limit = self.other_pids(), self.limits["memory_bytes"]
        return sum(_resident(pid) for pid in pids) > limit and sum(_own_share(pid) for pid in pids) > limit


def reports_allocation_failure(err: Stream) -> bool:
    """Whether the last line of stderr is that of a program that could not allocate memory."""
    last_line = bytes(err.output.tail or err.output.head)[-400:].strip().rpartition(b"\n")[2]
    return any(words in last_line for words in ALLOCATION_FAILURES)


def _resident(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * mmap.PAGESIZE
    except (OSError, IndexError):  # it has ended
        return 0


def _own_share(pid: int) -> int:
    """Returns the proportional set size in bytes, without pages backed by files."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            fields = dict(line.split()[:2] for line in file.readlines()[1:])
        return 1024 * (int(fields[b"Pss_Anon:"]) + int(fields[b"Pss_Shmem:"]))
    except (OSError, KeyError, ValueError):
        return _resident(pid)


def _write_some(fd: int, data: memoryview) -> memoryview:
    try:
        return data[os.write(fd, data[:65536]) :]
    except BlockingIOError:
        return data
    except OSError:  # the reader has closed it
        return data[:0]
