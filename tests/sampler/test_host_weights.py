"""New weights from the host's memory replace the old ones tensor by tensor: the same bits, and no second copy."""

import asyncio
import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.checkpoint.weight_chain import WeightPublisher, WeightReceiver
from composer_jax.checkpoint.weight_shards import parts_here, published_shards
from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.errors import UserError
from composer_jax.models.model_def import ModelDef
from composer_jax.parallel.mesh import make_mesh
from composer_jax.sampler import host_weights as module
from composer_jax.sampler.config import SamplerConfig
from composer_jax.sampler.host_weights import HostTensor, host_weights
from composer_jax.sampler.request import Request
from composer_jax.sampler.rollout_weights import RolloutWeights
from composer_jax.sampler.sampler import Sampler
from composer_jax.sampler.weight_checksums import ChecksumProgram, checked_weights, checksum_of_sums, sums_of_part
from tests.models.small import random_weights, small

NETWORK = small(n_mtp_modules=0, dispatch="ring")
MESHES = {"one": {}, "fsdp": dict(data=8), "experts": dict(expert=8), "both": dict(data=2, expert=2, tensor=2)}
TABLE = "params/embedding/table"


def mesh_of(sizes):
    return make_mesh(jax.devices()[: math.prod(sizes.values())], **sizes)


def in_dtype(dtype):
    return ModelDef(dataclasses.replace(NETWORK, param_dtype=dtype))


def published(weights, folder, version):
    """What a learner publishes of weights in float32, as one version: bfloat16, and the router bias as it is."""
    WeightPublisher(str(folder)).publish(published_shards(*weights), version)


def received(folder, definition, mesh):
    """(receiver of the parts of a mesh, tree of the shapes)"""
    like = dict(zip(("params", "router_bias"), definition.abstract_weights(mesh), strict=True))
    receiver = WeightReceiver(str(folder), parts_here(like))
    receiver.receive()
    return receiver, like


def rounded(weights):
    return jax.tree.map(lambda a: a.astype(jnp.bfloat16), weights[0]), weights[1]


def change_table(weights):
    params = jax.tree.map(lambda a: a, weights[0])
    params["embedding"]["table"] = params["embedding"]["table"] * 1.5
    return params, weights[1]


