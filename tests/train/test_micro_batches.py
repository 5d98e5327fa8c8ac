"""A step over the micro-batches of a batch is the step over the batch."""

import dataclasses

import chex
import jax
import numpy as np
import pytest

from composer_jax.models.model_def import ModelDef
from composer_jax.parallel.mesh import make_mesh
from composer_jax.train.learner import Learner
from composer_jax.train.losses import LanguageLoss, LanguageLossConfig
from composer_jax.train.optimizer import OptimizerConfig, make_optimizer
from tests.models.small import random_weights
from tests.train.test_loop import CONFIG, PLAN, STEPS, new_stream, run


def test_micro_batches_are_one_batch(tmp_path):
    """Weights, moments, router bias and metrics; a resumed run has the bits of one that was not interrupted."""
    # With Adam's usual eps the rounding of a gradient near zero would decide the sign of a whole step.
    weights = random_weights(CONFIG)
    optimizer = make_optimizer(OptimizerConfig(peak=0.01, warmup=2, eps=0.1), STEPS)
    loss = LanguageLoss(LanguageLossConfig(balance_weight=0.1))
    learner = Learner(ModelDef(CONFIG), optimizer, loss, make_mesh(jax.devices()[:1]), router_bias_update_rate=0.01)
    plan = dataclasses.replace(PLAN, steps=3)
    stream = lambda: new_stream(batch_size=4)  # noqa: E731
    whole, whole_rows, _ = run(tmp_path / "whole", learner, weights, stream(), plan=plan)
    plan = dataclasses.replace(plan, accumulate=4)
    parts, parts_rows, following = run(tmp_path / "parts", learner, weights, stream(), plan=plan)
    chex.assert_trees_all_close(parts.params, whole.params, atol=1e-6, rtol=1e-6)
    chex.assert_trees_all_close(parts.optimizer, whole.optimizer, atol=1e-6, rtol=1e-6)
    chex.assert_trees_all_equal(parts.router_bias, whole.router_bias)
    for a, b in zip(parts_rows, whole_rows, strict=True):
        assert a == pytest.approx(b, rel=1e-5)
    first = dataclasses.replace(plan, steps=2)
    run(tmp_path / "resumed", learner, weights, stream(), plan=first)
    resumed = run(tmp_path / "resumed", learner, weights, stream(), plan=plan)
    chex.assert_trees_all_equal(resumed[0], parts)
    np.testing.assert_array_equal(resumed[2].tokens, following.tokens)
