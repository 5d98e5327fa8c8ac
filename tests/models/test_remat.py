"""Rematerialisation and chunks change memory, not results."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from composer_jax.models.config import CHECKPOINT_NAMES
from composer_jax.models.model_def import ModelDef
from composer_jax.train.losses import LanguageLoss
from tests.models.small import random_weights, relative_error, rows, small

CONFIG = small(n_layers=2, n_mtp_modules=0, dispatch="ring")
WEIGHTS = random_weights(CONFIG)


def gradient(**changes):
    definition = ModelDef(dataclasses.replace(CONFIG, **changes))
    batch = rows([[range(1, 12), range(20, 29)], [range(30, 46)]], 20)
    batch["weights"] = (batch["positions"] > 0).astype(np.float32)
    objective = lambda params: LanguageLoss()(definition.bind(params, WEIGHTS[1]), batch, jnp.float32(3)).loss  # noqa: E731
    return jax.jit(jax.value_and_grad(objective))(WEIGHTS[0])


@pytest.fixture(scope="module")
def expected():
    return gradient()


@pytest.mark.parametrize(
    "changes",
    [
        {"remat": True, "remat_saves": CHECKPOINT_NAMES},
        {"expert_chunk": 7, "early_expert_gather": True},
        {"expert_chunk": 8, "remat": True, "head_chunk": 16, "heads_at_once": 1},
    ],
    ids=str,
)
def test_the_gradient_is_the_same(expected, changes):
    for actual, reference in zip(jax.tree.leaves(gradient(**changes)), jax.tree.leaves(expected), strict=True):
        assert relative_error(actual, reference) < 1e-5


def kernels(jaxpr, actual: collections.Counter) -> collections.Counter:
    """Returns how often each Pallas kernel occurs in a program."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            actual[str(equation.params["name"])] += 1
        for inner in jaxprs_in_params(equation.params):
            kernels(inner, actual)
    return actual


@pytest.mark.parametrize(("saves", "times"), [((), 2), (("attention",), 1)], ids=str)
def test_saved_attention_is_computed_once(saves, times):
    config = small(n_layers=2, n_dense_layers=0, n_mtp_modules=0, remat=True, remat_saves=saves, max_context=256)
    definition = ModelDef(config)
    batch = {name: np.ones((1, 128), np.int32) for name in ("tokens", "positions", "segments")}
    batch["weights"] = np.ones((1, 128), np.float32)

    def objective(params, bias):
        return LanguageLoss()(definition.bind(params, bias), batch, jnp.float32(1)).loss

    actual = kernels(jax.make_jaxpr(jax.grad(objective))(*definition.shapes()).jaxpr, collections.Counter())
    forward = [count for name, count in actual.items() if "fwd" in name]
    assert forward == [times]
    assert any("dkv" in name for name in actual)
