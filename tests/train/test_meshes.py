"""One step on every mesh is the step of one device: loss, gradients, weights, router bias."""

import chex
import jax
import numpy as np
import pytest

from tests.models.small import GROUPED_QUERY, random_weights, relative_error, small
from tests.train.small_step import full_gradient, make_batch

BATCH = make_batch(1)
NORMALISER = float(BATCH["weights"].sum())
MESHES = {
    "data8": ({"data": 8}, {"dispatch": "ring"}),
    "expert8": ({"expert": 8}, {"dispatch": "ring"}),
    "data2_expert4": ({"data": 2, "expert": 4}, {"dispatch": "ring"}),
    "data2_expert4_all_to_all": ({"data": 2, "expert": 4}, {"dispatch": "all_to_all"}),
    "data4_expert2_dense": ({"data": 4, "expert": 2}, {"dispatch": "dense"}),
    "replica2_data2_expert2": ({"replica": 2, "data": 2, "expert": 2}, {"dispatch": "ring"}),
    "replica2_data2_expert2_host": ({"replica": 2, "data": 2, "expert": 2}, {"dispatch": "ring", "reduction": "host"}),
    "replica2_host": ({"replica": 2}, {"reduction": "host"}),
    "tensor2_expert4": ({"expert": 4, "tensor": 2}, {"dispatch": "ring"}),
    "data2_expert2_tensor2_all_to_all": ({"data": 2, "expert": 2, "tensor": 2}, {"dispatch": "all_to_all"}),
    "context2_expert2_tensor2": ({"expert": 2, "context": 2, "tensor": 2}, {"dispatch": "ring"}),
    "context8": ({"context": 8}, {"dispatch": "ring"}),
    "data2_expert2_context2": ({"data": 2, "expert": 2, "context": 2}, {"dispatch": "ring"}),
    "data4_context2_dense": ({"data": 4, "context": 2}, {"dispatch": "dense"}),
    "context2_host": ({"replica": 2, "context": 2}, {"dispatch": "ring", "reduction": "host"}),
}


def step_and_gradient(learner, weights):
    state = learner.init_state(*weights)
    gradient = full_gradient(learner, (state.params, state.router_bias), BATCH, NORMALISER)
    state, metrics = learner.step(state, [BATCH], NORMALISER)
    return gradient, jax.tree.map(np.asarray, state), metrics


@pytest.fixture(scope="module")
def expected(learner, weights):
    return step_and_gradient(learner, weights)


@pytest.mark.parametrize(("sizes", "how"), MESHES.values(), ids=MESHES.keys())
def test_a_step_is_that_of_one_device(new_learner, weights, expected, sizes, how):
    gradient, state, metrics = step_and_gradient(new_learner(sizes, **how), weights)
    assert_close(gradient, expected[0])
    assert_close(state.optimizer, expected[1].optimizer)
    assert_close(state.params, expected[1].params, STEP)
    # Counts are whole numbers: the bias moves by exactly the same steps.
    chex.assert_trees_all_equal(state.router_bias, expected[1].router_bias)
    assert metrics.keys() == expected[2].keys()
    for name, value in metrics.items():
        assert value == pytest.approx(expected[2][name], rel=1e-5), name


@pytest.mark.parametrize("sizes", [{"data": 2, "expert": 4}, {"data": 2, "context": 2, "tensor": 2}], ids=str)
def test_a_step_with_grouped_queries_windows_and_biases_is_that_of_one_device(new_learner, sizes):
    config = small(n_layers=2, **GROUPED_QUERY)
    weights = random_weights(config)
    expected = step_and_gradient(new_learner(config=config), weights)
    gradient, state, _ = step_and_gradient(new_learner(sizes, dispatch="ring", config=config), weights)
    assert_close(gradient, expected[0])
    assert_close(state.params, expected[1].params, STEP)


STEP = 1e-4
"""Of weights: AdamW makes a step of up to peak / eps = 50 times a small gradient, and so of its rounding."""


def assert_close(actual, expected, limit=1e-5):
    """Up to a share of the largest entry of every leaf."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, f), w in zip(jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        assert relative_error(f, w) < limit, jax.tree_util.keystr(path)
