"""Objects below a gs:// URL, each written only if no other process has written it since it was read.

Google Cloud Storage gives every write of an object a new number, its generation, and refuses a write that names another
generation than the current one. Locks and shared files of a run are built on that (storage/lease.py, mirror.py).
"""

import base64
import contextlib
import hashlib
import mimetypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from composer_jax.errors import UserError

PATIENCE_S = 60.0
"""Seconds for which a request is repeated while the bucket does not answer."""
_ATTEMPTS = 5  # reads of an object that others write meanwhile


class StoredObject(NamedTuple):
    """An object as a listing shows it."""

    generation: int
    md5: str | None
    """Base64, as of `content_md5`; None for objects that were uploaded in parts."""


class ChangedObject(Exception):
    """Another process has written or deleted the object since it was read."""


def is_url(path: Path | str) -> bool:
    """Whether a path is a URL (gs://...) and not a path of this machine."""
    return "://" in str(path)


def content_md5(data: bytes) -> str:
    """Returns the MD5 of some content as a bucket states it, in base64."""
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()


class BucketFolder:
    """The objects below gs://BUCKET/FOLDER; names are relative to it.

    Args:
      url: gs://BUCKET or gs://BUCKET/FOLDER.
      patience_s: seconds for which a request is repeated while the bucket does not answer.

    Raises:
      UserError: another URL, or no credentials. All methods raise it, with one sentence, if the bucket does not exist,
        refuses access or cannot be reached.
    """

    def __init__(self, url: str, *, patience_s: float = PATIENCE_S):
        scheme, _, path = url.rstrip("/").partition("://")
        self.bucket_name, _, folder = path.partition("/")
        if scheme != "gs" or not self.bucket_name:
            raise UserError(f"{url} is not a place for a run; use a local folder or gs://BUCKET/FOLDER")
        self.url = f"gs://{path}"
        self._prefix = f"{folder}/" if folder else ""
        # Imported here because it takes half a second, and a run in a local folder does not need it.
        from google.cloud import storage
        from google.cloud.storage.retry import DEFAULT_RETRY

        self._options: dict[str, Any] = {"retry": DEFAULT_RETRY.with_timeout(patience_s), "timeout": patience_s}
        with self._naming_errors():
            self._bucket = storage.Client(project=None).bucket(self.bucket_name)

    def names(self) -> list[str]:
        """Returns what is directly in the folder, sorted: objects, and folders with a slash at the end."""
        with self._naming_errors():
            listing = self._bucket.list_blobs(prefix=self._prefix, delimiter="/", **self._options)
            objects = [blob.name for blob in listing]  # the prefixes are known after the last page
            names = (name.removeprefix(self._prefix) for name in (*objects, *listing.prefixes))
            return sorted(filter(None, names))

    def list(self, under: str = "") -> dict[str, StoredObject]:
        """Returns every object whose name begins with `under`, by name."""
        with self._naming_errors():
            blobs = self._bucket.list_blobs(prefix=self._prefix + under, **self._options)
            return {
                blob.name.removeprefix(self._prefix): StoredObject(_generation(blob), blob.md5_hash) for blob in blobs
            }

    def read(self, name: str) -> tuple[bytes, int] | None:
        """Returns (content, generation) of an object; None if there is none."""
        with self._naming_errors():
            for _ in range(_ATTEMPTS):
                blob = self._bucket.get_blob(self._prefix + name, **self._options)
                if blob is None:
                    # Raises NotFound if there is no bucket: a missing object and a missing bucket have the same status.
                    next(iter(self._bucket.list_blobs(max_results=1, **self._options)), None)
                    return None
                with contextlib.suppress(ChangedObject):
                    return self.read_generation(name, _generation(blob)), _generation(blob)
        raise UserError(f"{self.url}/{name} changes faster than it can be read; stop the program that writes it")

    def read_generation(self, name: str, generation: int) -> bytes:
        """Returns the content that one write of an object left. Raises ChangedObject if it has been replaced."""
        from google.api_core.exceptions import NotFound

        with self._naming_errors():
            try:
                return self._bucket.blob(self._prefix + name, generation=generation).download_as_bytes(**self._options)
            except NotFound as error:
                raise ChangedObject(name) from error

    def write(self, name: str, data: bytes, generation: int) -> int:
        """Writes an object whose current generation is `generation`, 0 for a new one; returns the new generation.

        Raises:
          ChangedObject: the object has another generation.
        """
        from google.api_core.exceptions import PreconditionFailed

        blob = self._bucket.blob(self._prefix + name)
        kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
        with self._naming_errors():
            try:
                blob.upload_from_string(data, content_type=kind, if_generation_match=generation, **self._options)
                return _generation(blob)
            except PreconditionFailed as error:
                # A request that is repeated because its answer was lost meets its own first success.
                written = self.read(name)
                if written is not None and written[0] == data:
                    return written[1]
                raise ChangedObject(name) from error

    def delete(self, name: str, generation: int) -> None:
        """Deletes an object if its generation is still `generation`, and does nothing if it is not."""
        from google.api_core.exceptions import NotFound, PreconditionFailed

        with self._naming_errors(), contextlib.suppress(NotFound, PreconditionFailed):
            self._bucket.blob(self._prefix + name).delete(if_generation_match=generation, **self._options)

    @contextlib.contextmanager
    def _naming_errors(self) -> Iterator[None]:
        """Turns errors of the bucket, the network and the credentials into one sentence."""
        from google.api_core import exceptions
        from google.auth.exceptions import GoogleAuthError
        from requests.exceptions import RequestException

        try:
            yield
        except exceptions.NotFound as error:
            raise UserError(f"the bucket gs://{self.bucket_name} does not exist; create it or name another") from error
        except (exceptions.Forbidden, exceptions.Unauthorized) as error:
            raise UserError(
                f"{self.url} refuses access ({_first_line(error)}); the account needs to read, write and list objects"
            ) from error
        except GoogleAuthError as error:
            raise UserError(
                f"there are no credentials for {self.url} ({_first_line(error)}); run "
                "`gcloud auth application-default login`, or start where a service account is attached"
            ) from error
        except (exceptions.GoogleAPIError, RequestException, OSError) as error:
            raise UserError(f"{self.url} cannot be reached ({_first_line(error)}); try again later") from error


def _generation(blob: Any) -> int:
    return int(blob.generation or 0)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
