"""A cache that does not fit into the memory of its devices is refused before it is made. CPUs do not tell theirs."""

import math
import re
import types

import jax
import pytest

from composer_jax.errors import UserError
from composer_jax.parallel.mesh import make_mesh
from composer_jax.sampler import cache_memory

BYTES = 40_000
"""Free on each device: more than a context of 64 tokens takes, and less than eight of them."""


@pytest.fixture
def little_memory(monkeypatch):
    monkeypatch.setattr(cache_memory, "free_memory", lambda mesh: BYTES)


@pytest.mark.parametrize(("sizes", "cache_tokens"), [({}, 0), ({"data": 2}, 4096)], ids=["default", "two devices"])
def test_the_sentence_names_the_largest_cache_that_fits(new_sampler, little_memory, sizes, cache_tokens):
    with pytest.raises(UserError, match=r"free beside the weights; use less than \d+; programs, and up") as error:
        new_sampler(sizes, cache_tokens=cache_tokens, slots=16)
    said = f"sampler.cache_tokens={cache_tokens or '1024, for 16 slots of 64 tokens'}"
    assert said in str(error.value)
    most = int(re.search(r"use less than (\d+)", str(error.value)).group(1))
    sampler = new_sampler(sizes, cache_tokens=most)
    cache = sampler.engines[0].runner._cache
    taken = sum(a.addressable_shards[0].data.nbytes for a in jax.tree.leaves(cache))
    assert BYTES - taken < taken / sampler.limits.cache_pages, "another page would not fit"
    with pytest.raises(UserError, match=f"use less than {most}"):
        new_sampler(sizes, cache_tokens=most + sampler.limits.page_size * sampler.limits.shards)


def test_nothing_is_allocated_and_a_smaller_cache_is_no_way_out_where_no_context_fits(new_sampler, monkeypatch):
    monkeypatch.setattr(cache_memory, "free_memory", lambda mesh: BYTES // 10)
    monkeypatch.setattr("composer_jax.sampler.runner.cache_program", lambda *_: pytest.fail)
    with pytest.raises(UserError, match="not even one context of sampler.max_model_len=64 fits on each device: use a"):
        new_sampler()


def test_a_sampler_whose_cache_exists_takes_new_weights_whatever_is_free(new_sampler, weights, monkeypatch):
    sampler = new_sampler()
    monkeypatch.setattr(cache_memory, "free_memory", lambda mesh: 0.0)
    sampler.update(*weights, version=4)
    assert sampler.version == 4
    sampler.release()
    with pytest.raises(UserError, match="are free beside the weights"):
        sampler.update(*weights, version=5)


def test_weights_without_a_cache_are_freed_whoever_keeps_the_error(new_sampler, weights, monkeypatch):
    sampler = new_sampler()
    sampler.release()
    monkeypatch.setattr(cache_memory, "free_memory", lambda mesh: 0.0)
    before = len(jax.live_arrays())
    with pytest.raises(UserError) as error:
        sampler.update(*weights, version=5)
    assert error.tb is not None and len(jax.live_arrays()) == before


def devices(*stats, several=False):
    """A mesh whose devices tell this of their memory."""
    local = [types.SimpleNamespace(memory_stats=lambda stats=stats: stats) for stats in stats]
    return types.SimpleNamespace(local_devices=local, is_multi_process=several)


STATS = {"bytes_limit": 12_000, "bytes_in_use": 3_000}, {"bytes_limit": 11_000, "bytes_in_use": 4_000}


def test_the_free_memory_of_a_mesh_is_that_of_its_fullest_device():
    assert cache_memory.free_memory(devices(*STATS)) == 7_000
    assert cache_memory.free_memory(devices(None)) is cache_memory.free_memory(devices({"bytes_in_use": 5})) is None
    assert cache_memory.free_memory(make_mesh(jax.devices()[:1])) is None, "a CPU does not tell"


@pytest.mark.parametrize(("others", "free"), [(8_000, 7_000), (6_000, 6_000), (math.inf, 7_000)])
def test_several_processes_decide_by_the_fullest_device_of_all(monkeypatch, others, free):
    monkeypatch.setattr(cache_memory, "min_of_mesh", lambda mesh, here: min(here, others))
    assert cache_memory.free_memory(devices(*STATS, several=True)) == free
    assert cache_memory.free_memory(devices(*STATS)) == 7_000, "the mesh is of this process"
    assert cache_memory.free_memory(devices(None, several=True)) == (others if math.isfinite(others) else None)
