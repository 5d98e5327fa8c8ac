"""How the workspace of a container differs from its image, and the tar archives that carry files in and out.

The engine's `diff` names the paths; what is at them is read from the container. A whole workspace is fetched as an
archive, too (unpack_into).
"""

import io
import os
import re
import stat
import tarfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import IO

from composer_jax.sandbox.change import GONE, Change
from composer_jax.sandbox.errors import SandboxFileError
from composer_jax.sandbox.inside import files
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
    pristine = set() if tree is None else {path.relative_to(tree).as_posix() for path in tree.rglob("*")}
    gone = {path for path in pristine | {path for path, mark in marks.items() if mark == "D"} if path not in present}
    changes = {path: GONE for path in gone if not any(str(above) in gone for above in PurePosixPath(path).parents)}
    for path, change in contents.items():
        was_there = change.kind == "folder" and marks[path] == "C"
        if not was_there and not (tree is not None and _is_same(tree / path, change)):
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
            contents |= _unpack(archive.bytes())
    return contents


def pack(changes: Mapping[str, Change]) -> bytes:
    """Returns a tar archive of the files, links and folders of changes, without what they remove."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path, change in sorted(changes.items()):
            if change.kind == "gone":
                continue
            entry = tarfile.TarInfo(path)
            entry.mode, entry.mtime = change.mode, int(time.time())
            if change.kind == "folder":
                entry.type, entry.mode = tarfile.DIRTYPE, change.mode | 0o700
            elif change.kind == "link":
                entry.type, entry.linkname = tarfile.SYMTYPE, change.data.decode(errors="surrogateescape")
            else:
                entry.size = len(change.data)
            tar.addfile(entry, io.BytesIO(change.data) if change.kind == "file" else None)
    return packed.getvalue()


def unpack_into(archive: IO[bytes], folder: Path, most: int) -> None:
    """Unpacks files, folders and links of an archive from a container into a folder; follows no link on the way.

    Raises SandboxFileError for an archive that is broken, that leads out of the folder, or whose files hold more than
    `most` bytes.
    """
    target, left = files.WorkspaceFiles(str(folder), "/", most), most
    try:
        with tarfile.open(fileobj=archive, mode="r:") as tar:
            for entry in tar:
                kind = "folder" if entry.isdir() else "link" if entry.issym() else "file"
                path = entry.name.removeprefix("./")
                if path in ("", ".") or not (entry.isdir() or entry.issym() or entry.isreg() or entry.islnk()):
                    continue
                data = entry.linkname.encode(errors="surrogateescape") if entry.issym() else b""
                if kind == "file":  # for a hard link, the content of the other name
                    content = tar.extractfile(entry)
                    if content is None:
                        raise SandboxFileError(f"{path} is a hard link to something that is not a file")
                    data = content.read(left + 1)
                    left -= len(data)
                    if left < 0:
                        raise SandboxFileError(f"the workspace holds more than {most >> 20} MiB")
                mode = entry.mode & 0o777 | (0o700 if entry.isdir() else 0o600)
                target.apply([(path, kind, mode, len(data))], data)
    except files.FileRefused as error:
        raise SandboxFileError(f"the workspace cannot be fetched: {error}") from None
    except (tarfile.TarError, OSError, ValueError, KeyError) as error:
        raise SandboxFileError(f"the container sent no archive that can be unpacked: {error}") from error
    finally:
        os.close(target.root)


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


def _unpack(archive: bytes) -> dict[str, Change]:
    """Returns the files and links of an archive from a container. Raises SandboxFileError for a broken archive."""
    changes = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            for entry in tar:
                path = entry.name.removeprefix("./")
                if entry.issym():
                    changes[path] = Change("link", entry.linkname.encode(errors="surrogateescape"), 0o777)
                elif (content := tar.extractfile(entry)) is not None:
                    changes[path] = Change("file", content.read(), entry.mode & 0o777)
    except (tarfile.TarError, KeyError) as error:
        raise SandboxFileError(f"the container sent no readable archive: {error}") from error
    return changes


def _is_same(path: Path, change: Change) -> bool:
    """Whether a path of the host holds what the change would write there."""
    if path.is_symlink():
        return change.kind == "link" and str(path.readlink()).encode(errors="surrogateescape") == change.data
    if path.is_dir():
        return change.kind == "folder"
    if not path.is_file() or change.kind != "file":
        return False
    return path.stat().st_mode & 0o111 == change.mode & 0o111 and path.read_bytes() == change.data
