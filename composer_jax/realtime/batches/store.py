"""Batches on disk.

    WORKDIR/batches/0003/batch.json               what release 3 learns from, and all numbers of it
    WORKDIR/batches/0003/groups/00000017.frames   a session as a PlayedGroup of one episode (rl/played_group.py)
    WORKDIR/batches/0003.claim.json               what was decided before the release claimed its sessions

A batch is there whole, or not at all. It holds copies of users' conversations: WORKDIR/batches is closed to other users
of the machine, and `forget_sessions` deletes them.
"""

import dataclasses
import errno
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

from composer_jax.atomic_write import write_atomically
from composer_jax.errors import UserError
from composer_jax.frames import Buffer
from composer_jax.rl.played_group import PlayedGroup, decode_group, encode_group

FORMAT = 2
FOLDER = "batches"
MANIFEST = "batch.json"


class SessionForgotten(UserError):
    """A session was forgotten after its batch was read; the batch that is there now does not have it."""


class StoredGroups(Sequence[PlayedGroup]):
    """The groups of a batch, each of them read from its file when it is asked for.

    Raises SessionForgotten for a group that was deleted meanwhile, and UserError for one that is damaged.
    """

    def __init__(self, folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
        """rows: of the manifest's sessions."""
        self._folder, self._rows = folder, rows

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> PlayedGroup: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[PlayedGroup]: ...
    def __getitem__(self, index: int | slice) -> PlayedGroup | Sequence[PlayedGroup]:
        if isinstance(index, slice):
            return StoredGroups(self._folder, self._rows[index])
        row = self._rows[index]
        file = group_file(self._folder, row["group"])
        try:
            data = file.read_bytes()
        except FileNotFoundError as error:
            if row["session"] in {one["session"] for one in _read_json(self._folder / MANIFEST)["sessions"]}:
                raise UserError(f"{file} is missing; restore it from a copy.") from error
            raise SessionForgotten(
                f"a session of {self._folder} was forgotten while its batch was in use; run the command again, which "
                "goes on without it."
            ) from error
        except OSError as error:
            raise UserError(f"{file} cannot be read: {error.strerror}; restore it from a copy.") from error
        if hashlib.sha256(data).hexdigest() != row["sha256"]:
            raise UserError(f"{file} is not the group that {self._folder / MANIFEST} names; restore it from a copy.")
        return decode_group(PlayedGroup, data)


@dataclasses.dataclass(frozen=True)
class TrafficBatch:
    """A batch of users' sessions."""

    manifest: Mapping[str, Any]
    """{"release", "chain", "anchor", "inputs", "sessions", "drops", "monitors"}; see build.py."""
    groups: Sequence[PlayedGroup]
    """One for each of manifest["sessions"], in their order; numbers may have gaps after a session was forgotten."""


def batch_folder(workdir: str | Path, number: int) -> Path:
    """Returns the folder of the batch of a release."""
    return Path(workdir).expanduser() / FOLDER / f"{number:04d}"


def group_file(folder: Path, number: int) -> Path:
    """Returns the path of a group in the folder of a batch."""
    return folder / "groups" / f"{number:08d}.frames"


def has_batch(workdir: str | Path, number: int) -> bool:
    """Whether the batch of a release is there."""
    return (batch_folder(workdir, number) / MANIFEST).is_file()


def read_batch(workdir: str | Path, number: int) -> TrafficBatch:
    """Returns the batch of a release, whose groups are read when they are asked for.

    Raises UserError if it is not there, damaged, or of another format; a group's own error comes with the group.
    """
    folder = batch_folder(workdir, number)
    if not has_batch(workdir, number):
        raise UserError(f"{folder} has no batch; make it with launch.traffic batch.")
    manifest = _read_json(folder / MANIFEST)
    if manifest.get("format") != FORMAT:
        raise UserError(f"{folder / MANIFEST} has another format than {FORMAT}; use the program that wrote it.")
    return TrafficBatch(manifest, StoredGroups(folder, manifest["sessions"]))


def require_batch_of(batch: TrafficBatch, chain: str, anchor: int) -> None:
    """Raises UserError for a batch of another chain of versions, or of another version in it."""
    manifest = batch.manifest
    if (manifest["chain"], manifest["anchor"]) != (chain, anchor):
        raise UserError(
            f"the batch of release {manifest['release']} is for version {manifest['anchor']} of {manifest['chain']}, "
            f"and this is version {anchor} of {chain}; use the run that publishes there, or another --workdir."
        )


def write_batch(workdir: str | Path, number: int, manifest: Mapping[str, Any], groups: Iterable[PlayedGroup]) -> None:
    """Writes the batch of a release.

    manifest: its "sessions" has a row for each group, in their order, which gets the group's number and hash.
    """
    folder = batch_folder(workdir, number)
    _close_folder(folder.parent)
    _remove_left(folder)
    temporary = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}")
    try:
        (temporary / "groups").mkdir(parents=True)
        rows = []
        for row, group in zip(manifest["sessions"], groups, strict=True):
            buffers, digest = encode_group(group), hashlib.sha256()
            for buffer in buffers:
                digest.update(buffer)
            _write(group_file(temporary, group.number), buffers)
            rows.append({**row, "group": group.number, "sha256": digest.hexdigest()})
        content = {"format": FORMAT, **manifest, "sessions": rows}
        _write(temporary / MANIFEST, [(json.dumps(content, indent=1, allow_nan=False) + "\n").encode()])
        _sync(temporary / "groups")
        _sync(temporary)
        temporary.rename(folder)
        _sync(folder.parent)
    except OSError as error:
        if error.errno == errno.ENOTEMPTY:
            raise UserError(f"cannot write {folder}: a folder without {MANIFEST} is there; move it away.") from error
        raise UserError(f"cannot write {folder}: {error.strerror}; free some space.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def forget_sessions(workdir: str | Path, is_gone: Callable[[Mapping[str, Any]], bool]) -> list[str]:
    """Deletes sessions from all batches; returns their names.

    Their rows go first, and then their groups; a call that was killed in between is finished by the next one.

    is_gone: whether a row of a manifest's sessions is deleted.
    """
    names: list[str] = []
    for number in batch_numbers(workdir):
        folder = batch_folder(workdir, number)
        manifest = _read_json(folder / MANIFEST)
        gone = [row for row in manifest["sessions"] if is_gone(row)]
        if gone:
            remaining = [row for row in manifest["sessions"] if not is_gone(row)]
            manifest |= {"sessions": remaining, "forgotten": manifest.get("forgotten", 0) + len(gone)}
            write_atomically(folder / MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())
        known = {group_file(folder, row["group"]) for row in manifest["sessions"]}
        for file in (folder / "groups").iterdir():
            if file not in known:
                file.unlink()
        names += [row["session"] for row in gone]
    return names


def batch_numbers(workdir: str | Path) -> Iterator[int]:
    """Yields the numbers of the releases that have a batch."""
    for path in sorted((Path(workdir).expanduser() / FOLDER).glob("[0-9]*")):
        if path.name.isdigit() and (path / MANIFEST).is_file():
            yield int(path.name)


def claim_file(workdir: str | Path, number: int) -> Path:
    """Returns the path of what was decided before a release claimed its sessions."""
    folder = batch_folder(workdir, number)
    return folder.with_name(f"{folder.name}.claim.json")


def note_claim(workdir: str | Path, number: int, content: Mapping[str, Any]) -> None:
    """Writes what was decided before a release claims its sessions, so that a killed process loses none of it."""
    file = claim_file(workdir, number)
    _close_folder(file.parent)
    write_atomically(file, (json.dumps(content, indent=1) + "\n").encode())


def read_claim(workdir: str | Path, number: int) -> dict[str, Any]:
    """Returns what `note_claim` wrote; {} without."""
    file = claim_file(workdir, number)
    return _read_json(file) if file.exists() else {}


def _close_folder(folder: Path) -> None:
    """Makes the folder of all batches; nobody else reaches the files in it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)  # it may be there already, with another mode
    except OSError as error:
        raise UserError(
            f"cannot close {folder} to other users: {error.strerror}; give a --workdir whose owner you are."
        ) from error


def _remove_left(folder: Path) -> None:
    for left in folder.parent.glob(f".{folder.name}.*"):  # of a process that was killed while it wrote
        shutil.rmtree(left, ignore_errors=True)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
        if not isinstance(content, dict):
            raise ValueError("it is no object")
        return content
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read ({error}); restore it from a copy, or delete its folder.") from error


def _write(path: Path, buffers: Iterable[Buffer]) -> None:
    with path.open("xb") as file:
        file.writelines(buffers)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