def assert_same_bits(actual, expected):
    def compare(a, b):
        assert a.dtype == b.dtype and a.sharding == b.sharding
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))

    jax.tree.map(compare, actual, expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("sizes", MESHES.values(), ids=MESHES)
def test_replaced_weights_have_the_bits_of_a_whole_load(tmp_path, sizes, dtype):
    mesh, definition = mesh_of(sizes), in_dtype(dtype)
    first, second = random_weights(NETWORK, 1), change_table(random_weights(NETWORK, 1))
    rollout = RolloutWeights(definition, mesh)
    held = rollout.to_rollout(*rounded(first), copy=True)
    published(first, tmp_path, 1)
    receiver, like = received(tmp_path, definition, mesh)
    receiver.changed.clear()
    published(second, tmp_path, 2)
    receiver.receive()
    assert receiver.changed >= {TABLE}
    for changed in (receiver.changed, None):
        trees = host_weights(receiver.parts, like, changed)
        held = rollout.replace(jax.tree.leaves(held), trees["params"], trees["router_bias"])
        assert_same_bits(held, rollout.to_rollout(*rounded(second), copy=True))


def test_weights_that_did_not_change_stay_the_same_arrays(tmp_path):
    mesh, definition = mesh_of({}), in_dtype("float32")
    weights = random_weights(NETWORK, 1)
    published(weights, tmp_path, 1)
    receiver, like = received(tmp_path, definition, mesh)
    rollout = RolloutWeights(definition, mesh)
    held = rollout.to_rollout(*rounded(weights), copy=True)
    before = jax.tree.leaves(held)
    trees = host_weights(receiver.parts, like, {TABLE})
    after = jax.tree.leaves(rollout.replace(jax.tree.leaves(held), trees["params"], trees["router_bias"]))
    assert sum(a is not b for a, b in zip(before, after, strict=True)) == 1


def device_bytes():
    """Of all live arrays, on all devices; arrays that share a buffer count once."""
    shards = [shard for array in jax.live_arrays() for shard in array.addressable_shards]
    return sum({shard.data.unsafe_buffer_pointer(): shard.data.nbytes for shard in shards}.values())


@pytest.mark.parametrize("sizes", [{}, dict(data=2, expert=2, tensor=2)], ids=["one", "eight"])
@pytest.mark.parametrize("d_model", [32, 64])
def test_the_devices_hold_no_more_than_the_weights_while_they_are_replaced(tmp_path, monkeypatch, d_model, sizes):
    """The formula of docs/scale.md at two sizes."""
    mesh, definition = mesh_of(sizes), ModelDef(dataclasses.replace(NETWORK, d_model=d_model))
    weights = random_weights(definition.config, 1)
    published(weights, tmp_path, 1)
    receiver, like = received(tmp_path, definition, mesh)
    rollout, most = RolloutWeights(definition, mesh), []
    held = rollout.to_rollout(*rounded(weights), copy=True)
    tensors = jax.tree.leaves(held)
    of_weights = sum(shard.data.nbytes for array in tensors for shard in array.addressable_shards)
    largest = max(sum(shard.data.nbytes for shard in array.addressable_shards) for array in tensors)
    del held, weights
    others = device_bytes() - of_weights
    place = module.place_weight

    def recording(*args):
        most.append(device_bytes() - others)
        array = place(*args)
        most.append(device_bytes() - others)
        return array

    monkeypatch.setattr(module, "place_weight", recording)
    trees = host_weights(receiver.parts, like, None)
    tree = rollout.replace(tensors, trees["params"], trees["router_bias"])
    assert len(most) == 2 * len(jax.tree.leaves(tree))
    assert of_weights - largest <= min(most) < of_weights, "the old tensor is freed before the new one is placed"
    assert max(most) == of_weights
    assert sum(part.nbytes for part in receiver.parts.values()) <= 2 * sum(
        array.size * array.dtype.itemsize for array in jax.tree.leaves(like)
    ), "the host holds equal parts once"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sizes", MESHES.values(), ids=MESHES)
def test_sums_of_the_parts_make_the_checksums_of_the_devices(tmp_path, sizes, dtype):
    mesh, definition = mesh_of(sizes), in_dtype(dtype)
    weights = random_weights(NETWORK, 1)
    published(weights, tmp_path, 1)
    receiver, like = received(tmp_path, definition, mesh)
    expected = ChecksumProgram(definition).of_sampler(
        RolloutWeights(definition, mesh).to_rollout(*rounded(weights), copy=True)[0]
    )
    leaves = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in flat(like["params"])}
    actual = []
    for name in checked_weights(definition):
        parts = [(s, part) for s, part in receiver.parts.items() if s.name == f"params/{name}"]
        sums = [sums_of_part(part.astype(dtype), shard.start) for shard, part in parts]
        actual.append(checksum_of_sums(name, leaves[name], sums))
    assert tuple(actual) == expected


def flat(tree):
    return jax.tree_util.tree_leaves_with_path(tree)


def test_a_tensor_that_cannot_be_placed_ends_the_serving(tmp_path, monkeypatch):
    """Half of a version computes nothing: the requests end with the reason, and so do later ones."""
    mesh, definition = mesh_of({}), in_dtype("float32")
    sizes = SamplerConfig(slots=2, max_model_len=32, decode_steps=4, prefill_shapes=((2, 8),))
    sampler = Sampler(definition, mesh, sizes, end_tokens=())
    weights = random_weights(NETWORK, 1)
    sampler.update(*weights, version=1)
    published(weights, tmp_path, 2)
    receiver, like = received(tmp_path, definition, mesh)
    trees = host_weights(receiver.parts, like, None)
    place, placed = HostTensor.place, []

    def failing(tensor, *args):
        if len(placed) == 3:
            raise UserError("the device is full")
        placed.append(tensor.name)
        return place(tensor, *args)

    monkeypatch.setattr(HostTensor, "place", failing)

    async def update():
        async with sampler.serving():
            request = sampler.submit(Request([3, 9, 14], SamplingParams(25), 7))
            with pytest.raises(UserError, match="the device is full"):
                await sampler.update_serving(*trees.values(), 2, mode="keep", checksums=sampler.checksums)
            with pytest.raises(UserError, match="the device is full"):
                await request
            with pytest.raises(UserError, match="the device is full"):
                sampler.submit(Request([3, 9, 14], SamplingParams(5), 7))

    with pytest.raises(UserError, match="the device is full"):
        asyncio.run(update())
    assert sampler.version == -1 and len(placed) == 3
