"""ModelDef: initial weights, what is trained, and how it is stored."""

import chex
import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from composer_jax.errors import UserError
from composer_jax.models.model_def import ModelDef
from composer_jax.models.parameter import matrix
from composer_jax.parallel.mesh import make_mesh
from tests.models.small import small

DEFINITION = ModelDef(small(n_layers=2))


@pytest.fixture(scope="module")
def initial():
    return DEFINITION.init(3)


def test_initial_weights_have_the_declared_shapes_and_spread(initial):
    assert jax.tree.all(
        jax.tree.map(lambda x, s: (x.shape, x.dtype) == (s.shape, s.dtype), initial, DEFINITION.shapes())
    )
    params, bias = initial
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(bias))
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if path[-1].key == "scale":
            np.testing.assert_array_equal(leaf, 1)
    # 1/sqrt(fan in); each weight has hundreds of entries or more.
    layers, d = params["moe_layers"], 32
    for leaf, fan_in in (
        (params["head"], d),
        (layers["attention"]["q"], d),
        (layers["attention"]["v_up"], 16),
        (layers["attention"]["out"], 2 * 6),
        (layers["feed_forward"]["up"], d),
        (layers["feed_forward"]["down"], 5),
        (params["mtp"]["projection"], 2 * d),
    ):
        assert np.std(leaf) * np.sqrt(fan_in) == pytest.approx(1, abs=0.12)


def test_no_two_weights_have_equal_values(initial):
    seen = set()
    for leaf in jax.tree.leaves(initial[0]):
        stacked = np.asarray(leaf).reshape(-1, leaf.shape[-1])
        if np.ptp(stacked) == 0:
            continue  # a norm
        for row in stacked[:64]:
            assert row.tobytes() not in seen
            seen.add(row.tobytes())


def test_another_seed_gives_other_weights(initial):
    other = DEFINITION.init_mtp(4)[0]
    assert not np.array_equal(other["projection"], initial[0]["mtp"]["projection"])


def test_init_std_overrides_the_spread():
    weight = matrix(nnx.Rngs(params=0), (64, 64), ("embed", None), config=small(init_std=0.006))
    assert np.std(weight.get_value()) == pytest.approx(0.006, rel=0.05)


def test_every_dimension_of_a_weight_needs_a_logical_axis():
    with pytest.raises(ValueError, match="1 axis names .* shape"):
        matrix(nnx.Rngs(params=0), (4, 4), ("embed",), config=small())


def test_parameter_count_is_the_number_of_trained_floats(initial):
    assert DEFINITION.parameter_count() == sum(leaf.size for leaf in jax.tree.leaves(initial[0]))


def test_specs_follow_the_logical_axis_rules():
    specs, bias_specs = DEFINITION.specs(make_mesh(data=2, expert=2, tensor=2))
    layers = specs["moe_layers"]
    assert layers["feed_forward"]["gate"] == PartitionSpec(None, ("expert", "tensor"), "data", None)
    assert layers["feed_forward"]["down"] == PartitionSpec(None, ("expert", "tensor"), None, "data")
    assert layers["feed_forward"]["shared"]["down"] == PartitionSpec(None, "tensor", "data")
    assert layers["attention"]["q"] == PartitionSpec(None, "data", "tensor", None)
    assert layers["attention"]["k_up"] == PartitionSpec(None, "data", "tensor", None)
    assert specs["embedding"]["table"] == PartitionSpec("tensor", "data")
    assert specs["final_norm"]["scale"] == PartitionSpec(None)
    assert set(jax.tree.leaves(bias_specs, is_leaf=lambda s: isinstance(s, PartitionSpec))) == {PartitionSpec()}


def test_init_creates_weights_in_their_shards_equal_to_those_on_one_device(initial):
    mesh = make_mesh(data=2, expert=4)
    params, _ = DEFINITION.init(3, mesh)
    gate = params["moe_layers"]["feed_forward"]["gate"]
    assert gate.addressable_shards[0].data.shape == (1, 2, 16, 5)
    chex.assert_trees_all_close(params, initial[0], rtol=1e-5, atol=1e-6)


def test_a_mesh_that_does_not_divide_the_weights_is_refused_with_the_numbers():
    definition = ModelDef(small(n_experts=6))
    with pytest.raises(UserError, match="6 experts do not divide over mesh axis expert=4"):
        definition.shardings(make_mesh(data=2, expert=4))
