"""The table from logical axes to mesh axes, and the gather and reduce-scatter that follow from it."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from composer_jax.errors import UserError
from composer_jax.parallel import sharding
from composer_jax.parallel.mesh import make_mesh
from composer_jax.parallel.sharding import all_gather_fsdp, axis_size, storage_sharding, storage_spec


def test_storage_follows_the_table():
    mesh = make_mesh(data=2, expert=2, tensor=2)
    assert storage_spec(mesh, ("experts", "embed", None)) == PartitionSpec(("expert", "tensor"), "data", None)
    assert storage_spec(mesh, (None, "heads", None)) == PartitionSpec(None, "tensor", None)
    assert storage_spec(mesh, ()) == PartitionSpec()


def test_axes_of_size_one_are_left_out():
    mesh = make_mesh(data=4, expert=2)
    assert storage_spec(mesh, ("experts", "embed")) == PartitionSpec("expert", "data")
    assert storage_spec(mesh, (None, "heads", None)) == PartitionSpec(None, None, None)


def test_two_dimensions_on_one_mesh_axis_are_refused(monkeypatch):
    with pytest.raises(UserError, match=r"\('embed', 'embed'\) map twice to one mesh axis"):
        storage_spec(make_mesh(data=8), ("embed", "embed"))
    monkeypatch.setitem(sharding.LOGICAL_AXIS_RULES, "ff", ("data",))
    with pytest.raises(UserError, match="change LOGICAL_AXIS_RULES"):
        storage_spec(make_mesh(data=8), ("experts", "embed", "ff"))


@pytest.mark.parametrize(
    ("shape", "axes", "message"),
    [
        ((6, 8), ("experts", "embed"), "6 experts do not divide over mesh axis expert=4; use a divisor of 6"),
        ((8, 7), ("experts", "embed"), "7 embed do not divide over mesh axis data=2; use a divisor of 7"),
    ],
)
def test_sizes_that_do_not_divide_are_named(shape, axes, message):
    mesh = make_mesh(data=2, expert=4)
    with pytest.raises(UserError, match=message):
        storage_sharding(mesh, shape, axes)
    assert storage_sharding(mesh, (8, 8), axes).shard_shape((8, 8)) == (2, 4)


def test_sizes_over_two_axes_name_both():
    with pytest.raises(UserError, match="6 experts do not divide over mesh axis expert=2 and tensor=2"):
        storage_sharding(make_mesh(data=2, expert=2, tensor=2), (6, 8), ("experts", "embed"))


def test_outside_a_mesh_nothing_is_gathered():
    weight = np.ones((4, 4))
    assert axis_size("data") == 1
    assert all_gather_fsdp(weight, ("embed", "experts")) is weight


def test_a_gathered_weight_is_whole_and_its_gradient_is_scattered_back():
    """Every device uses the whole weight with its own factor; the stored part gets the sum of what all devices say."""
    mesh = make_mesh(data=4, expert=2)
    weight = np.arange(24, dtype=np.float32).reshape(2, 12)
    factor = np.arange(1, 9, dtype=np.float32)
    axes = ("experts", "embed")

    def program(stored, factor):
        def objective(stored):
            whole = all_gather_fsdp(stored, axes)
            assert whole.shape == (1, 12)
            return (factor * whole**2).sum(), whole

        (_, whole), gradient = jax.value_and_grad(objective, has_aux=True)(stored)
        return whole, gradient

    rows = PartitionSpec(("data", "expert"))
    mapped = jax.shard_map(
        program,
        mesh=mesh,
        in_specs=(storage_spec(mesh, axes), rows),
        out_specs=(PartitionSpec("expert", "data"), storage_spec(mesh, axes)),
    )
    whole, gradient = jax.jit(mapped)(weight, factor)
    np.testing.assert_array_equal(whole, np.tile(weight, (1, 4)))
    # Device (d, e) has factor 2 d + e + 1 and holds expert e: the sum over d.
    by_expert = factor.reshape(4, 2).sum(0)
    np.testing.assert_allclose(gradient, 2 * weight * by_expert[:, None])
