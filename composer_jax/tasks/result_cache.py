"""Results of runs that were already made: the same files and the same command give the same result.

The episodes of a group start from the same repository and often end in the same one, so most of what they ask
a sandbox to run has been run before.
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
    """What makes changes what they are, by path: kind, permission bits and data of each."""
    return {path: b"%s %o " % (change.kind.encode(), change.mode) + change.data for path, change in changes.items()}


def result_key(files: Mapping[str, bytes], command: Any) -> str:
    """SHA-256 (hex) of the files and of a JSON-able description of what is run on them."""
    hasher = hashlib.sha256(json.dumps(command, sort_keys=True).encode())
    for path in sorted(files):
        for part in (os.fsencode(path), files[path]):  # a name may be no UTF-8
            hasher.update(len(part).to_bytes(8, "big"))
            hasher.update(part)
    return hasher.hexdigest()


class ResultCache(Generic[T]):
    """key -> result, with a bound on the number of entries (the least recently used goes first).

    `hits` and `runs` count requests that were served from here and requests that ran.
    """

    def __init__(self, max_entries: int = 100_000) -> None:
        self.hits = 0
        self.runs = 0
        self._max_entries = max_entries
        self._results: OrderedDict[str, T] = OrderedDict()
        self._locks: dict[str, tuple[asyncio.Lock, list[None]]] = {}  # key -> lock, one entry per user of it

    async def get(self, key: str, run: Callable[[], Awaitable[tuple[T, bool]]]) -> T:
        """The result for `key`, from `run()` if there is none yet.

        `run` returns the result and whether it may be kept (a timeout may not). Who asks while the same key
        is being run waits for it. An exception goes to the one whose run raised it; the others then try
        themselves.
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
                result, keep = await run()
                if keep:
                    self._results[key] = result
                    if len(self._results) > self._max_entries:
                        self._results.popitem(last=False)
                return result
        finally:
            users.pop()
            if not users:
                del self._locks[key]
