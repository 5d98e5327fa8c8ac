"""The shell of one sandbox: bash, started once, in which commands run one after the other.

Unlike commands of command.py these leave something behind: the working folder, variables, functions, background jobs.
What a command started is killed when it has to be stopped; what earlier ones left running goes on. If the shell itself
ends (`exit`, `exec`, a limit), its jobs end with it and the next command starts in a new one.

bash cannot be told apart from what it runs: a command that lies about its own exit code deceives its author only.
"""

import os
import select
import signal
import time
from typing import Any

from . import command
from .command import Commands, Stream

LOOP = r"""
exec 20<&3 21>&4 3<&- 4>&-
composer_status() { return "$1"; }
COMPOSER_STATUS=0
while IFS= read -r -d '' -u 20 COMPOSER_TOKEN && IFS= read -r -d '' -u 20 COMPOSER_COMMAND; do
  composer_status "$COMPOSER_STATUS"
  eval "$COMPOSER_COMMAND" 20<&- 21>&-
  COMPOSER_STATUS=$?
  printf '%s %d\n' "$COMPOSER_TOKEN" "$COMPOSER_STATUS" >&21
done
"""
ARGV = ["bash", "--noprofile", "--norc", "-c", LOOP, "bash"]
LAST_WORD_S = 1.0  # for the shell to notice that what it waited for was killed
LOOK_S = 0.25  # between two looks at background jobs while nobody asks
ENDED = "[the shell has ended: the next command starts in a new one, in the workspace]"


