"""optimizer.offload: the optimizer's state lies in the host's memory, and training is the same bit for bit."""

import functools

import chex
import jax
import numpy as np
import pytest

from composer_jax.checkpoint.store import CheckpointStore
from composer_jax.models.model_def import ModelDef
from composer_jax.parallel.mesh import make_mesh
from composer_jax.parallel.sharding import bytes_per_device
from composer_jax.scale.programs import stage_steps
from composer_jax.schema.run_config import run_config
from composer_jax.train.learner import HOST_MEMORY, Learner
from composer_jax.train.loop import restore_state, save_state
from composer_jax.train.losses import LanguageLoss
from composer_jax.train.optimizer import OptimizerConfig, make_optimizer
from composer_jax.train.step_memory import arrays_in
from tests.models.small import LLAMA, random_weights, small
from tests.scale.configuration import small_config
from tests.train.small_step import make_batch

BATCH = make_batch(1)
NORMALISER = float(BATCH["weights"].sum())
NETWORK = small(**LLAMA, n_layers=2, param_dtype="bfloat16")  # with master weights


@functools.cache
def make_learner(name, offload, reduction="collective"):
    config = OptimizerConfig(name=name, peak=0.02, offload=offload)
    sizes = {"replica": 2} if reduction == "host" else {"data": 2, "tensor": 2}
    mesh = make_mesh(jax.devices()[: int(np.prod([*sizes.values()]))], **sizes)
    return Learner(ModelDef(NETWORK), make_optimizer(config, 10), LanguageLoss(), mesh, reduction=reduction)


def memory_kinds(tree):
    """Returns the memory kinds of the arrays with at least one dimension: counts stay on the devices."""
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree) if leaf.ndim}


def two_steps(learner):
    state = learner.init_state(*random_weights(NETWORK))
    for _ in range(2):
        state, metrics = learner.step(state, [BATCH], NORMALISER)
    return state, metrics


@pytest.mark.parametrize(("name", "reduction"), [("muon", "collective"), ("adamw", "host")], ids=str)
def test_steps_are_the_same_and_the_state_is_in_host_memory(name, reduction):
    learner = make_learner(name, True, reduction)
    first = learner.init_state(*random_weights(NETWORK))
    assert memory_kinds(first.optimizer) == {HOST_MEMORY} and HOST_MEMORY not in memory_kinds(first.params)
    state, metrics = two_steps(learner)
    assert memory_kinds(state.optimizer) == {HOST_MEMORY} and HOST_MEMORY not in memory_kinds(state.params)
    expected, expected_metrics = two_steps(make_learner(name, False, reduction))
    assert memory_kinds(expected.optimizer) == {"device"}
    chex.assert_trees_all_equal(jax.device_get(state), jax.device_get(expected))
    assert metrics == expected_metrics
    abstract = learner.abstract_state().optimizer
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(abstract) if leaf.ndim} == {HOST_MEMORY}


def test_a_checkpoint_returns_to_host_memory(tmp_path):
    learner = make_learner("adamw", True, "host")
    state, _ = two_steps(learner)
    with CheckpointStore(tmp_path) as store:
        save_state(store, state)
        restored = restore_state(store, learner.init_state(*random_weights(NETWORK)))
    assert restored is not None and memory_kinds(restored[0].optimizer) == {HOST_MEMORY}
    continued, _ = learner.step(restored[0], [BATCH], NORMALISER)
    expected, _ = learner.step(state, [BATCH], NORMALISER)
    chex.assert_trees_all_equal(jax.device_get(continued), jax.device_get(expected))


def test_the_planner_counts_the_state_in_the_hosts_memory():
    mesh = make_mesh(data=4, expert=2)

    def resident(offload):
        run = run_config(small_config(pretrain__optimizer__offload=offload))
        return stage_steps(run, "pretrain", lambda _: mesh)["train"].programs["gradient"].resident

    on_device, in_host = resident(False), resident(True)
    assert arrays_in(on_device, host=True) == []
    moved, params = bytes_per_device(arrays_in(in_host, host=True)), bytes_per_device(on_device["params"])
    assert moved == 4 * params  # of bfloat16: two moments, and a master of float32
    assert bytes_per_device(arrays_in(in_host, host=False)) == bytes_per_device(on_device) - moved
