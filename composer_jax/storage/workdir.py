"""The folder of a run: belongs to one config and to one process at a time, and records which stages are done.

    DIR/config.json       the resolved config and its hash; written once, and compared at every opening
    DIR/.lock             locked while a process works in the folder, and holds its id
    DIR/stages/NAME.json  written atomically when stage NAME is done

All other files in the folder belong to the stages. DIR is a folder of this machine or gs://BUCKET/FOLDER. The stages
of a run in a bucket work in a local mirror of it (storage/mirror.py), and their changes are published at the points
from which the run can continue: before a checkpoint is written, when a stage is done, and at the end.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from composer_jax.atomic_write import write_atomically
from composer_jax.errors import UserError
from composer_jax.storage.bucket import BucketFolder, is_url
from composer_jax.storage.bucket_run import BucketRun

_CONFIG = "config.json"
_LOCK = ".lock"
_SHOWN = 8  # differing fields listed in one error
_ABSENT = object()
SIMULATION = ("users", "users_options")
"""Fields of the section "traffic" that are compared: a simulation goes on with the users that it began with."""


class FolderInUse(UserError):
    """Another process has locked a folder."""


class Workdir:
    """An open run folder; use it in a `with` block or `close` it.

    path: a folder, created if it does not exist, or gs://BUCKET/FOLDER.
    config: the resolved config as plain data: nested mappings of JSON values (`ConfigDict.to_dict()`). Tuples equal
      lists, because JSON has no tuples.
    holder: with several processes, process 0 opens the folder without it; the others pass process 0's `holder` and
      share the folder without locking it.

    Attributes:
      path: absolute; for a URL the local mirror.
      url: the URL, or None.
      config_hash: 12 hex digits of the SHA-256 of the config as canonical JSON.
      holder: the content of the lock file: the id of the process that holds it, and a token that differs at every
        opening.

    Raises:
      UserError: the folder is not empty and no run folder, belongs to another config, is used by another process (or
        is not locked by `holder`), or cannot be written; a bucket that does not exist or cannot be reached.
      TypeError: the config is not plain JSON.
    """

    def __init__(self, path: str | Path, config: Mapping[str, Any], *, holder: str | None = None):
        canonical = _canonical(config)
        self.config_hash = hashlib.sha256(canonical.encode()).hexdigest()[:12]
        self._lock: int | None = None
        self._bucket: BucketRun | None = None
        if is_url(path):
            name = str(path)
            self._bucket = BucketRun(name, lambda names: _require_run_folder(names, name), holder)
            self.path, self.holder = self._bucket.path, self._bucket.holder
        else:
            self.path = Path(path).expanduser().absolute()
            self.holder = self._open_local(holder)
        try:
            self._claim(json.loads(canonical))
        except BaseException:
            self._release()
            raise

    @property
    def url(self) -> str | None:
        """The URL of a run in a bucket, without a slash at the end; None for a local folder."""
        return self._bucket.url if self._bucket else None

    def location(self, file: Path | str = "") -> Path | str:
        """Returns the path of a file in the folder, or its URL; `file` is a path in `path` or relative to it."""
        if self.url is None:
            return self.path / file
        relative = Path(self.path, file).relative_to(self.path).as_posix()
        return self.url if relative == "." else f"{self.url}/{relative}"

    def checkpoints(self, stage: str) -> Path | str:
        """Returns the path or URL of the checkpoints of a stage."""
        return self.location(f"checkpoints/{stage}")

    def publish(self) -> None:
        """Uploads what has changed to the bucket of the run, as process 0; does nothing for a local folder."""
        if self._bucket is not None:
            self._bucket.publish()

    def fetch(self) -> None:
        """Downloads what process 0 has published, as another process; does nothing for a local folder."""
        if self._bucket is not None:
            self._bucket.fetch()

    def require_held(self) -> None:
        """Raises a UserError if another run has taken over the bucket; a local lock ends with its process only."""
        if self._bucket is not None:
            self._bucket.require_held()

    def stage_done(self, name: str) -> bool:
        """Whether `mark_done(name)` was called, in this process or an earlier one."""
        return self._stage_file(name).exists()

    def mark_done(self, name: str, payload: Mapping[str, Any]) -> None:
        """Records, atomically, that stage `name` is done; a second call replaces the record.

        payload: plain JSON values for later stages and the report.
        """
        file = self._stage_file(name)
        self.publish()  # first: whoever reads that a stage is done can rely on what it left
        write_atomically(file, (json.dumps(dict(payload), indent=1) + "\n").encode())
        if self._bucket is not None:
            self._bucket.publish_file(file)

    def stage_result(self, name: str) -> dict[str, Any]:
        """Returns the payload of a stage. Raises a UserError if the stage is not done."""
        if not self.stage_done(name):
            raise UserError(f"stage {name!r} is not done in {self.location()}; run it first")
        return _read_json(self._stage_file(name))

    def require_free(self, size: int) -> None:
        """Raises a UserError unless the disk has `size` free bytes."""
        free = shutil.disk_usage(self.path).free
        if free < size:
            raise UserError(
                f"the disk of {self.path} has {_gigabytes(free)} free and this run needs {_gigabytes(size)}; "
                "free some space or choose a --workdir on another disk"
            )

    def close(self) -> None:
        """Publishes what has changed and releases the lock."""
        try:
            if self._bucket is not None and self._bucket.held:
                self._bucket.publish()
        finally:
            self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        # The error that ended the run matters more than what its last seconds left in the mirror.
        with contextlib.suppress(UserError) if error is not None else contextlib.nullcontext():
            self.close()

    def _open_local(self, holder: str | None) -> str:
        """Locks the local folder, or checks that `holder` has; returns the holder."""
        if holder is not None:
            require_holder(self.path, holder)
            return holder
        _make_folder(self.path)
        holder = f"{os.getpid()} {uuid.uuid4().hex[:8]}"
        self._lock = lock_folder(self.path, holder)
        return holder

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        if self._bucket is not None:
            self._bucket.close()

    def _stage_file(self, name: str) -> Path:
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
            raise ValueError(f"a stage name is a file name, of letters, digits and _.- only; {name!r} is not")
        return self.path / "stages" / f"{name}.json"

    def _claim(self, config: dict[str, Any]) -> None:
        """Writes the config into a new folder, or compares it with that of an old one."""
        file = self.path / _CONFIG
        if not file.exists():
            record = {"config_hash": self.config_hash, "config": config}
            write_atomically(file, (json.dumps(record, indent=1) + "\n").encode())
            self.publish()
            return
        try:
            theirs = _read_json(file)["config"]
        except (KeyError, TypeError) as error:
            raise UserError(f"{self.location(file)} is not the config of a run; choose another --workdir") from error
        compared = (_compared(theirs), _compared(config))
        if _canonical(compared[0]) != _canonical(compared[1]):
            differences = list(_differences(*compared))
            more = f" and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
            raise UserError(
                f"{self.location()} belongs to a run with another config: {', '.join(differences[:_SHOWN])}{more} "
                "(there -> here). Use the config it was started with, choose another --workdir, or delete "
                "the folder to start over"
            )


def _compared(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a run that goes on must have in common with its beginning.

    How it learns from traffic may change: each release names what it used.
    """
    kept = {name: value for name, value in config.items() if name != "traffic"}
    traffic = config.get("traffic")
    users = {f"traffic.{name}": traffic.get(name) for name in SIMULATION} if isinstance(traffic, Mapping) else {}
    return kept | users


