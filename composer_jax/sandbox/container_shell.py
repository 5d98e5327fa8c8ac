"""The shell of one container: bash, or sh where there is none, over the pipes of `exec --interactive`.

It keeps working folder, variables and background jobs. A command is one quoted word for `eval`, so no part of it can be
read as the next command. Its output ends with a line that holds a random word, drawn for each command. A command that
guesses the word deceives only its author: no grade depends on the output of the shell.
"""

import asyncio
import contextlib
import os
import re
import secrets
import shlex
from dataclasses import dataclass

from composer_jax.sandbox.inside.truncated_output import TruncatedOutput

START = ["sh", "-c", "command -v bash > /dev/null && exec bash --noprofile --norc; exec sh"]
# Not a login shell: /etc/profile of most images resets the PATH that the image sets. Images set up their environment
# (conda, for example) in ~/.bashrc.
# Descriptor numbers have one digit in sh. `command` ignores functions of the same name. The stderr of {} holds only the
# trace of `set -x`.
PROLOGUE = """exec 8>&1 9>&2
composer_status() { return "$1"; }
composer_end() {
  COMPOSER_PROCESSES=$(set +fx; set -- /proc/[0-9]*; command echo $#)
  command printf '\\n%s %s %s\\n' "$1" "$COMPOSER_STATUS" "$COMPOSER_PROCESSES" >&8
  command printf '\\n%s \\n' "$1" >&9
}
COMPOSER_STATUS=0
if [ -n "$BASH_VERSION" ] && [ -f ~/.bashrc ]; then . ~/.bashrc < /dev/null 8>&- 9>&-; fi
"""
COMMAND = """{{ composer_status "$COMPOSER_STATUS"; }} 2> /dev/null
eval {command} < /dev/null 8>&- 9>&-
COMPOSER_STATUS=$?
{{ composer_end {word}; }} 2> /dev/null
"""
SHELL_ENDED = "[the shell has ended: the next command starts in a new one, in the workspace]\n"
IDLE_PROCESSES = 4  # process 1, its sleep, the shell, and the subshell that counts
LONGEST_END = 64  # bytes that may follow the word
END_S = 10.0  # longest the engine may take to notice that the shell has ended
_END = re.compile(rb" (\d{1,3}) (\d{1,7})")


@dataclass(frozen=True)
class CommandEnd:
    """How a command ended. code: exit status. jobs: processes beside the shell. alive: whether the shell still runs."""

    code: int
    jobs: int
    alive: bool


class ContainerShell:
    """A shell behind the pipes of an engine process. room: bytes kept of each stream of one command.

    Both streams are read all the time: output of jobs between two commands belongs to the second command.
    """

    def __init__(self, process: asyncio.subprocess.Process, room: int):
        if process.stdin is None or process.stdout is None or process.stderr is None:
            raise ValueError("the process of a shell needs pipes for stdin, stdout and stderr")
        self.process = process
        self._stdin = process.stdin
        self._readers = _StreamReader(process.stdout, room), _StreamReader(process.stderr, room)
        self._unsent = PROLOGUE

    @property
    def alive(self) -> bool:
        return self.process.returncode is None

    async def run(self, command: str) -> CommandEnd:
        """Runs a command; `output` then returns what it printed, also when this call was cancelled."""
        word = secrets.token_hex(16)
        script, self._unsent = self._unsent + COMMAND.format(command=shlex.quote(command), word=word), ""
        ends = [reader.expect(word.encode()) for reader in self._readers]
        with contextlib.suppress(ConnectionError):  # the shell has ended, and so do its streams
            self._stdin.write(os.fsencode(script))
            await self._stdin.drain()
        end, _ = await asyncio.gather(*ends)
        match = _END.fullmatch(end) if end is not None else None
        if match is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(END_S):
                    await self.process.wait()
            return CommandEnd(self.process.returncode if self.process.returncode is not None else 1, 0, alive=False)
        return CommandEnd(int(match[1]), max(0, int(match[2]) - IDLE_PROCESSES), alive=True)

    def output(self) -> tuple[TruncatedOutput, TruncatedOutput]:
        """Returns stdout and stderr up to the end of the last command, or up to now if it has not ended."""
        out, err = (reader.take() for reader in self._readers)
        return out, err

    async def close(self) -> None:
        """Ends the connection to the shell; its processes in the container are not touched."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
        # Process.wait returns when the pipes are at their end, which the readers reach.
        await self.process.wait()
        for reader in self._readers:
            reader.reading.cancel()


class _StreamReader:
    """Reads one stream and finds the end of a command in it."""

    def __init__(self, stream: asyncio.StreamReader, room: int):
        self._stream, self._room = stream, room
        self._output, self._pending = TruncatedOutput(room), b""  # pending: may be the start of the end line
        self._finished: TruncatedOutput | None = None
        self._word, self._end = b"", asyncio.get_running_loop().create_future()
        self._is_over = False
        self.reading = asyncio.create_task(self._read())

    def expect(self, word: bytes) -> asyncio.Future[bytes | None]:
        """Returns a future of what follows `word` on its line; None when the stream ends without the word."""
        self._word, self._end = word, asyncio.get_running_loop().create_future()
        if self._is_over:
            self._end.set_result(None)
        return self._end

    def take(self) -> TruncatedOutput:
        """Returns what came before the word; everything so far if the word has not come."""
        if self._finished is None:
            self._word = b""
            self._scan()
            self._finish_output()
        output, self._finished = self._finished or TruncatedOutput(self._room), None
        return output

    async def _read(self) -> None:
        while data := await self._stream.read(65536):
            self._pending += data
            self._scan()
        self._is_over, self._word = True, b""
        self._scan()
        if not self._end.done():
            self._end.set_result(None)

    def _scan(self) -> None:
        start = self._pending.find(self._word) if self._word else -1
        if start < 0:
            # As long as the word and the line break before it, less one.
            safe = max(0, len(self._pending) - len(self._word)) if self._word else len(self._pending)
            self._output.add(self._pending[:safe])
            self._pending = self._pending[safe:]
            return
        after = start + len(self._word)
        end = self._pending.find(b"\n", after)
        if end < 0 and len(self._pending) - after < LONGEST_END:
            return  # the rest of the line has not come
        rest = self._pending[after:end] if end >= 0 else b""
        self._output.add(self._pending[:start].removesuffix(b"\n"))
        self._pending = self._pending[end + 1 :] if end >= 0 else b""
        self._word = b""
        self._finish_output()
        if not self._end.done():
            self._end.set_result(rest)
        self._scan()

    def _finish_output(self) -> None:
        self._finished, self._output = self._output, TruncatedOutput(self._room)
