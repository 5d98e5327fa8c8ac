"""Programs return a cache under the name of the placement that they took it with, and results of known structure."""

import dataclasses
import types

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from composer_jax.parallel.mesh import make_mesh
from composer_jax.sampler.runner import ELSEWHERE, gather_shards, shards_here
from tests.sampler.conversations import CONFIG


@pytest.mark.parametrize("sizes", [{}, {"replica": 2, "data": 2, "tensor": 2}], ids=str)
def test_every_program_returns_the_shardings_of_a_fresh_cache(new_sampler, sizes):
    """P() and P(None, None) place the same, but JAX looks up what it compiled under each of them."""
    runner = new_sampler(sizes, prefill_shapes=((2, 8),), drafts="prompt_lookup", draft_tokens=3).engines[0].runner
    fresh = [leaf.sharding for leaf in jax.tree.leaves(runner._cache)]
    for call in runner.warm_up_calls(processed=True):
        call()
        assert [leaf.sharding for leaf in jax.tree.leaves(runner._cache)] == fresh


@pytest.mark.parametrize("changes", [{}, {"drafts": "prompt_lookup", "draft_tokens": 3}], ids=str)
def test_a_process_without_devices_of_an_engine_knows_what_its_programs_return(new_sampler, changes):
    model = dataclasses.replace(CONFIG, cache_routing=True)
    runner = new_sampler(model=model, prefill_shapes=((2, 8),), **changes).engines[0].runner
    start, names = runner.start_program, set()

    def compare(name, *inputs, **options):
        out = start(name, *inputs, **options)
        elsewhere = runner._outputs_elsewhere(name)
        assert name == "routing" or jax.tree.structure(elsewhere) == jax.tree.structure(out), name
        names.add(name)
        return out

    runner.start_program = compare
    for call in runner.warm_up_calls(processed=True):
        call()
    assert names == {*runner._programs, "write_tables"}


def test_results_of_other_processes_are_put_together_where_this_one_has_none():
    arrays = {"a": np.arange(8.0).reshape(4, 2), "b": np.arange(4) > 1}
    sharded = jax.device_put(arrays, NamedSharding(make_mesh(jax.devices()[:4], data=4), PartitionSpec("data")))
    header, pieces = shards_here(sharded)
    replies = [({**header, "pieces": header["pieces"][i::2]}, pieces[i::2]) for i in range(2)]
    gathered = gather_shards({"a": ELSEWHERE, "b": ELSEWHERE}, types.SimpleNamespace(collect=lambda: replies))
    for name, array in arrays.items():
        np.testing.assert_array_equal(gathered[name], array)
