"""The shell of one container: bash, or sh where there is none, over the pipes of `exec --interactive`.

It keeps working folder, variables and background jobs. Each command is read as one word for `eval`, so nothing in it
can be taken for what comes next; the end of its output is a line with a word that is drawn anew for each. A command
that must be stopped takes the shell with it.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shlex
from dataclasses import dataclass

from composer_jax.sandbox.kept import Kept

# A login shell: images prepare the environment of whoever works in them in its profile.
START = ["sh", "-c", "command -v bash > /dev/null && exec bash --login; exec sh -l"]
# Numbers of descriptors have one digit in sh. What is listed last are the processes of the container.
PROLOGUE = """exec 8>&1 9>&2
composer_status() { return "$1"; }
composer_end() {
  set -- "$?" "$1" /proc/[0-9]*
  printf '\\n%s%s %s\\n' "$2" "$1" "$(($# - 2))" >&8; printf '\\n%s\\n' "$2" >&9
  COMPOSER_STATUS=$1
}
COMPOSER_STATUS=0
"""
COMMAND = """composer_status "$COMPOSER_STATUS"
eval {command} < /dev/null 8>&- 9>&-
composer_end {word}
"""
ENDED = "[the shell has ended: the next command starts in a new one, in the workspace]\n"
IDLE_PROCESSES = 3  # process 1, what it waits for, and the shell


@dataclass(frozen=True)
class Ended:
    """code: the exit status; None when there is none, because the shell itself has ended. jobs: processes that run
    beside the shell."""

    code: int | None
    jobs: int


class Shell:
    """process: of the engine, with pipes to the shell."""

    def __init__(self, process: asyncio.subprocess.Process):
        self.process = process
        self._said = PROLOGUE

    @property
    def alive(self) -> bool:
        return self.process.returncode is None

    async def run(self, command: str, out: Kept, err: Kept) -> Ended:
        """Runs a command. What background jobs say since the last one belongs to its output."""
        word = secrets.token_hex(16)
        said, self._said = self._said + COMMAND.format(command=shlex.quote(command), word=word), ""
        mark = f"\n{word}".encode()
        ends = asyncio.gather(out.read_to(self.process.stdout, mark), err.read_to(self.process.stderr, mark))
        try:
            self.process.stdin.write(os.fsencode(said))
            await self.process.stdin.drain()
        except ConnectionError:  # it has ended, which its output says as well
            pass
        except BaseException:
            ends.cancel()
            raise
        found, told = await ends
        if found is None or told is None:
            return Ended(None, 0)
        code, processes = map(int, found.split())
        return Ended(code, max(0, processes - IDLE_PROCESSES))

    async def close(self) -> None:
        """Lets go of the pipes. Whoever ends the shell in the container does so before."""
        if self.alive:
            self.process.kill()
            await self.process.wait()
