"""Muon against optax, and on every kind of mesh against one device."""

import functools
import math

import chex
import jax
import numpy as np
import optax
import pytest
from optax.contrib import MuonDimensionNumbers

from composer_jax.checkpoint.store import CheckpointStore
from composer_jax.models.model_def import ModelDef
from composer_jax.models.parameter import MatrixAxes
from composer_jax.parallel.mesh import make_mesh
from composer_jax.scale.costs import CostAssumptions, Region, estimate_cost
from composer_jax.scale.flat_jaxpr import per_device_programs
from composer_jax.train.learner import Learner
from composer_jax.train.loop import restore_state, save_state
from composer_jax.train.losses import LanguageLoss
from composer_jax.train.optimizer import OptimizerConfig, make_optimizer
from tests.models.small import LLAMA, random_weights, relative_error, small
from tests.train.small_step import make_batch

BATCH = make_batch(1)
NORMALISER = float(BATCH["weights"].sum())
MUON = OptimizerConfig(name="muon", peak=0.02, eps=1e-3, momentum=0.5)
NETWORKS = {
    "experts": small(n_layers=3, n_mtp_modules=0, embedding_taps=1, dispatch="ring"),
    "llama": small(**LLAMA, n_layers=3, tie_embeddings=True),
}


@functools.cache
def make_learner(network: str, sizes: tuple[tuple[str, int], ...] = (), reduction="collective") -> Learner:
    mesh = make_mesh(jax.devices()[: math.prod(size for _, size in sizes)], **dict(sizes))
    optimizer = make_optimizer(MUON, steps=10)
    return Learner(ModelDef(NETWORKS[network]), optimizer, LanguageLoss(), mesh, reduction=reduction)


@functools.cache
def two_steps(network: str, sizes: tuple[tuple[str, int], ...] = (), reduction="collective"):
    learner = make_learner(network, sizes, reduction)
    state = learner.init_state(*random_weights(NETWORKS[network]))
    for _ in range(2):
        state, _ = learner.step(state, [BATCH], NORMALISER)
    return jax.tree.map(np.asarray, state)


@pytest.mark.parametrize(
    ("network", "sizes", "reduction"),
    [
        pytest.param("experts", {"data": 2, "expert": 2, "tensor": 2}, "collective", marks=pytest.mark.slow),
        ("llama", {"data": 2, "context": 2, "tensor": 2}, "collective"),
        ("llama", {"replica": 2}, "host"),
    ],
    ids=str,
)
def test_two_steps_are_those_of_one_device(network, sizes, reduction):
    actual, expected = two_steps(network, tuple(sizes.items()), reduction), two_steps(network)
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        assert relative_error(x, y) < 1e-5, jax.tree_util.keystr(path)


def test_matrices_are_exchanged_and_not_gathered():
    """Each device of a mesh of FSDP and tensor parallelism orthogonalises different matrices."""
    learner = make_learner("llama", (("data", 2), ("context", 2), ("tensor", 2)))
    batch = {name: jax.ShapeDtypeStruct(value.shape, value.dtype) for name, value in BATCH.items()}
    function, arguments, keywords = learner.programs(batch)["update"]
    text = function.lower(*arguments, **keywords).compile().as_text()
    assert " all-to-all" in text
    assert " all-gather" not in text


