"""BucketRun: the folder of a run in a bucket: the lease on it, and the local mirror of its files."""

import fcntl
import hashlib
import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from composer_jax.errors import UserError
from composer_jax.storage.bucket import BucketFolder
from composer_jax.storage.lease import Lease, require_holder
from composer_jax.storage.mirror import Mirror

OPENING_PATIENCE_S = 20.0
"""Seconds for which the requests of the lease are repeated; a bucket that does not answer is soon reported."""


def cache_folder() -> Path:
    """Returns the folder for copies of remote files: ~/.cache/composer_jax, or under XDG_CACHE_HOME."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "composer_jax"


class BucketRun:
    """An open run folder in a bucket.

    Args:
      url: gs://BUCKET/FOLDER.
      check_names: called with the names in the folder before anything is written there; raises a UserError for a folder
        that is not a run.
      holder: None takes the lease; another process of the run passes the token of process 0.

    Attributes:
      url: without a slash at the end. holder: the token of the lease. path: the local mirror.

    Raises:
      UserError: no such bucket, no access, or another run holds the lease.
    """

    def __init__(self, url: str, check_names: Callable[[Sequence[str]], None], holder: str | None):
        folder = BucketFolder(url, patience_s=OPENING_PATIENCE_S)
        self.url = folder.url
        check_names(folder.names())
        self._lease: Lease | None = None
        if holder is None:
            self._lease = Lease(folder)
            self._lease.acquire()
            self.holder = self._lease.token
        else:
            self.holder = holder
            require_holder(folder, holder)
        self._slot: int | None = None
        try:
            self.path, self._slot = _lock_local_folder(self.url)
            self._mirror = Mirror(BucketFolder(url), self.path)
            if self._lease is not None:
                self._mirror.roll_back()
            self._mirror.fetch()
        except BaseException:
            self.close()
            raise

    def require_held(self) -> None:
        """Raises a UserError if another run has taken the folder over."""
        if self._lease is not None:
            self._lease.require()

    def publish(self) -> None:
        """Uploads what has changed in the mirror, if this is the process that holds the lease."""
        if self._lease is not None:
            self._lease.require()
            self._mirror.publish()

    def publish_file(self, path: Path) -> None:
        """Uploads one file of the mirror."""
        self.require_held()
        self._mirror.publish_file(path.relative_to(self.path).as_posix())

    def fetch(self) -> None:
        """Makes the mirror of a process without the lease equal to the bucket."""
        if self._lease is None:
            self._mirror.fetch()

    @property
    def held(self) -> bool:
        """Whether this process may write in the bucket, as far as it knows."""
        return self._lease is not None and self._lease.held

    def close(self) -> None:
        """Gives the lease and the mirror back."""
        try:
            if self._lease is not None:
                self._lease.release()
        finally:
            if self._slot is not None:
                os.close(self._slot)
                self._slot = None


def _lock_local_folder(url: str) -> tuple[Path, int]:
    """Returns a folder for the files of a URL that no other process uses, and the lock on it.

    Processes of one run that share a machine have one each. A run that comes back finds what it left there.
    """
    base = cache_folder() / "runs" / hashlib.sha256(url.encode()).hexdigest()[:16]
    for number in itertools.count():
        folder = base / str(number) / (url.rpartition("/")[2])  # the report shows the last part as the run's name
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = os.open(folder.parent / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise UserError(
                f"cannot keep the files of {url} in {folder}: {error.strerror}; set XDG_CACHE_HOME to a folder that "
                "can be written"
            ) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            continue
        except OSError as error:
            os.close(lock)
            raise UserError(
                f"the disk of {folder} cannot lock files: {error.strerror}; set XDG_CACHE_HOME to a local disk"
            ) from error
        return folder, lock
    raise AssertionError("itertools.count() does not end")
