"""The persistent shell of one sandbox: a bash in which commands run one after the other.

It keeps the working folder, variables, functions and background jobs. A command that exceeds a limit is killed with
everything it started; jobs of earlier commands go on. If the shell itself ends (`exit`, `exec`, a limit), its jobs end
with it and the next command starts in a new shell.

The worker cannot distinguish bash from what bash runs: a command that forges its exit code deceives only its author.
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
LAST_WORD_S = 1.0  # for the shell to notice that its child was killed
CHECK_S = 0.25  # between two checks of background jobs while no request comes
ENDED = "[the shell has ended: the next command starts in a new one, in the workspace]"


class Shell:
    """The shell. `commands` starts, watches and limits its processes."""

    def __init__(self, commands: Commands):
        self.commands = commands
        self.pid = 0  # of bash; 0: there is no shell
        self.streams: tuple[Stream, Stream] | None = None  # stdout and stderr, with output not yet reported
        self.number = 0
        self.next_check = 0.0

    def run(self, text: str, timeout_s: float) -> tuple[dict[str, Any], bytes]:
        """Runs a command; returns header and body as Commands.run does, the header with the number of running jobs."""
        started = time.monotonic()
        known = set(self.jobs())  # also notices that the shell was killed
        if not self.pid:
            self._end_jobs()
            known = set()
            self._start()
        streams = self._require_streams()
        self.number += 1
        message = b"%d\0%b\0" % (self.number, os.fsencode(text))
        for stream in streams:
            stream.before = stream.output.total
        deadline, code = started + timeout_s, None
        stopped = self.commands.watch([self.status, self.end], streams, os.dup(self.feed), message, deadline)
        if stopped:
            # Memory and processes are limits of the command and all jobs together.
            spared = known if stopped in ("timeout", "output_limit") else set()
            self.commands.kill_all_but({self.pid, *spared}, self.on_exit, spared)
            code = self._exit_code(LAST_WORD_S) if self.pid else None
            for stream in streams:
                stream.empty()
            if known and not spared:
                streams[1].add_line("[background jobs were killed, too: with them the command passed a limit]")
        elif (code := self._exit_code(0.0)) is None:  # the shell is ending, or another program has replaced it
            stopped = self.commands.watch([self.end], streams, -1, b"", deadline)
        if code is None:
            code = self._shell_exit_code(has_ended=not stopped)
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
        """Waits for a request of the host or the end of the shell; reads output of jobs and checks limits meanwhile.

        This also runs without jobs: a command that forged the end of its output may start processes at any time.
        """
        poll = select.poll()
        poll.register(channel, select.POLLIN)
        by_fd = {stream.fd: stream for stream in self._require_streams()}
        for fd in by_fd:
            poll.register(fd, select.POLLIN)
        while self.pid:
            wait = max(0.0, self.next_check - time.monotonic())
            readable = [fd for fd, _ in poll.poll(1000 * wait)]
            for fd in readable:
                if fd in by_fd and not by_fd[fd].empty():
                    poll.unregister(fd)
            self.commands.reap(self.on_exit)
            self._check_limits()
            if channel in readable:
                return
        self._end_jobs()

    def _check_limits(self) -> None:
        """Checks memory, disk and processes every CHECK_S seconds; kills the jobs when they exceed a limit."""
        if not self.pid or time.monotonic() < self.next_check:
            return
        self.next_check = time.monotonic() + CHECK_S
        confinement = self.commands.confinement
        why = "together they held more memory than the limit"
        over_memory = self.commands.exceeds_memory()
        over_quota = not over_memory and confinement is not None and confinement.quota.is_exceeded()
        if not over_memory and not over_quota:
            return
        # Without jobs, the shell itself exceeds the limit: its command forged the end of its output.
        self.commands.kill_all_but({self.pid} if self.jobs() else set(), self.on_exit)
        if over_quota and confinement is not None:
            why = confinement.quota.finish_command()
        self._require_streams()[1].add_line(f"[background jobs were killed: {why}]")

    def _require_streams(self) -> tuple[Stream, Stream]:
        if self.streams is None:
            raise RuntimeError("the shell was not started")
        return self.streams

    def _end_jobs(self) -> None:
        """Kills the jobs of a shell that has ended, and reads their last output."""
        if self.streams is None:
            return
        self.commands.kill_all_but(set(), self.on_exit)
        for stream in self.streams:
            stream.empty()

    def jobs(self) -> list[int]:
        """Returns the pids of the processes beside the shell."""
        self.commands.reap(self.on_exit)
        return [pid for pid in self.commands.other_pids() if pid != self.pid]

    def pids(self) -> list[int]:
        """Returns the pids of the shell and its jobs."""
        return self.commands.other_pids() if self.pid else []

    def on_exit(self, pid: int, status: int) -> None:
        """Notes that a child of the worker has ended, which may be the shell."""
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
        if before is not None:  # output of a killed shell, reported with that of the next command
            for stream, last in zip(self.streams, before, strict=True):
                os.close(last.fd)
                stream.output = last.output
            self.streams[1].add_line(ENDED)

    def _exit_code(self, patience_s: float) -> int | None:
        """Returns the exit code of the last command; None when the shell does not report it in time."""
        text, deadline = b"", time.monotonic() + patience_s
        while True:
            try:
                more = os.read(self.status, 4096)
            except BlockingIOError:
                more = None
            if more == b"":
                return None
            text += more or b""
            for line in text.split(b"\n")[:-1]:
                token, _, code = line.partition(b" ")
                if token == b"%d" % self.number and code.isdigit() and len(code) <= 3:
                    return int(code) & 0xFF
            wait = deadline - time.monotonic()
            if wait <= 0 or not select.select([self.status], [], [], wait)[0]:
                return None

    def _shell_exit_code(self, has_ended: bool) -> int:
        """Ends all processes of the shell and returns its own exit code. has_ended: the shell ended by itself."""
        if has_ended:
            self.on_exit(*os.waitpid(self.pid, 0))
        self.commands.kill_all_but(set(), self.on_exit)
        return self.code

    def _judge(self, code: int, err: Stream) -> str:
        if code == 0:
            return "ok"
        if code in (128 + signal.SIGXCPU, -signal.SIGXCPU):
            return "timeout"
        return "out_of_memory" if command.reports_allocation_failure(err) else "nonzero"
