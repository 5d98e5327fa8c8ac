"""Weights that do not arrive are refused: stale ones, wrong layers, wrong dtypes, replicas that differ."""

import asyncio
import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.data.packing import pack_documents
from composer_jax.errors import UserError
from composer_jax.models.model_def import ModelDef
from composer_jax.models.presets import PRESETS
from composer_jax.ops.quantization import QuantizedArray
from composer_jax.parallel.mesh import make_mesh
from composer_jax.sampler.config import SamplerConfig
from composer_jax.sampler.rollout_weights import RolloutWeights, rollout_model_def
from composer_jax.sampler.sampler import Sampler
from composer_jax.sampler.weight_checksums import ChecksumProgram, checked_weights, checksums
from composer_jax.train.learner import Learner
from composer_jax.train.losses import LanguageLoss
from composer_jax.train.optimizer import OptimizerConfig, make_optimizer
from tests.models.small import LLAMA, random_weights, small
from tests.sampler.conversations import END

MOE = small(vocab_size=48, n_mtp_modules=0, embedding_taps=0, dispatch="ring", d_model=64, expert_ff_dim=16)
MTP = dataclasses.replace(MOE, n_mtp_modules=1)
NAMES = ("embedding/table", "head", "moe_layers/feed_forward/down")
STACK = NAMES[2].split("/")


def make_sampler(dtype="", config=MOE) -> Sampler:
    sizes = SamplerConfig(slots=2, max_model_len=32, decode_steps=4, prefill_shapes=((2, 8),), param_dtype=dtype)
    return Sampler(ModelDef(config), make_mesh(jax.devices()[:1]), sizes, end_tokens=(END,))


def change_stack(weights, change):
    """(params, router_bias) with another stack of experts [L,...]; change: array -> array."""
    params = jax.tree.map(lambda a: a, weights[0])
    first, second, name = STACK
    params[first][second][name] = jax.tree.map(change, params[first][second][name])
    return params, weights[1]


def first_twice(layers):
    return layers.at[1].set(layers[0])


def swapped(layers):
    return layers[::-1]


def loads(monkeypatch, change) -> None:
    """Lets every sampler install a changed stack of experts."""
    to_rollout = RolloutWeights.to_rollout
    monkeypatch.setattr(
        RolloutWeights, "to_rollout", lambda *args, **options: change_stack(to_rollout(*args, **options), change)
    )


def test_the_compared_weights_are_the_largest_of_three_parts_whatever_the_sampler_leaves_out():
    assert checked_weights(ModelDef(MOE)) == checked_weights(ModelDef(MTP)) == NAMES
    kimi = checked_weights(ModelDef(PRESETS["kimi_k2_5"]))
    assert kimi == ("embedding/table", "moe_layers/attention/out", "moe_layers/feed_forward/down")
    shapes = ModelDef(PRESETS["kimi_k2_5"]).shapes()[0]
    sizes = [shapes["embedding"]["table"], shapes["moe_layers"]["attention"]["out"]]
    sizes.append(shapes["moe_layers"]["feed_forward"]["down"])
    assert sum(2 * weight.size for weight in sizes) == pytest.approx(685.6e9, rel=1e-3)  # as the module says


def test_the_sums_are_those_of_python():
    """Two sums of the bits, by NumPy on one array; int8 numbers have their scales behind them."""
    table = np.arange(6, dtype=np.float32).reshape(2, 3) - 2
    bits = table.view(np.uint32).astype(object)
    places = 1 + np.arange(2)[:, None] * 0x9E3779B1 + np.arange(3) * 0x85EBCA77
    expected = f"{bits.sum() % 2**32:08x}{(bits * places.astype(object)).sum() % 2**32:08x}"
    (one,) = checksums({"table": jnp.asarray(table)})
    assert (one.name, one.dtype, one.shape, one.checksum) == ("table", "float32", (2, 3), expected)
    quantized = QuantizedArray(jnp.ones((2, 3), jnp.int8), jnp.asarray(table))
    (two,) = checksums({"table": quantized})
    assert two.dtype == "int8" and len(two.checksum) == 32 and two.checksum.endswith(expected)


@pytest.mark.parametrize(
    ("sizes", "dtype"), [(dict(data=2, expert=4), "int8"), (dict(replica=2, context=2, tensor=2), "bfloat16")], ids=str
)
def test_learner_and_sampler_agree_on_every_mesh(sizes, dtype):
    weights, definition = random_weights(MOE), ModelDef(MOE)
    rollout, mesh = rollout_model_def(definition, SamplerConfig(param_dtype=dtype)), make_mesh(**sizes)
    program = ChecksumProgram(rollout)
    alone = program.of_learner(weights[0])
    sharded = jax.device_put(weights, definition.shardings(mesh))
    assert program.of_learner(sharded[0]) == alone
    assert program.of_sampler(RolloutWeights(rollout, mesh).to_rollout(*sharded, copy=True)[0]) == alone


