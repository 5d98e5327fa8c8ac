"""Cache of sandbox results: within one episode, the same files and the same command give the same result.

Tested code may draw random numbers or read the clock, so a result is one draw. Episodes do not share results: the
attempts of a group, and those of pass@k, would all get the first draw of a flaky submission.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Generic, TypeVar

from composer_jax.sandbox import Change

T = TypeVar("T")
_Key = tuple[str, int, str]  # task id and seed of the episode, key of the run


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
    """(episode, key) -> result, for any number of episodes; see `of_episode`.

    It is bounded by the number of entries and by their bytes in memory. The least recently used entry is evicted first,
    and a result larger than `max_bytes` is not cached.

    hits: requests served from the cache. runs: requests that ran. num_bytes: bytes of all entries.
    """

    def __init__(self, max_entries: int = 100_000, max_bytes: int = 256 << 20) -> None:
        self.hits = 0
        self.runs = 0
        self.num_bytes = 0
        self._max_entries, self._max_bytes = max_entries, max_bytes
        self._results: OrderedDict[_Key, tuple[T, int]] = OrderedDict()  # key -> result, bytes of the entry
        self._locks: dict[_Key, tuple[asyncio.Lock, list[None]]] = {}  # key -> lock, one entry per waiting caller

    def of_episode(self, task_id: str, seed: int) -> EpisodeCache[T]:
        """Returns the results of one attempt at a task; a repeated attempt with the same seed has the same results."""
        return EpisodeCache(self, (task_id, seed))

    async def get(self, key: _Key, run: Callable[[], Awaitable[tuple[T, bool]]]) -> T:
        """EpisodeCache.get with the episode in the key."""
        lock, users = self._locks.setdefault(key, (asyncio.Lock(), []))
        users.append(None)
        try:
            async with lock:
                if key in self._results:
                    self.hits += 1
                    self._results.move_to_end(key)
                    return self._results[key][0]
                self.runs += 1
                result, may_cache = await run()
                if may_cache:
                    self._store(key, result)
                return result
        finally:
            users.pop()
            if not users:
                del self._locks[key]

    def _store(self, key: _Key, result: T) -> None:
        size = _bytes_in_memory(key) + _bytes_in_memory(result)
        if size > self._max_bytes:
            return
        self._results[key] = result, size
        self.num_bytes += size
        while len(self._results) > self._max_entries or self.num_bytes > self._max_bytes:
            _, (_, evicted) = self._results.popitem(last=False)
            self.num_bytes -= evicted


class EpisodeCache(Generic[T]):
    """The results of one episode in a ResultCache; made by ResultCache.of_episode."""

    def __init__(self, cache: ResultCache[T], episode: tuple[str, int]) -> None:
        self._cache, self._episode = cache, episode

    async def get(self, key: str, run: Callable[[], Awaitable[tuple[T, bool]]]) -> T:
        """Returns the result for `key` in this episode, from `run()` if the cache has none.

        `run` returns the result and whether it may be cached (a timeout may not). A caller that asks while the same key
        is running waits for that run. An exception reaches only the caller whose run raised it; the others run again.
        """
        return await self._cache.get((*self._episode, key), run)


def _bytes_in_memory(value: Any) -> int:
    """Returns the bytes of a result: a dataclass, mapping or tuple of strings and numbers, or one of those."""
    if isinstance(value, Mapping):
        parts = [*value.keys(), *value.values()]
    else:
        parts = value if isinstance(value, tuple) else getattr(value, "__dict__", {}).values()
    return sys.getsizeof(value) + sum(map(_bytes_in_memory, parts))
