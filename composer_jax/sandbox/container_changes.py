"""How the workspace of a container differs from its image: the engine's `diff`, and what is at the paths it names."""

from __future__ import annotations

import re
import stat
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

from composer_jax.sandbox.archive import is_same, names, unpack
from composer_jax.sandbox.change import GONE, Change
from composer_jax.sandbox.errors import SandboxFileError
from composer_jax.sandbox.inside.truncated_output import TruncatedOutput
from composer_jax.sandbox.limits import MIB

CHUNK = 16 * 1024  # bytes of names in one call: short enough for one command line of any xargs
HEADERS = 16 * 1024  # bytes that a tar archive may need for one file beside its content, and for its end
_STATUS = re.compile(r"[0-9a-f]{1,8} \d{1,18}")

RunInContainer = Callable[[Sequence[str], bytes, int], Awaitable[TruncatedOutput]]
"""(arguments, stdin, bytes of stdout to keep; 0: SandboxLimits.workspace_mb) -> stdout. Raises SandboxFileError when
the command fails."""


def parse_diff(diff: str, workspace: str, hide_history: bool) -> dict[str, str]:
    """Returns path in the workspace -> A(dded), C(hanged) or D(eleted), from the output of the engine's `diff`.

    hide_history: leave out the workspace's .git.
    """
    inside = f"{workspace.rstrip('/')}/"
    pairs = [(line[2:].removeprefix(inside), line[0]) for line in diff.splitlines() if line[2:].startswith(inside)]
    if hide_history:
        pairs = [(path, mark) for path, mark in pairs if path.partition("/")[0] != ".git"]
    return dict(pairs)


def compare(
    marks: Mapping[str, str], present: set[str], contents: Mapping[str, Change], tree: Path | None
) -> dict[str, Change]:
    """Returns how the workspace differs from its image, or from the tree that was copied over it.

    marks: of parse_diff. present: every path of the workspace. contents: what is at the marked paths.
    """
    pristine = set() if tree is None else names(tree)
    gone = {path for path in pristine | {path for path, mark in marks.items() if mark == "D"} if path not in present}
    changes = {path: GONE for path in gone if not any(str(above) in gone for above in PurePosixPath(path).parents)}
    for path, change in contents.items():
        was_there = change.kind == "folder" and marks[path] == "C"
        if not was_there and not (tree is not None and is_same(tree / path, change)):
            changes[path] = change
    return dict(sorted(changes.items()))


async def read_contents(paths: Sequence[str], run: RunInContainer, workspace_mb: int) -> dict[str, Change]:
    """Returns what is at paths of the workspace; pipes and sockets are left out.

    Raises SandboxFileError when files and links hold more than `workspace_mb` MiB.
    """
    contents: dict[str, Change] = {}
    left = workspace_mb * MIB
    encoded = [f"./{path}".encode(errors="surrogateescape") + b"\0" for path in paths]
    for chunk in _chunks(list(zip(paths, encoded, strict=True))):
        folders, packed, size = await _statuses(chunk, run)
        contents |= folders
        left -= size
        if left < 0:
            raise SandboxFileError(f"the changes are more than {workspace_mb} MiB")
        if packed:
            room = workspace_mb * MIB + len(packed) * HEADERS + HEADERS
            archive = await run(["xargs", "-0", "tar", "-cf", "-"], b"".join(packed), room)
            if archive.dropped:
                raise SandboxFileError("files of the workspace grew while they were read")
            contents |= unpack(archive.bytes())
    return contents


async def _statuses(
    chunk: Sequence[tuple[str, bytes]], run: RunInContainer
) -> tuple[dict[str, Change], list[bytes], int]:
    """The folders among some paths, the names of files and links, and how many bytes those hold."""
    output = await run(["xargs", "-0", "stat", "-c", "%f %s"], b"".join(name for _, name in chunk), 0)
    statuses = [line.split() for line in output.text().splitlines()]
    if len(statuses) != len(chunk) or not all(_STATUS.fullmatch(" ".join(words)) for words in statuses):
        raise SandboxFileError("the container's own stat and xargs do not work, so its changes cannot be seen")
    folders, packed, size = {}, [], 0
    for (path, name), (digits, length) in zip(chunk, statuses, strict=True):
        mode = int(digits, 16)
        if stat.S_ISDIR(mode):
            folders[path] = Change("folder", mode=mode & 0o777)
        elif stat.S_ISREG(mode) or stat.S_ISLNK(mode):
            packed.append(name)
            size += int(length)
    return folders, packed, size


def _chunks(named: list[tuple[str, bytes]]) -> Iterator[list[tuple[str, bytes]]]:
    """Parts of at most CHUNK bytes of names each."""
    part, size = [], 0
    for entry in named:
        if part and size + len(entry[1]) > CHUNK:
            yield part
            part, size = [], 0
        part.append(entry)
        size += len(entry[1])
    if part:
        yield part