def test_directions_are_those_of_optax_by_layer_expert_and_head():
    """optax corrects its moment for the first steps, so that the two agree from where 0.5^n is nothing."""
    config = small(n_layers=2, embedding_taps=1, n_mtp_modules=0)
    definition, rng = ModelDef(config), np.random.default_rng(0)
    params, _ = random_weights(config)
    latent = {
        "q": MuonDimensionNumbers(1, 3),  # [L,D,H,X]
        "kv_down": MuonDimensionNumbers(1, 2),
        "k_up": MuonDimensionNumbers(1, 3),
        "v_up": MuonDimensionNumbers(1, 3),
        "out": MuonDimensionNumbers(2, 3),  # [L,H,V,D]
    }
    dense = dict.fromkeys(("gate", "up", "down"), MuonDimensionNumbers(1, 2))  # [L,D,F]
    experts = dict.fromkeys(("gate", "up", "down"), MuonDimensionNumbers(2, 3))  # [L,E,D,F]
    experts |= {"router": {"weight": MuonDimensionNumbers(1, 2)}, "shared": dense}
    numbers = {
        "dense_layers": {"attention": latent, "feed_forward": dense},
        "moe_layers": {"attention": latent, "feed_forward": experts},
        "embedding": {"taps": MuonDimensionNumbers(1, 2)},
    }

    def of_path(path):
        node = numbers
        for key in path:
            node = node.get(key.key) if isinstance(node, dict) else None
        return node

    theirs = optax.contrib.muon(
        1.0,
        beta=0.5,
        weight_decay=0.0,
        consistent_rms=0.2,
        muon_weight_dimension_numbers=jax.tree_util.tree_map_with_path(lambda path, _: of_path(path), params),
    )
    settings = OptimizerConfig(name="muon", eps=MUON.eps, momentum=0.5, weight_decay=0.0, clip=1e9)
    ours = make_optimizer(settings, steps=1).make_transformation(definition, None)
    adam = optax.scale_by_adam(MUON.b1, MUON.b2, MUON.eps)
    state, their_state, adam_state = ours.init(params), theirs.init(params), adam.init(params)
    update, their_update, adam_update = jax.jit(ours.update), jax.jit(theirs.update), jax.jit(adam.update)
    for _ in range(25):
        gradient = jax.tree.map(lambda w: rng.standard_normal(w.shape).astype(np.float32), params)
        direction, state = update(gradient, state, params)
        their_direction, their_state = their_update(gradient, their_state, params)
        adam_direction, adam_state = adam_update(gradient, adam_state)
    leaves = map(jax.tree.leaves, (direction, their_direction, adam_direction))
    for (path, _), x, theirs_x, adam_x in zip(jax.tree_util.tree_leaves_with_path(params), *leaves, strict=True):
        if of_path(path):
            # Five steps multiply a small singular value, and what rounding leaves there, by up to 3.4445^5 = 485.
            assert relative_error(x, -theirs_x) < 1e-3, jax.tree_util.keystr(path)
        else:
            assert relative_error(x, adam_x) < 1e-5, jax.tree_util.keystr(path)


def update_cost(sizes: dict[str, int]) -> Region:
    """What the update of a network of two layers computes under shard_map."""
    learner = make_learner("llama", tuple(sizes.items()))
    batch = {name: jax.ShapeDtypeStruct(value.shape, value.dtype) for name, value in BATCH.items()}
    function, arguments, keywords = learner.programs(batch)["update"]
    (program,) = per_device_programs(function.trace(*arguments, **keywords).jaxpr)
    return estimate_cost(program, CostAssumptions(sizes))


def test_the_planner_counts_the_products_of_newton_schulz():
    """Five times two products with the smaller side squared and one of it cubed, for every matrix."""
    definition = ModelDef(NETWORKS["llama"])
    weights = jax.tree.leaves(definition.shapes()[0])
    axes = jax.tree.leaves(definition.matrix_axes(), is_leaf=lambda leaf: leaf is None)
    flops = 0
    for weight, of in zip(weights, axes, strict=True):
        if of is not None:
            small_side, large_side = sorted((weight.shape[of.in_axis], weight.shape[of.out_axis]))
            matrices = weight.size // (small_side * large_side)
            flops += matrices * 5 * 2 * (2 * small_side**2 * large_side + small_side**3)
    assert update_cost({}).flops() == flops
    # On two devices each computes half of the matrices, or half and one of padding.
    assert flops / 2 <= update_cost({"data": 2}).flops() <= 0.7 * flops
    assert list(update_cost({"data": 2}).bytes_sent({"data": 2})) == ["data"]


def test_matrices_have_one_moment_and_other_weights_two():
    config = NETWORKS["llama"]
    learner = make_learner("llama")
    shapes = jax.tree.leaves(learner.abstract_state().optimizer)
    axes = jax.tree.leaves(ModelDef(config).matrix_axes())
    assert all(isinstance(of, MatrixAxes) for of in axes)
    params = jax.tree.leaves(ModelDef(config).shapes()[0])
    assert len([leaf for leaf in shapes if leaf.ndim]) == 2 * len(params) - len(axes)


def test_a_checkpoint_has_the_whole_state(tmp_path):
    learner = make_learner("llama")
    state = learner.init_state(*random_weights(NETWORKS["llama"]))
    state, _ = learner.step(state, [BATCH], NORMALISER)
    with CheckpointStore(tmp_path) as store:
        save_state(store, state)
        restored = restore_state(store, learner.init_state(*random_weights(NETWORKS["llama"], seed=1)))
    assert restored is not None
    expected, _ = learner.step(state, [BATCH], NORMALISER)
    actual, _ = learner.step(restored[0], [BATCH], NORMALISER)
    chex.assert_trees_all_equal(jax.tree.map(np.asarray, actual), jax.tree.map(np.asarray, expected))
