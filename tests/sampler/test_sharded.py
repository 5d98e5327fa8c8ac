"""The sampler on eight devices gives the conversations of one device."""

import dataclasses

import pytest

from composer_jax.observe.compilations import compilations
from tests.sampler.conversations import CONFIG, assert_same, flat, learner_logprobs, run_all

SEEDS = list(range(200, 220))
MESHES = {
    "replica2": ({"replica": 2}, CONFIG),
    "data2_expert4": ({"data": 2, "expert": 4}, dataclasses.replace(CONFIG, dispatch="ring")),
    "expert2_tensor2": ({"data": 2, "expert": 2, "tensor": 2}, dataclasses.replace(CONFIG, dispatch="ring")),
}


@pytest.fixture(scope="module")
def wanted(sampler):
    return run_all(sampler, SEEDS)


@pytest.mark.parametrize(("sizes", "model"), MESHES.values(), ids=MESHES.keys())
def test_sharded_conversations_are_those_of_one_device(new_sampler, wanted, sizes, model):
    """More conversations than the sixteen slots; no program is compiled twice."""
    sharded = new_sampler(sizes, model, slots=16, prefill_shapes=((2, 8),))
    assert_same(run_all(sharded, SEEDS), wanted)
    before = compilations()
    assert_same(run_all(sharded, SEEDS[:3]), wanted[:3])
    assert compilations() == before


def test_the_reference_itself_is_the_learner(wanted, weights):
    branches = flat(wanted)
    for branch, logprobs in zip(branches, learner_logprobs(CONFIG, weights, branches, 64), strict=True):
        for mine, theirs in zip(branch.logprobs, logprobs, strict=True):
            assert mine != mine or mine == pytest.approx(theirs, abs=1e-4)
