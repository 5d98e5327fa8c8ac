"""Runs with more MTP modules than their base: where the modules come from, what trains them, where they can go."""

import dataclasses

import chex
import jax
import numpy as np
import pytest

from composer_jax.checkpoint.base_model import check_base_model, load_base_weights
from composer_jax.checkpoint.convert import convert
from composer_jax.checkpoint.huggingface import load_hf, save_hf
from composer_jax.checkpoint.native import model_notes
from composer_jax.checkpoint.store import CheckpointStore
from composer_jax.errors import UserError
from composer_jax.models.model_def import ModelDef
from composer_jax.parallel.mesh import make_mesh
from composer_jax.stages.run import Run
from configs import base
from tests.checkpoint.hf_folder import CONFIG, WEIGHTS
from tests.models.small import forward, random_weights, relative_error
from tests.stages.base_model import NETWORK, weights, write_base
from tests.train.small_step import make_batch

BATCH = make_batch(1)
SEED = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("published") / "model")


@pytest.fixture
def run(folder, tmp_path):
    """A run with one module on a base without any."""
    config = base.get_config("1024")
    config.base, config.seed = f"hf:{folder}", SEED
    config.mesh.update({"cpu_devices": 1, "replica": 1})
    config.sampler.slots = 8
    config.model.update({"n_mtp_modules": 1, "compute_dtype": "float32"})
    config.pretrain.loss.update({"mtp_weight": 1.0, "trained": "mtp"})
    config.pretrain.optimizer.update({"peak": 1e-2, "warmup": 0})
    config.pretrain.update({"steps": 4, "router_bias_update_rate": 0.01})
    with Run(config, tmp_path / "run") as run:
        yield run


def save_native(folder, config, params_and_bias) -> str:
    with CheckpointStore(str(folder), notes=model_notes(ModelDef(config))) as store:
        store.save(0, arrays=dict(zip(("params", "router_bias"), params_and_bias, strict=True)))
    return str(folder)


def without_modules(trees):
    return [{name: leaf for name, leaf in jax.device_get(tree).items() if name != "mtp"} for tree in trees]


def test_the_trunk_is_the_base_and_the_modules_are_initial_ones(run):
    params, bias = run.model.initial_weights()
    chex.assert_trees_all_equal(without_modules((params, bias)), without_modules(weights()))
    initial = run.model.definition.init(SEED, run.mesh)
    for tree, expected in zip((params, bias), initial, strict=True):
        chex.assert_trees_all_equal(tree["mtp"], expected["mtp"])
    assert (np.asarray(params["mtp"]["projection"]) != run.model.definition.init(6)[0]["mtp"]["projection"]).any()
    actual, expected = forward(run.config.model)(params, bias, BATCH), forward(NETWORK)(*weights(), BATCH)
    assert relative_error(actual["logits"], expected["logits"]) < 1e-6
    assert actual["mtp_logits"].shape == (1, *expected["logits"].shape)


def test_the_modules_learn_alone(run):
    learner = run.model.learner("pretrain")
    initial = jax.device_get(run.model.initial_weights())
    state = learner.init_state(*initial)
    losses = []
    for _ in range(4):
        state, metrics = learner.step(state, [BATCH], float(BATCH["weights"].sum()))
        losses.append(metrics["mtp_kl"])
    assert losses[-1] < losses[0]
    after = jax.device_get((state.params, state.router_bias))
    chex.assert_trees_all_equal(without_modules(after), without_modules(initial))
    moved = jax.tree.map(lambda a, b: (a != b).any(), after[0]["mtp"], initial[0]["mtp"])
    assert all(jax.tree.leaves(moved))


def test_a_format_without_modules_takes_the_weights_without_them(run, tmp_path):
    """The family of this base has no place for modules."""
    native = save_native(tmp_path / "native", run.config.model, run.model.initial_weights())
    with pytest.raises(UserError, match=r"n_mtp_modules=1 cannot be stored in a qwen3_moe checkpoint.*--nomtp\)\.$"):
        convert(native, f"hf:{tmp_path / 'refused'}")
    convert(native, f"hf:{tmp_path / 'exported'}", mtp=False)
    loaded = load_hf(tmp_path / "exported", dtype="float32")
    chex.assert_trees_all_equal(jax.device_get(loaded[1:]), jax.device_get(weights()))


def test_a_format_with_modules_stores_them(tmp_path):
    """The base is of DeepSeek-V3's family; mesh and dtype are the run's."""
    save_hf(tmp_path / "base", ModelDef(CONFIG), *WEIGHTS)
    definition, mesh = ModelDef(dataclasses.replace(CONFIG, n_mtp_modules=1)), make_mesh(data=2, expert=2, tensor=2)
    trees = load_base_weights(f"hf:{tmp_path / 'base'}", definition, mesh, SEED)
    assert jax.tree.map(lambda leaf: leaf.sharding, trees) == definition.shardings(mesh)
    native = save_native(tmp_path / "native", definition.config, trees)
    convert(native, f"hf:{tmp_path / 'exported'}")
    loaded = load_hf(tmp_path / "exported")
    assert loaded.definition.config.n_mtp_modules == 1
    chex.assert_trees_all_equal(jax.device_get(loaded[1:]), jax.device_get(trees))


@pytest.mark.parametrize("n_modules", [0, 1, 2, 3])
def test_a_run_takes_the_first_modules_of_a_published_base(tmp_path, n_modules):
    """The base has two."""
    two = dataclasses.replace(CONFIG, n_mtp_modules=2, param_dtype="float32")
    stored = random_weights(two)
    save_hf(tmp_path / "base", ModelDef(two), *stored)
    definition, mesh = ModelDef(dataclasses.replace(two, n_mtp_modules=n_modules)), make_mesh(jax.devices()[:1])
    trees = load_base_weights(f"hf:{tmp_path / 'base'}", definition, mesh, SEED)
    assert jax.tree.map(np.shape, trees) == jax.tree.map(lambda leaf: leaf.shape, definition.shapes())
    chex.assert_trees_all_equal(without_modules(trees), without_modules(stored))
    kept = min(n_modules, 2)
    if n_modules:
        for tree, of_base, fresh in zip(trees, stored, definition.init(SEED), strict=True):
            join = lambda of_base, fresh: np.concatenate([of_base[:kept], fresh[kept:]])  # noqa: E731
            chex.assert_trees_all_equal(jax.device_get(tree["mtp"]), jax.tree.map(join, of_base["mtp"], fresh["mtp"]))


def test_a_native_base_keeps_its_modules(tmp_path):
    one = dataclasses.replace(NETWORK, n_mtp_modules=1)
    native = save_native(tmp_path / "native", one, random_weights(one))
    check_base_model(native, dataclasses.replace(one, n_mtp_modules=2))
    with pytest.raises(UserError, match=r"n_mtp_modules=0 differs from n_mtp_modules=1 of .*; leave it out"):
        check_base_model(native, NETWORK)
