"""The shell of one container: bash, or sh where there is none, over the pipes of `exec --interactive`.

It keeps working folder, variables and background jobs. Each command is read as one word for `eval`, so nothing in it
can be taken for what comes next; the end of its output is a line with a word that is drawn anew for each. A command
that finds out the word deceives its author only: what the shell says is no part of any grade.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import shlex
from dataclasses import dataclass

from composer_jax.sandbox.inside.truncated_output import TruncatedOutput

START = ["sh", "-c", "command -v bash > /dev/null && exec bash --noprofile --norc; exec sh"]
# Not a login shell: /etc/profile of most images takes away the PATH that the image itself sets. What images prepare for
# whoever works in them, such as an environment of conda, stands in ~/.bashrc.
# Numbers of descriptors have one digit in sh. `command` passes over functions of the same name; what {} says on stderr
# is only a trace that `set -x` turned on.
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
IDLE_PROCESSES = 4  # process 1, what it waits for, the shell, and its copy that counts
LONGEST_END = 64  # bytes of what follows the word
END_S = 10.0  # longest the engine may take to notice that the shell has ended
_END = re.compile(rb" (\d{1,3}) (\d{1,7})")


@dataclass(frozen=True)
class CommandEnd:
    """code: the exit status. jobs: processes that run beside the shell. alive: whether the shell goes on."""

    code: int
    jobs: int
    alive: bool


class Shell:
    """process: of the engine, with pipes to the shell. room: bytes that are kept of each stream of one command.

    Both streams are read all the time: what jobs say between two commands belongs to the output of the second.
    """

    def __init__(self, process: asyncio.subprocess.Process, room: int):
        self.process = process
        self._readers = _StreamReader(process.stdout, room), _StreamReader(process.stderr, room)
        self._said = PROLOGUE

    @property
    def alive(self) -> bool:
        return self.process.returncode is None

    async def run(self, command: str) -> CommandEnd:
        """Runs a command. Its output is then in `output`, also that of a command for which nobody waits longer."""
        word = secrets.token_hex(16)
        said, self._said = self._said + COMMAND.format(command=shlex.quote(command), word=word), ""
        ends = [reader.expect(word.encode()) for reader in self._readers]
        with contextlib.suppress(ConnectionError):  # it has ended, which its streams tell as well
            self.process.stdin.write(os.fsencode(said))
            await self.process.stdin.drain()
        found, _ = await asyncio.gather(*ends)
        match = _END.fullmatch(found) if found is not None else None
        if match is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(END_S):
                    await self.process.wait()
            return CommandEnd(self.process.returncode if self.process.returncode is not None else 1, 0, alive=False)
        return CommandEnd(int(match[1]), max(0, int(match[2]) - IDLE_PROCESSES), alive=True)

    def output(self) -> tuple[TruncatedOutput, TruncatedOutput]:
        """What stdout and stderr held up to the end of the last command, or up to now."""
        out, err = (reader.take() for reader in self._readers)
        return out, err

    async def close(self) -> None:
        """Lets go of the shell, without regard to what runs in the container."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
        # Python waits for a process until its pipes are at their end, which they reach because they are read.
        await self.process.wait()
        for reader in self._readers:
            reader.reading.cancel()


class _StreamReader:
    """One stream, read to its end as it comes."""

    def __init__(self, stream: asyncio.StreamReader, room: int):
        self._stream, self._room = stream, room
        self._kept, self._pending = TruncatedOutput(room), b""  # pending: what may be the beginning of the end
        self._told: TruncatedOutput | None = None
        self._word, self._end = b"", asyncio.get_running_loop().create_future()
        self._is_over = False
        self.reading = asyncio.create_task(self._read())

    def expect(self, word: bytes) -> asyncio.Future[bytes | None]:
        """What follows the word on its line, once it has come; None when the stream ends without it."""
        self._word, self._end = word, asyncio.get_running_loop().create_future()
        if self._is_over:
            self._end.set_result(None)
        return self._end

    def take(self) -> TruncatedOutput:
        """What came before the word; or all so far, if that has not come."""
        if self._told is None:
            self._word = b""
            self._look()
            self._cut()
        told, self._told = self._told, None
        return told

    async def _read(self) -> None:
        while data := await self._stream.read(65536):
            self._pending += data
            self._look()
        self._is_over, self._word = True, b""
        self._look()
        if not self._end.done():
            self._end.set_result(None)

    def _look(self) -> None:
        start = self._pending.find(self._word) if self._word else -1
        if start < 0:
            # One more than the word has: the line break before it.
            safe = max(0, len(self._pending) - len(self._word)) if self._word else len(self._pending)
            self._kept.add(self._pending[:safe])
            self._pending = self._pending[safe:]
            return
        after = start + len(self._word)
        end = self._pending.find(b"\n", after)
        if end < 0 and len(self._pending) - after < LONGEST_END:
            return  # the rest of the line is still to come
        found = self._pending[after:end] if end >= 0 else b""
        self._kept.add(self._pending[:start].removesuffix(b"\n"))
        self._pending = self._pending[end + 1 :] if end >= 0 else b""
        self._word = b""
        self._cut()
        if not self._end.done():
            self._end.set_result(found)
        self._look()

    def _cut(self) -> None:
        self._told, self._kept = self._kept, TruncatedOutput(self._room)