def _make_folder(path: Path) -> None:
    """Creates the folder. Raises a UserError if it holds files and is not a run folder."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        names = sorted(entry.name for entry in path.iterdir())
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"cannot use {path} as a run folder: {reason}; choose another --workdir") from error
    _require_run_folder(names, path)


def _require_run_folder(names: Sequence[str], path: Path | str) -> None:
    """Raises a UserError if a folder with these names in it holds files and is not a run folder."""
    # A run killed during its first moments leaves only its lock and the temporary file of its config.
    foreign = [name for name in names if name != _LOCK and not name.startswith(f".{_CONFIG}.")]
    if foreign and _CONFIG not in names:
        shown = ", ".join(foreign[:3]) + (", ..." if len(foreign) > 3 else "")
        raise UserError(
            f"{path} is not empty ({shown}) and not the folder of a run, which would have a {_CONFIG}; "
            "choose another --workdir"
        )


def read_run_config(path: Path | str) -> dict[str, Any] | None:
    """Returns the content of a run's config.json, in a local folder or a bucket; None if no run has begun there.

    Raises:
      UserError: the file is not a JSON object, or the bucket cannot be read.
    """
    file = f"{path}/{_CONFIG}"
    try:
        if is_url(path):
            stored = BucketFolder(str(path)).read(_CONFIG)
            content = None if stored is None else stored[0]
        else:
            local = Path(path).expanduser() / _CONFIG
            content = local.read_bytes() if local.is_file() else None
        record = None if content is None else json.loads(content)
    except (OSError, ValueError) as error:
        raise UserError(f"{file} is not a config of a run: {error}.") from error
    if content is None:
        return None
    if not isinstance(record, dict) or not isinstance(record.get("config"), dict):
        raise UserError(f'{path}/{_CONFIG} is not a config of a run: it has no object "config".')
    return record


def require_holder(path: Path, holder: str) -> None:
    """Raises a UserError unless `holder` has locked this folder."""
    try:
        actual = (path / _LOCK).read_text(errors="replace").strip()
    except OSError:
        actual = None
    if actual != holder:
        raise UserError(
            f"{path} on {socket.gethostname()} is not the folder that process 0 works in; several processes need a "
            "--workdir on a disk that all of their hosts share, or in a bucket"
        )


def lock_folder(path: Path, holder: str, flag: str = "--workdir") -> int:
    """Locks the folder until the returned descriptor is closed or the process ends, by whatever means.

    holder: what the lock file says, beginning with the process's id. flag: by which the user chose the folder.

    Raises FolderInUse for a folder that another process has locked, UserError for one that cannot be locked.
    """
    try:
        lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise UserError(f"cannot write in {path}: {error.strerror}; choose another {flag}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        words = os.pread(lock, 32, 0).decode(errors="replace").split()
        os.close(lock)
        who = f"process {words[0]}" if words else "another process"
        raise FolderInUse(f"{path} is in use by {who}; wait for it or choose another {flag}") from error
    except OSError as error:
        os.close(lock)
        raise UserError(
            f"the disk of {path} cannot lock files: {error.strerror}; choose a {flag} on a local disk"
        ) from error
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{holder}\n".encode(), 0)
    os.fsync(lock)  # other hosts read it while it is open here
    return lock


def _canonical(config: Mapping[str, Any]) -> str:
    return json.dumps(config, sort_keys=True, separators=(",", ":"))


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read ({error}); restore it or choose another --workdir") from error


def _differences(theirs: Any, ours: Any, field: str = "") -> Iterator[str]:
    """Yields one line per differing leaf, like 'rl.steps: 60 -> 100'."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        for key in sorted(theirs.keys() | ours.keys()):
            inner = f"{field}.{key}" if field else key
            yield from _differences(theirs.get(key, _ABSENT), ours.get(key, _ABSENT), inner)
    elif theirs is _ABSENT or ours is _ABSENT or _canonical(theirs) != _canonical(ours):
        yield f"{field}: {_format_value(theirs)} -> {_format_value(ours)}"


def _format_value(value: Any) -> str:
    if value is _ABSENT:
        return "absent"
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
