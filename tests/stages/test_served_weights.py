"""A server's sampler follows the versions that a trainer publishes, and gives the tokens of those weights."""

import asyncio

import jax
import jax.numpy as jnp
import pytest

from composer_jax.checkpoint.weight_chain import MissingVersion, WeightPublisher
from composer_jax.checkpoint.weight_shards import local_shards
from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.models.model_def import ModelDef
from composer_jax.parallel.mesh import make_mesh
from composer_jax.sampler.config import SamplerConfig
from composer_jax.sampler.request import Request
from composer_jax.sampler.rollout_weights import RolloutWeights
from composer_jax.sampler.sampler import Sampler
from composer_jax.sampler.weight_checksums import WeightMismatch
from composer_jax.stages.served_weights import ServedWeights
from tests.models.small import random_weights, small

TRAINED = small(vocab_size=24, n_layers=2, n_mtp_modules=1)
SERVED = small(vocab_size=24, n_layers=2, n_mtp_modules=0)
PROMPT = [3, 9, 14]


def new_sampler() -> Sampler:
    sizes = SamplerConfig(slots=2, max_model_len=64, prefill_shapes=((2, 8),))
    return Sampler(ModelDef(SERVED), make_mesh(jax.devices()[:1]), sizes, end_tokens=())


def trained(seed: int) -> dict:
    """What a learner has: bfloat16 weights, of the MTP module, too."""
    params, bias = random_weights(TRAINED, seed)
    return jax.tree.map(lambda a: a.astype(jnp.bfloat16), {"params": params, "router_bias": bias})


def expected_tokens(weights: dict) -> list[int]:
    """Those of a sampler that has the weights from the start."""
    params = {name: value for name, value in weights["params"].items() if name != "mtp"}
    bias = {name: value for name, value in weights["router_bias"].items() if name != "mtp"}
    sampler = new_sampler()
    sampler.update(*jax.tree.map(lambda a: a.astype(jnp.float32), (params, bias)), version=0)
    return asyncio.run(sample(sampler, []))[0]


async def sample(sampler: Sampler, updates) -> list[list[int]]:
    """The tokens after each update, (install, folder, version); of none, those of the weights that are there."""
    out = []
    async with sampler.serving():
        for install, folder, version in updates or [(None, "", 0)]:
            if install is not None:
                await install(f"patches:{folder}", version)
            out.append((await sampler.submit(Request(PROMPT, SamplingParams(20), 7))).tokens)
    return out


def test_a_sampler_follows_the_published_versions(tmp_path):
    versions = [trained(seed) for seed in (1, 2)]
    versions.append(jax.tree.map(lambda a: a * 1.5, versions[1]))
    publisher, sampler = WeightPublisher(str(tmp_path)), new_sampler()
    for number, weights in enumerate(versions, 1):
        publisher.publish(local_shards(weights), number)
    sampler.update(*random_weights(SERVED, 9), version=0)
    install = ServedWeights(sampler, SERVED, None, mtp=False)
    tokens = asyncio.run(sample(sampler, [(install, tmp_path, number) for number in (1, 2, 3)]))
    assert tokens == [expected_tokens(weights) for weights in versions]
    assert len(set(map(tuple, tokens))) == 3


def test_weights_from_elsewhere_are_replaced_as_a_whole(tmp_path):
    """Between two versions of the folder somebody pushes other weights: the next patch changes few of them."""
    publisher, sampler = WeightPublisher(str(tmp_path)), new_sampler()
    sampler.update(*random_weights(SERVED, 9), version=0)
    install, last = ServedWeights(sampler, SERVED, None, mtp=False), trained(1)
    publisher.publish(local_shards(last), 1)

    async def push_between():
        async with sampler.serving():
            await install(f"patches:{tmp_path}", 1)
            await sampler.update_serving(*random_weights(SERVED, 5), 7)
            last["params"]["head"] = last["params"]["head"] * 2
            publisher.publish(local_shards(last), 8)
            await install(f"patches:{tmp_path}", 8)
            return (await sampler.submit(Request(PROMPT, SamplingParams(20), 7))).tokens

    assert asyncio.run(push_between()) == expected_tokens(last)


def test_a_version_that_is_not_there_or_has_other_checksums_changes_nothing(tmp_path):
    publisher, sampler = WeightPublisher(str(tmp_path)), new_sampler()
    sampler.update(*random_weights(SERVED, 9), version=0)
    install = ServedWeights(sampler, SERVED, None, mtp=False)
    publisher.publish(local_shards(trained(1)), 1)
    before = sampler.checksums

    async def refused():
        async with sampler.serving():
            with pytest.raises(
                MissingVersion, match="has versions 1 to 1 of the weights, not 3; wait until the trainer"
            ):
                await install(f"patches:{tmp_path}", 3)  # the folder lags
            with pytest.raises(WeightMismatch, match="it has the bits of version 0|did not arrive"):
                await install(f"patches:{tmp_path}", 1, checksums=before)
            assert sampler.version == 0 and sampler.checksums == before
            await install(f"patches:{tmp_path}", 1)
            return (await sampler.submit(Request(PROMPT, SamplingParams(20), 7))).tokens

    assert asyncio.run(refused()) == expected_tokens(trained(1))


def test_a_sampler_that_installs_other_weights_than_the_folder_has_is_found(tmp_path, monkeypatch):
    publisher, sampler = WeightPublisher(str(tmp_path)), new_sampler()
    sampler.update(*random_weights(SERVED, 9), version=0)
    install = ServedWeights(sampler, SERVED, None, mtp=False)
    publisher.publish(local_shards(trained(1)), 1)
    asyncio.run(sample(sampler, [(install, tmp_path, 1)]))
    publisher.publish(local_shards(trained(2)), 2)
    stale = sampler.engines[0].runner._weights
    monkeypatch.setattr(RolloutWeights, "replace", lambda *_: stale)
    with pytest.raises(WeightMismatch, match="weights of version 2 did not arrive .* it has the bits of version 1"):
        asyncio.run(sample(sampler, [(install, tmp_path, 2)]))
    assert sampler.version == -1, "it has a mixture, which is none"
