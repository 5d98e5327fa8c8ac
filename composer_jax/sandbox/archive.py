"""Changes as tar archives, which carry them into a container and out of it."""

from __future__ import annotations

import io
import os
import tarfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from composer_jax.sandbox.change import Change
from composer_jax.sandbox.errors import SandboxFileError
from composer_jax.sandbox.inside import files


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


def unpack(archive: bytes) -> dict[str, Change]:
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


def names(folder: Path) -> set[str]:
    """Returns the relative paths of everything in a folder."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


def is_same(path: Path, change: Change) -> bool:
    """Whether a path of the host holds what the change would write there."""
    if path.is_symlink():
        return change.kind == "link" and str(path.readlink()).encode(errors="surrogateescape") == change.data
    if path.is_dir():
        return change.kind == "folder"
    if not path.is_file() or change.kind != "file":
        return False
    return path.stat().st_mode & 0o111 == change.mode & 0o111 and path.read_bytes() == change.data