class Shell:
    """The shell, and what it needs of the worker: how processes are started, watched and limited."""

    def __init__(self, commands: Commands):
        self.commands = commands
        self.pid = 0  # of bash; 0: there is none
        self.streams: tuple[Stream, Stream] | None = None  # with what nobody has been told yet
        self.number = 0
        self.next_look = 0.0

    def run(self, text: str, timeout_s: float) -> tuple[dict[str, Any], bytes]:
        """Run a command; header and body of the reply as of Commands.run, and the number of processes left running."""
        started = time.monotonic()
        known = set(self.jobs())  # which also notices that the shell has been killed
        if not self.pid:
            self._end_jobs()
            known = set()
            self._start()
        self.number += 1
        message = b"%d\0%b\0" % (self.number, os.fsencode(text))
        for stream in self.streams:
            stream.before = stream.output.total
        deadline, code = started + timeout_s, None
        stopped = self.commands.watch([self.status, self.end], self.streams, os.dup(self.feed), message, deadline)
        if stopped:
            spared = (
                known if stopped in ("timeout", "output_limit") else set()
            )  # else a limit of all together is passed
            self.commands.kill_all_but({self.pid, *spared}, self.on_exit, spared)
            code = self._exit_code(LAST_WORD_S) if self.pid else None
            for stream in self.streams:
                stream.empty()
            if known and not spared:
                self.streams[1].add_line("[background jobs were killed, too: with them the command passed a limit]")
        elif (code := self._exit_code(0.0)) is None:  # it is ending, or was replaced by another program
            stopped = self.commands.watch([self.end], self.streams, -1, b"", deadline)
        if code is None:
            code = self._shell_exit_code(gone=not stopped)
        streams = self.streams
        if not self.pid:
            streams[1].add_line(ENDED)
        outcome = stopped or self._judge(code, streams[1])
        header, body = self.commands.reply(outcome, code, started, streams)
        if self.pid:
            self.streams = (Stream(streams[0].fd, streams[0].keep), Stream(streams[1].fd, streams[1].keep))
        else:
            self.streams = None
            for stream in streams:
                os.close(stream.fd)
        return {**header, "jobs": len(self.jobs())}, body

    def wait_for(self, channel: int) -> None:
        """Until the host asks for something or the shell is gone: takes output of background jobs, looks at memory.

        Also without jobs: a shell that only said that it was done may start some at any time.
        """
        poll = select.poll()
        poll.register(channel, select.POLLIN)
        by_fd = {stream.fd: stream for stream in self.streams}
        for fd in by_fd:
            poll.register(fd, select.POLLIN)
        while self.pid:
            wait = max(0.0, self.next_look - time.monotonic())
            found = [fd for fd, _ in poll.poll(1000 * wait)]
            for fd in found:
                if fd in by_fd and not by_fd[fd].empty():
                    poll.unregister(fd)
            self.commands.reap(self.on_exit)
            self._look_at_limits()
            if channel in found:
                return
        self._end_jobs()

    def _look_at_limits(self) -> None:
        """If it is time for it, however often the host asks for something."""
        if not self.pid or time.monotonic() < self.next_look:
            return
        self.next_look = time.monotonic() + LOOK_S
        confinement = self.commands.confinement
        why = "together they held more memory than the limit"
        over = self.commands.exceeds_memory()
        passed = not over and confinement is not None and confinement.quota.is_exceeded()
        if not over and not passed:
            return
        # Without jobs it is the shell itself, which only said that it was done.
        self.commands.kill_all_but({self.pid} if self.jobs() else set(), self.on_exit)
        if passed:
            why = confinement.quota.finish_command()
        self.streams[1].add_line(f"[background jobs were killed: {why}]")

    def _end_jobs(self) -> None:
        """Of a shell that has gone."""
        if self.streams is None:
            return
        self.commands.kill_all_but(set(), self.on_exit)
        for stream in self.streams:
            stream.empty()

    def jobs(self) -> list[int]:
        """The processes that run beside the shell."""
        self.commands.reap(self.on_exit)
        return [pid for pid in self.commands.other_pids() if pid != self.pid]

    def pids(self) -> list[int]:
        """The shell and its jobs."""
        return self.commands.other_pids() if self.pid else []

    def on_exit(self, pid: int, status: int) -> None:
        """A child of the worker has ended; if it was the shell, there is none any more."""
        if pid == self.pid:
            self.code = os.waitstatus_to_exitcode(status)
            self.pid = 0
            for fd in (self.feed, self.status, self.end):
                os.close(fd)

    def _start(self) -> None:
        keep = self.commands.limits["output_bytes"]
        theirs, self.feed = os.pipe()
        self.status, status_end = os.pipe()
        out, out_end = os.pipe()
        err, err_end = os.pipe()
        self.pid = self.commands.start(ARGV, self.commands.dev_null, out_end, err_end, (theirs, status_end))
        for fd in (theirs, status_end, out_end, err_end):
            os.close(fd)
        self.end = os.pidfd_open(self.pid)
        os.set_blocking(self.status, False)
        before, self.streams = self.streams, (Stream(out, keep), Stream(err, keep))
        if before is not None:  # of a shell that was killed: its last words come with this one's first
            for stream, last in zip(self.streams, before, strict=True):
                os.close(last.fd)
                stream.output = last.output
            self.streams[1].add_line(ENDED)

    def _exit_code(self, patience_s: float) -> int | None:
        """The exit code of the command that was sent last, or None when the shell will not tell it."""
        said, deadline = b"", time.monotonic() + patience_s
        while True:
            try:
                more = os.read(self.status, 4096)
            except BlockingIOError:
                more = None
            if more == b"":
                return None
            said += more or b""
            for line in said.split(b"\n")[:-1]:
                token, _, code = line.partition(b" ")
                if token == b"%d" % self.number and code.isdigit() and len(code) <= 3:
                    return int(code) & 0xFF
            wait = deadline - time.monotonic()
            if wait <= 0 or not select.select([self.status], [], [], wait)[0]:
                return None

    def _shell_exit_code(self, gone: bool) -> int:
        """Its own exit code, once no process of it is left. gone: the shell has ended by itself."""
        if gone:
            self.on_exit(*os.waitpid(self.pid, 0))
        self.commands.kill_all_but(set(), self.on_exit)
        return self.code

    def _judge(self, code: int, err: Stream) -> str:
        if code == 0:
            return "ok"
        if code in (128 + signal.SIGXCPU, -signal.SIGXCPU):
            return "timeout"
        return "out_of_memory" if command.reports_allocation_failure(err) else "nonzero"
