"""Copies of folders and files at URLs (gs://...), for readers that need a path of this machine."""

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from fsspec.core import url_to_fs

from composer_jax.errors import UserError
from composer_jax.storage.bucket import is_url
from composer_jax.storage.bucket_run import cache_folder

_VERSION = ("md5Hash", "etag", "ETag", "generation", "mtime", "created")
"""What file systems state about the content of a file; the first one that is there is compared."""


def local_copy(path: Path | str) -> Path:
    """Returns the local path of a folder or file, which is downloaded if `path` is a URL.

    A copy is complete or does not exist, and is kept for the next call until the files at the URL change. Links, empty
    folders and permissions do not survive in a bucket.

    Raises:
      UserError: nothing is at the URL, or it cannot be read.
    """
    if not is_url(path):
        return Path(path).expanduser()
    url = str(path).rstrip("/")
    try:
        fs, root = url_to_fs(url)
        fs.invalidate_cache()
        files = {name: info or fs.info(name) for name, info in fs.find(root, detail=True).items()}
    except Exception as error:  # remote file systems raise exceptions of their own types
        if not isinstance(error, FileNotFoundError):
            raise UserError(f"{url} cannot be read: {error}") from error
        files = {}
    if not files:
        raise UserError(f"{url} does not exist, or is empty; name a folder or file in a bucket that does")
    base = cache_folder() / "copies" / hashlib.sha256(url.encode()).hexdigest()[:16] / _fingerprint(files)
    copy = base / PurePosixPath(root).name
    if not base.exists():
        _download(fs, root, list(files), base, copy, url)
    return copy


def _fingerprint(files: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns 16 hex digits that change with the names or contents of the files."""
    versions = {
        name: [info["size"], next((str(info[key]) for key in _VERSION if info.get(key)), "")]
        for name, info in files.items()
    }
    return hashlib.sha256(json.dumps(versions, sort_keys=True).encode()).hexdigest()[:16]


def _download(fs: Any, root: str, names: list[str], base: Path, copy: Path, url: str) -> None:
    """Downloads files into the folder `base`, which appears when it is complete."""
    root = root.rstrip("/")
    relative = [name.lstrip("/").removeprefix(root.lstrip("/")).lstrip("/") for name in names]  # "" is the file itself
    if unsafe := [name for name in relative if ".." in PurePosixPath(name).parts]:
        raise UserError(f"{url} holds a file with the name {unsafe[0]!r}, which leads out of its folder; rename it")
    partial = base.with_name(f".{base.name}.{uuid.uuid4().hex[:8]}")
    targets = [partial / copy.name / name if name else partial / copy.name for name in relative]
    try:
        for target in targets:
            target.parent.mkdir(parents=True, exist_ok=True)
        fs.get(names, [str(target) for target in targets])
        os.rename(partial, base)
    except Exception as error:  # remote file systems raise exceptions of their own types
        if not base.exists():  # another process may have been faster
            raise UserError(f"{url} cannot be copied to {base}: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
