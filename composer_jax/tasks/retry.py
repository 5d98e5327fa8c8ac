"""Sandbox commands that are repeated when the sandbox dies, and the proof that a command kills its sandbox."""

from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from composer_jax.sandbox import Change, Sandbox, SandboxDied, SandboxKilled

T = TypeVar("T")

ATTEMPTS = 3  # one death is an accident of the infrastructure; three in a row are an outage
KILLS = 2  # deaths under one command after which a sandbox without the command tells the two causes apart


async def retry_if_sandbox_dies(acquire: Callable[[], Awaitable[Sandbox]], run: Callable[[Sandbox], Awaitable[T]]) -> T:
    """Awaits `run` with a sandbox of `acquire`, and repeats both when the sandbox dies. `run` closes its sandbox.

    A death in `acquire` is one of the infrastructure. After KILLS deaths in `run` a further sandbox of `acquire` runs a
    harmless command: if it lives, what `run` does is the cause.

    Raises:
      SandboxKilled: `run` kills its sandbox.
      SandboxDied: ATTEMPTS sandboxes died in a row otherwise.
    """
    deaths = 0
    for attempt in range(1, ATTEMPTS + 1):
        sandbox = None
        try:
            sandbox = await acquire()
            return await run(sandbox)
        except SandboxDied as error:
            deaths += sandbox is not None
            if deaths == KILLS:
                async with await acquire() as control:
                    await control.run(["true"])
                raise SandboxKilled(f"{KILLS} sandboxes died under the same command, the last one: {error}") from error
            if attempt == ATTEMPTS:
                raise
    raise AssertionError("unreachable")


async def apply_layers(sandbox: Sandbox, *layers: Mapping[str, Change]) -> Sandbox:
    """Returns a fresh sandbox with these changes, each on top of those before.

    Raises SandboxFileError when the changes cannot be made; the sandbox is then closed.
    """
    try:
        for changes in layers:
            await sandbox.apply(changes)
    except BaseException:
        await sandbox.close()
        raise
    return sandbox
