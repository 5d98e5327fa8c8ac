"""The sampler on eight devices gives the conversations of one device."""

import dataclasses
import math

import jax
import numpy as np
import pytest

from composer_jax.models.model_def import ModelDef
from composer_jax.models.rope import Llama3Rope
from composer_jax.parallel.mesh import MeshConfig, make_mesh
from composer_jax.sampler.config import SamplerConfig
from composer_jax.sampler.sampler import Sampler
from tests.compilations import compiles_nothing
from tests.models.small import LLAMA, random_weights, small
from tests.sampler.conversations import (
    CONFIG,
    END,
    assert_logprobs_of_learner,
    assert_same,
    flat,
    learner_logprobs,
    run_all,
)

SEEDS = list(range(200, 220))
MESHES = {
    "data2_expert4": ({"data": 2, "expert": 4}, dataclasses.replace(CONFIG, dispatch="ring")),
    "expert2_tensor2": ({"data": 2, "expert": 2, "tensor": 2}, dataclasses.replace(CONFIG, dispatch="ring")),
}
RING = ModelDef(dataclasses.replace(CONFIG, dispatch="ring"))
LEARNER_MESH = make_mesh(jax.devices(), data=4, expert=2)


@pytest.fixture(scope="module")
def expected(sampler):
    return run_all(sampler, SEEDS)


@pytest.mark.parametrize(("sizes", "model"), MESHES.values(), ids=MESHES.keys())
def test_sharded_conversations_are_those_of_one_device(new_sampler, expected, sizes, model):
    """More conversations than the sixteen slots; no program is compiled twice."""
    sharded = new_sampler(sizes, model, slots=16, prefill_shapes=((2, 8),))
    assert_same(run_all(sharded, SEEDS), expected)
    with compiles_nothing():
        assert_same(run_all(sharded, SEEDS[:3]), expected[:3])


LLAMA_MODEL = small(**LLAMA, vocab_size=24, n_layers=2, qk_norm=True, llama3_rope=Llama3Rope(8.0, 1.0, 4.0, 16))


@pytest.fixture(scope="module")
def new_llama():
    """Mesh sizes -> a sampler of a network without experts."""
    weights = random_weights(LLAMA_MODEL)

    def make(sizes, cache_dtype="compute", prefill_shapes=((2, 8),)):
        mesh = make_mesh(jax.devices()[: math.prod(sizes.values())], **sizes)
        config = SamplerConfig(slots=8, max_model_len=64, decode_steps=4, prefill_shapes=prefill_shapes)
        definition = ModelDef(dataclasses.replace(LLAMA_MODEL, cache_dtype=cache_dtype))
        sampler = Sampler(definition, mesh, config, end_tokens=(END,))
        sampler.update(*jax.device_put(weights, definition.shardings(mesh)), version=1)
        return sampler

    return make, weights


def test_a_network_without_experts_samples_with_the_logprobs_of_the_learner(new_llama):
    make, weights = new_llama
    alone = run_all(make({}, prefill_shapes=((8, 8),)), SEEDS[:8])
    assert_logprobs_of_learner(LLAMA_MODEL, weights, flat(alone))
    assert_same(run_all(make({"replica": 2, "expert": 2, "tensor": 2}), SEEDS[:8]), alone)


def test_an_int8_cache_of_a_network_without_experts_is_close(new_llama):
    make, weights = new_llama
    branches = flat(run_all(make({"tensor": 2}, cache_dtype="int8", prefill_shapes=((8, 8),)), SEEDS[:4]))
    exact = learner_logprobs(LLAMA_MODEL, weights, branches, 64)
    worst = max(np.nanmax(np.abs(np.array(b.logprobs) - logprobs)) for b, logprobs in zip(branches, exact, strict=True))
    assert 1e-5 < worst < 0.3


def weights_on_learner_mesh(weights):
    return jax.device_put(weights, RING.shardings(LEARNER_MESH))


def sampler_with_its_own_mesh(weights, definition=RING, **changes) -> Sampler:
    """A sampler on replica=2, expert=2, tensor=2 whose weights come from a learner on data=4, expert=2."""
    config = SamplerConfig(
        slots=8,
        max_model_len=64,
        decode_steps=4,
        prefill_shapes=((8, 8),),
        mesh=MeshConfig(replica=-1, expert=2, tensor=2),
        **changes,
    )
    sampler = Sampler(definition, LEARNER_MESH, config, end_tokens=(END,))
    sampler.update(*weights_on_learner_mesh(weights), version=3)
    return sampler


def test_a_sampler_with_its_own_mesh_reshards_the_weights(weights, expected):
    sampler = sampler_with_its_own_mesh(weights)
    assert (sampler.mesh.shape["replica"], sampler.mesh.shape["data"]) == (2, 1)
    assert sampler.mesh.devices.size == 8
    assert_same(run_all(sampler, SEEDS), expected)
    with compiles_nothing():
        sampler.update(*weights_on_learner_mesh(weights), version=4)
        assert_same(run_all(sampler, SEEDS[:3]), expected[:3])


def test_a_sampler_casts_the_weights_to_the_param_dtype_of_its_config(weights, expected):
    """The conversations are those of a model that stores bfloat16, and not those of the float32 weights."""
    stored = ModelDef(dataclasses.replace(RING.config, param_dtype="bfloat16"))
    cast = sampler_with_its_own_mesh(weights, param_dtype="bfloat16")
    assert cast.definition == stored
    conversations = run_all(cast, SEEDS[:4])
    assert_same(conversations, run_all(sampler_with_its_own_mesh(weights, stored), SEEDS[:4]))
    logprobs, exact = (np.array(branch.logprobs) for branch in (flat(conversations)[0], flat(expected)[0]))
    n = min(len(logprobs), len(exact))
    assert np.nanmax(np.abs(logprobs[:n] - exact[:n])) > 1e-4
