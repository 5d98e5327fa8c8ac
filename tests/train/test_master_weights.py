"""Training with bfloat16 weights: the optimizer updates a float32 master copy."""

import dataclasses
import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.checkpoint.store import CheckpointStore
from composer_jax.models.model_def import ModelDef
from composer_jax.parallel.mesh import make_mesh
from composer_jax.train.learner import Learner
from composer_jax.train.loop import restore_state, save_state
from composer_jax.train.losses import LanguageLoss
from composer_jax.train.optimizer import OptimizerConfig, make_optimizer
from tests.models.small import WITHOUT_EXPERTS, random_weights, small
from tests.train.small_step import make_batch

CONFIG = small(**WITHOUT_EXPERTS, n_layers=2, n_mtp_modules=1, embedding_taps=0)
EXPERTS = small(n_layers=2, param_dtype="bfloat16")
BATCH = make_batch(0, n=8)
NORMALISER = float(BATCH["weights"].sum())
SMALL_RATE = OptimizerConfig(peak=5e-5, decay="constant")
LARGE_RATE = OptimizerConfig(peak=0.01, eps=1e-3, decay="constant")


@functools.cache
def new_learner(optimizer=SMALL_RATE, sizes=(), param_dtype="bfloat16", config=CONFIG):
    definition = ModelDef(dataclasses.replace(config, param_dtype=param_dtype))
    mesh = make_mesh(jax.devices()[: math.prod(size for _, size in sizes)], **dict(sizes))
    return Learner(definition, make_optimizer(optimizer, steps=40), LanguageLoss(), mesh)


def take_steps(learner, state, n):
    for _ in range(n):
        state, _ = learner.step(state, [BATCH], NORMALISER)
    return state


def test_small_updates_accumulate():
    """40 steps of 5e-5 move a weight by up to 2e-3; one step is below half the spacing of bfloat16 at most weights."""
    learner = new_learner()
    weights = random_weights(learner.definition.config)
    state = take_steps(learner, learner.init_state(*weights), 40)
    assert np.mean(attention_weights(state.params) != attention_weights(weights[0])) > 0.5
    master = attention_weights(state.optimizer.weights)
    changes = np.abs(master - attention_weights(weights[0]).astype(np.float32))
    assert np.mean(changes > 5e-5) > 0.9
    assert changes.max() < 300e-5
    rounded = jax.tree.map(lambda w: w.astype(jnp.bfloat16), state.optimizer.weights)
    chex.assert_trees_all_equal(rounded, state.params)
    chex.assert_trees_all_equal(state.params["mtp"], weights[0]["mtp"])


def attention_weights(params):
    """Matrices of which every entry gets a gradient, as one vector."""
    layers = params["dense_layers"]["attention"]
    return np.concatenate([np.ravel(layers[name]) for name in ("kv_down", "v_up", "out")])


def test_master_weights_equal_a_run_with_float32_weights():
    """One step from the same weights, up to the rounding of bfloat16 gradients and moments."""
    low, full = new_learner(LARGE_RATE), new_learner(LARGE_RATE, param_dtype="float32")
    weights, bias = random_weights(low.definition.config)
    wide = jax.tree.map(lambda w: w.astype(jnp.float32), weights)
    state = take_steps(low, low.init_state(weights, bias), 1)
    expected = take_steps(full, full.init_state(wide, bias), 1)
    chex.assert_trees_all_close(state.optimizer.weights, expected.params, atol=3e-4)


def test_float32_weights_have_no_second_copy():
    with_master = new_learner(param_dtype="float32")
    without = new_learner(dataclasses.replace(SMALL_RATE, master_dtype=""), param_dtype="float32")
    chex.assert_trees_all_equal(with_master.abstract_state(), without.abstract_state())
    names = [type(learner.abstract_state().optimizer) for learner in (with_master, without)]
    assert names == [tuple, tuple]


@pytest.mark.parametrize(("weights_dtype", "dtype"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_moments_have_the_dtype_of_the_config_and_an_empty_dtype_turns_the_copy_off(weights_dtype, dtype):
    config = dataclasses.replace(SMALL_RATE, moment_dtype=dtype, master_dtype="")
    learner = new_learner(config, param_dtype=weights_dtype)
    state = learner.abstract_state()
    moments = [leaf for leaf in jax.tree.leaves(state.optimizer) if leaf.ndim]
    assert len(moments) == 2 * len(jax.tree.leaves(state.params))
    assert {leaf.dtype for leaf in moments} == {jnp.dtype(dtype)}


def test_bfloat16_moments_change_a_step_by_their_rounding():
    """The third step reads what the first two have stored."""
    states = []
    for dtype in ("float32", "bfloat16"):
        learner = new_learner(dataclasses.replace(LARGE_RATE, moment_dtype=dtype), param_dtype="float32")
        states.append(take_steps(learner, learner.init_state(*random_weights(learner.definition.config)), 3))
    exact, rounded = states
    assert jax.tree.leaves(rounded.params)[0].dtype == jnp.float32
    chex.assert_trees_all_close(rounded.params, exact.params, atol=0.01 * 0.05)
    assert attention_weights(rounded.params).tobytes() != attention_weights(exact.params).tobytes()


def test_the_copy_is_sharded_like_the_weights_and_survives_a_checkpoint(tmp_path):
    shardings = jax.tree.map(
        lambda a: a.sharding, new_learner(sizes=(("data", 2), ("expert", 2)), config=EXPERTS).abstract_state()
    )
    assert shardings.optimizer.weights == shardings.params
    learner = new_learner(sizes=(("data", 2), ("tensor", 2)))
    state = learner.init_state(*random_weights(learner.definition.config))
    shardings = jax.tree.map(lambda a: a.sharding, state)
    assert shardings == jax.tree.map(lambda a: a.sharding, learner.abstract_state())
    assert shardings.optimizer.weights == shardings.params
    chex.assert_trees_all_equal_shapes_and_dtypes(state, learner.abstract_state())
    state = take_steps(learner, state, 2)
    with CheckpointStore(tmp_path) as store:
        save_state(store, state)
        restored = restore_state(store, learner.init_state(*random_weights(learner.definition.config, seed=1)))
    assert restored is not None
    expected = jax.tree.map(np.asarray, take_steps(learner, state, 2))
    chex.assert_trees_all_equal(jax.tree.map(np.asarray, take_steps(learner, restored[0], 2)), expected)