def learn(weights, peak: float):
    """The weights after one step of Adam on random tokens; those before are copied first."""
    optimizer = make_optimizer(OptimizerConfig(peak=peak, warmup=0), 10)
    learner = Learner(ModelDef(MOE), optimizer, LanguageLoss(), make_mesh(jax.devices()[:1]))
    state = learner.init_state(*jax.tree.map(jnp.copy, weights))
    tokens = np.random.default_rng(0).integers(0, MOE.vocab_size, 32)
    (batch,), _ = pack_documents([(tokens.tolist(), np.ones(32))], seq_len=32, batch_size=1)
    state, _ = learner.step(state, [dataclasses.asdict(batch)], 31)
    return state.params, state.router_bias


def test_a_sampler_one_version_behind_is_found_at_a_learning_rate_of_1e_6():
    """The step is far below half a unit in the last place of most bfloat16 weights; some cross it all the same."""
    before = random_weights(MOE)
    after, sampler = learn(before, 1e-6), make_sampler("bfloat16")
    table, moved = before[0]["embedding"]["table"], after[0]["embedding"]["table"]
    assert 0 < jnp.abs(moved - table).max() < 2e-6
    sampler.update(*before, version=0)
    expected = sampler.learner_checksums(after[0])
    with pytest.raises(UserError, match=r"version 1 did not arrive in .* bits of version 0, which it") as error:
        sampler.update(*before, version=1, checksums=expected)
    stale = sampler.learner_checksums(before[0])[0]
    assert stale.checksum in str(error.value) and expected[0].checksum in str(error.value)
    assert sampler.version == 0 and sampler.checksums == sampler.learner_checksums(before[0])
    sampler.update(*after, version=1, checksums=expected)
    assert sampler.version == 1 and sampler.checksums == expected


@pytest.mark.parametrize(("change", "dtype"), [(first_twice, ""), (swapped, "int8")])
def test_a_layer_that_is_loaded_twice_or_in_another_place_is_found(monkeypatch, change, dtype):
    sampler = make_sampler(dtype)
    loads(monkeypatch, change)
    with pytest.raises(UserError, match=f"version 3 did not .*: {NAMES[2]} is .*; 1 of 3 compared weights differ"):
        sampler.update(*random_weights(MOE), version=3)
    assert sampler.version == -1 and sampler.checksums == ()


def test_another_dtype_is_named():
    weights, ours = random_weights(MOE), make_sampler("float32")
    theirs = make_sampler("bfloat16").learner_checksums(weights[0])
    with pytest.raises(
        UserError, match=r"is float32\[48, 64\] .* learner's is bfloat16\[48, 64\] .* both sides the same"
    ):
        ours.update(*weights, version=0, checksums=theirs)


def test_checksums_of_another_network_are_refused():
    dense = small(**LLAMA)
    theirs = make_sampler(config=dense).learner_checksums(random_weights(dense)[0])
    with pytest.raises(UserError, match="this sampler compares embedding/table, head"):
        make_sampler().update(*random_weights(MOE), version=0, checksums=theirs)


def test_replicas_that_differ_are_found():
    mesh = make_mesh(jax.devices()[:2], replica=2)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    parts = [jax.device_put(np.full(4, i, np.float32), d) for i, d in enumerate(mesh.devices.flat)]
    with pytest.raises(UserError, match="w has different bits on devices that should hold the same ones"):
        checksums({"w": jax.make_array_from_single_device_arrays((4,), sharding, parts)})


def test_a_serving_goes_on_with_the_weights_that_it_had(monkeypatch):
    weights, sampler = random_weights(MOE), make_sampler()
    sampler.update(*weights, version=0)
    loads(monkeypatch, first_twice)

    async def main():
        async with sampler.serving():
            session = await sampler.open(1)
            before = await session.sample([3, 9], SamplingParams(8))
            with pytest.raises(UserError, match="version 1 did not arrive"):
                await sampler.update_serving(*random_weights(MOE, 1), version=1)
            after = await session.sample([3, 9], SamplingParams(8))
            session.close()
            return before, after

    before, after = asyncio.run(asyncio.wait_for(main(), 120))
    assert after.tokens == before.tokens and set(after.versions) == {0}
    assert math.isclose(sum(after.logprobs), sum(before.logprobs), abs_tol=1e-4)
