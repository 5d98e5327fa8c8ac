"""Rows cut over devices: every position is somewhere, devices have equal work, and neighbours are found."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from composer_jax.errors import UserError
from composer_jax.parallel import context
from composer_jax.parallel.context import zigzag_order
from composer_jax.parallel.mesh import make_mesh

LENGTH = 48


def test_the_first_and_the_last_chunk_go_together():
    assert zigzag_order(8, 2).tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    assert zigzag_order(7, 1).tolist() == list(range(7))


@pytest.mark.parametrize("devices", [2, 3, 4])
def test_every_device_has_the_same_amount_of_causal_attention(devices):
    parts = zigzag_order(LENGTH, devices).reshape(devices, -1)
    assert sorted(parts.reshape(-1)) == list(range(LENGTH))
    pairs = (parts + 1).sum(1)  # a query at p sees p + 1 keys
    assert (pairs == pairs[0]).all()
    assert LENGTH * (LENGTH + 1) / 2 / devices == pairs[0]


def test_rows_that_do_not_divide_are_refused_with_the_numbers():
    with pytest.raises(UserError, match="Rows of 20 tokens .* context=4, .* 8 chunks; use a multiple of 8"):
        zigzag_order(20, 4)


def on_devices(function, x, devices: int):
    """Applies `function` to each device's part of x [B,S,...] and returns the results in the order of positions."""
    mesh = make_mesh(jax.devices()[:devices], context=devices)
    spec = PartitionSpec(None, "context")
    cut = zigzag_order(x.shape[1], devices)
    mapped = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=(spec,), out_specs=spec))
    return np.asarray(mapped(x[:, cut]))[:, np.argsort(cut)]


@pytest.mark.parametrize(
    ("devices", "shape"), [(1, (2, LENGTH)), (2, (2, LENGTH, 3)), (4, (2, LENGTH)), (8, (2, LENGTH, 3))], ids=str
)
def test_neighbours_across_chunks(devices, shape):
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    later, earlier = np.roll(x, -1, axis=1), np.roll(x, 1, axis=1)
    later[:, -1], earlier[:, 0] = 0, 0
    np.testing.assert_array_equal(on_devices(context.shift_left, x, devices), later)
    np.testing.assert_array_equal(on_devices(context.shift_right, x, devices), earlier)


@pytest.mark.parametrize("devices", [1, 2, 8])
def test_a_gathered_row_is_in_order_and_a_device_knows_its_positions(devices):
    x = np.arange(2 * LENGTH, dtype=np.float32).reshape(2, LENGTH)

    def look_up(part):
        return jnp.take(context.gather_row(part), context.local_positions(part.shape[1]), axis=1)

    np.testing.assert_array_equal(on_devices(look_up, x, devices), x)


def test_the_gradient_of_a_neighbour_goes_back_to_it():
    x = np.random.default_rng(0).standard_normal((2, 16)).astype(np.float32)
    weight = np.random.default_rng(1).standard_normal((2, 16)).astype(np.float32)

    def gradient(both):
        return jax.grad(lambda part: (context.shift_left(part) * both[..., 1]).sum())(both[..., 0])

    actual = on_devices(gradient, np.stack([x, weight], axis=-1), 4)
    expected = np.roll(weight, 1, axis=1)
    expected[:, 0] = 0
    np.testing.assert_array_equal(actual, expected)
