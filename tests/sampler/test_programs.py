"""Programs return a cache under the name of the placement that they took it with."""

import jax
import pytest


@pytest.mark.parametrize("sizes", [{}, {"replica": 2, "data": 2, "tensor": 2}], ids=str)
def test_every_program_returns_the_shardings_of_a_fresh_cache(new_sampler, sizes):
    """P() and P(None, None) place the same, but JAX looks up what it compiled under each of them."""
    runner = new_sampler(sizes, prefill_shapes=((2, 8),), drafts="prompt_lookup", draft_tokens=3)._runner
    fresh = [leaf.sharding for leaf in jax.tree.leaves(runner._cache)]
    for call in runner.warm_up_calls(processed=True):
        call()
        assert [leaf.sharding for leaf in jax.tree.leaves(runner._cache)] == fresh
