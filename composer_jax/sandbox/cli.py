"""`python -m launch.sandbox`: one command in a sandbox of its own, on a copy of a folder."""

import contextlib
import os
import stat
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from composer_jax.errors import UserError
from composer_jax.sandbox.change import Change
from composer_jax.sandbox.errors import SandboxDied, SandboxFileError
from composer_jax.sandbox.inside import files
from composer_jax.sandbox.limits import MIB, SandboxLimits
from composer_jax.sandbox.local_pool import LocalSandboxPool
from composer_jax.sandbox.run_result import RunResult

FAILED = 125
"""Exit code for a failure of the sandbox itself, as with env(1) and container engines."""


async def run_command(
    command: Sequence[str],
    folder: Path,
    limits: SandboxLimits,
    *,
    backend: str = "auto",
    network: bool = False,
    packages: Path | None = None,
    stdin: bytes = b"",
    write_back: bool = False,
    on_result: Callable[[RunResult], None] = lambda result: None,
) -> RunResult:
    """Runs a command with `folder` as the workspace. The folder itself changes only with `write_back`, afterwards.

    packages: a folder that Python inside can import from. on_result: called with the result before anything is written.

    Raises:
      UserError: the folder cannot be read, or the machine cannot build a sandbox.
      SandboxDied: the sandbox failed.
      SandboxFileError: what the command changed cannot be written back.
    """
    folder = folder.resolve()
    async with LocalSandboxPool(limits, backend, size=1, network=network) as pool:
        packages_tree = pool.tree(packages) if packages else None
        async with await pool.acquire({}, pool.tree(folder), packages=packages_tree, network=network) as sandbox:
            result = await sandbox.run(command, stdin=stdin)
            on_result(result)
            if write_back:
                apply_changes(folder, await sandbox.changes(), limits)
    return result


def apply_changes(folder: Path, changes: Mapping[str, Change], limits: SandboxLimits) -> None:
    """Makes changes in a folder of the host. Each file is replaced atomically, and no link is followed.

    Raises SandboxFileError with the path that cannot be written.
    """
    ordered = sorted(changes.items())
    index = [(path, change.kind, _mode(folder / path, change), len(change.data)) for path, change in ordered]
    target = files.WorkspaceFiles(str(folder), "/workspace", limits.workspace_mb * MIB)
    try:
        target.apply(index, b"".join(change.data for _, change in ordered))
    except files.FileRefused as error:
        raise SandboxFileError(f"writing back stopped: {error}") from None
    finally:
        os.close(target.root)


def _mode(path: Path, change: Change) -> int:
    """Returns the mode of a change without the read rights that tree.copy_folder added to files of root."""
    try:
        before = stat.S_IMODE(path.lstat().st_mode)
    except (OSError, ValueError):  # not there, or a name that nothing can have, which apply() refuses
        return change.mode
    opened = 0o755 if change.kind == "folder" else 0o644
    return before if change.mode == before | opened else change.mode


async def main(command: Sequence[str], folder: Path, **settings) -> int:
    """Prints the output of run_command, and errors of the sandbox itself to stderr; returns the exit code."""
    try:
        result = await run_command(command, folder, **settings, on_result=_show)
    except (UserError, SandboxDied, SandboxFileError) as error:
        print(f"sandbox: {' '.join(str(error).split())}", file=sys.stderr)
        return FAILED
    return result.exit_code


def _show(result: RunResult) -> None:
    with contextlib.suppress(BrokenPipeError):  # as when the reader is `head`
        sys.stdout.write(result.stdout)
        sys.stdout.flush()
    sys.stderr.write(result.stderr)
    if result.outcome not in ("ok", "nonzero"):
        print(f"sandbox: {_EXPLAINED[result.outcome]} after {result.seconds:.1f} s", file=sys.stderr)


_EXPLAINED = {
    "timeout": "stopped: out of time (--timeout)",
    "out_of_memory": "stopped: out of memory (--memory)",
    "output_limit": "stopped: too much output",
}
