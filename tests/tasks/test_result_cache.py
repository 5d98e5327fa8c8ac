"""The result cache: one run per episode and key for any number of callers; entries and bytes are bounded."""

import asyncio
import os

import pytest

from composer_jax.sandbox import Change, RunResult
from composer_jax.tasks.grading.result import Grade
from composer_jax.tasks.result_cache import ResultCache, fingerprint_bytes, result_key


def test_keys_differ_for_different_files_and_commands():
    files = {"a.py": b"1", "b.py": b"2"}
    assert result_key(files, ["run"]) == result_key(dict(reversed(files.items())), ["run"])
    others = [
        ({"a.py": b"1b.py", "": b"2"}, ["run"]),
        ({"a.py": b"2", "b.py": b"1"}, ["run"]),
        (files, ["grade"]),
    ]
    keys = {result_key(*other) for other in [(files, ["run"]), *others]}
    assert len(keys) == 4
    odd = [os.fsdecode(b"\xff"), os.fsdecode(b"\xfe"), "\xff"]
    changes = [{name: Change("file", b"1")} for name in odd]
    changes += [{"a": Change("file", b"1", 0o755)}, {"a": Change("file", b"1")}, {"a": Change("link", b"1")}]
    assert len({result_key(fingerprint_bytes(each), ["run"]) for each in changes}) == len(changes)


def test_concurrent_callers_wait_for_one_run():
    cache = ResultCache()
    results, runs = cache.of_episode("t", 0), []

    async def run():
        runs.append(1)
        await asyncio.sleep(0.01)
        return "result", True

    async def check():
        return await asyncio.gather(*(results.get("key", run) for _ in range(8)))

    assert asyncio.run(check()) == ["result"] * 8
    assert (len(runs), cache.runs, cache.hits) == (1, 1, 7)
    assert asyncio.run(check()) == ["result"] * 8, "the cache outlives an event loop"
    assert not cache._locks  # private: a lock that stays would only show as growing memory


def test_an_exception_reaches_one_caller_only():
    results, runs = ResultCache().of_episode("t", 0), []

    async def run():
        runs.append(1)
        await asyncio.sleep(0)
        if len(runs) == 1:
            raise RuntimeError("the first one fails")
        return "result", True

    async def check():
        return await asyncio.gather(*(results.get("key", run) for _ in range(3)), return_exceptions=True)

    first, *others = asyncio.run(check())
    assert isinstance(first, RuntimeError) and others == ["result", "result"]
    assert len(runs) == 2


def test_a_result_that_may_not_be_cached_runs_again():
    cache = ResultCache()

    async def run():
        return "unlucky", False

    for _ in range(2):
        assert asyncio.run(cache.of_episode("t", 0).get("key", run)) == "unlucky"
    assert (cache.runs, cache.hits) == (2, 0)


@pytest.mark.parametrize("size", [1, 3])
def test_the_least_recently_used_entry_is_evicted_first(size):
    cache = ResultCache(max_entries=size)

    async def get(key):
        async def run():
            return key, True

        return await cache.of_episode("t", 0).get(key, run)

    async def check():
        for key in range(size):
            await get(key)
        await get(0)  # a hit: it is now the most recently used
        await get(99)
        hits = cache.hits
        for key in kept:
            await get(key)
        return cache.hits - hits, await get(evicted), cache.hits - hits

    kept, evicted = ([0, 2, 99], 1) if size == 3 else ([99], 0)
    assert asyncio.run(check()) == (len(kept), evicted, len(kept))


def get_text(cache, key, text):
    async def run():
        return text, True

    return asyncio.run(cache.of_episode("t", 0).get(key, run))


def test_episodes_share_no_results():
    cache = ResultCache()

    async def run():
        return cache.runs, True

    episodes = [("a", 0), ("a", 1), ("b", 0), ("a", 0)]
    assert [asyncio.run(cache.of_episode(*each).get("key", run)) for each in episodes] == [1, 2, 3, 1]


def test_bytes_are_bounded():
    cache = ResultCache(max_bytes=100_000)
    for number in range(50):
        get_text(cache, str(number), "x" * 9_000)
        assert cache.num_bytes <= 100_000
    assert cache.num_bytes > 80_000
    for number in range(49, 39, -1):
        get_text(cache, str(number), "")
    assert cache.hits == 10, "the ten most recent texts fit"


def test_a_result_larger_than_the_bound_evicts_nothing():
    cache = ResultCache(max_bytes=10_000)
    get_text(cache, "small", "x")
    for _ in range(2):
        assert get_text(cache, "large", "x" * 10_000) == "x" * 10_000
    assert (cache.runs, get_text(cache, "small", ""), cache.hits) == (3, "x", 1)


@pytest.mark.parametrize(
    "result",
    [
        RunResult("ok", 0, "x" * 10_000, "", 0.0, 0),
        RunResult("ok", 0, "", "\N{SNOWMAN}" * 5_000, 0.0, 0),
        Grade(1.0, {"x" * 10_000: 1.0}),
        ("x" * 5_000, "y" * 5_000),
    ],
)
def test_the_bytes_of_a_result_are_those_of_its_parts(result):
    cache = ResultCache()
    get_text(cache, "key", result)
    assert 10_000 < cache.num_bytes < 12_000
