"""Cache of sandbox results: the same files and the same command give the same result.

The episodes of a group start from the same repository and often end in the same one, so most of the commands that
they run in a sandbox have been run before.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Generic, TypeVar

from composer_jax.sandbox import Change

T = TypeVar("T")


def fingerprint_bytes(changes: Mapping[str, Change]) -> dict[str, bytes]:
    """Returns path -> bytes that are equal for equal changes: kind, permission bits and data."""
    return {path: b"%s %o " % (change.kind.encode(), change.mode) + change.data for path, change in changes.items()}


def result_key(files: Mapping[str, bytes], command: Any) -> str:
    """Returns the SHA-256 (hex) of files and of a JSON-able description of the command that runs on them."""
    hasher = hashlib.sha256(json.dumps(command, sort_keys=True).encode())
    for path in sorted(files):
        for part in (os.fsencode(path), files[path]):  # a file name need not be UTF-8
            hasher.update(len(part).to_bytes(8, "big"))
            hasher.update(part)
    return hasher.hexdigest()


class ResultCache(Generic[T]):
    """key -> result, bounded by the number of entries; the least recently used entry is evicted first.

    hits: requests served from the cache. runs: requests that ran.
    """

    def __init__(self, max_entries: int = 100_000) -> None:
        self.hits = 0
        self.runs = 0
        self._max_entries = max_entries
        self._results: OrderedDict[str, T] = OrderedDict()
        self._locks: dict[str, tuple[asyncio.Lock, list[None]]] = {}  # key -> lock, one entry per waiting caller

    async def get(self, key: str, run: Callable[[], Awaitable[tuple[T, bool]]]) -> T:
        """Returns the result for `key`, from `run()` if the cache has none.

        `run` returns the result and whether it may be cached (a timeout may not). A caller that asks while the same key
        is running waits for that run. An exception reaches only the caller whose run raised it; the others run again.
        """
        lock, users = self._locks.setdefault(key, (asyncio.Lock(), []))
        users.append(None)
        try:
            async with lock:
                if key in self._results:
                    self.hits += 1
                    self._results.move_to_end(key)
                    return self._results[key]
                self.runs += 1
                result, may_cache = await run()
                if may_cache:
                    self._results[key] = result
                    if len(self._results) > self._max_entries:
                        self._results.popitem(last=False)
                return result
        finally:
            users.pop()
            if not users:
                del self._locks[key]
