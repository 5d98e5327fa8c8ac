"""The optimizer against plain optax, and the schedules against their formulas."""

import math
from typing import Any, NamedTuple, cast

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from composer_jax.errors import UserError
from composer_jax.models.model_def import ModelDef
from composer_jax.train.optimizer import Optimizer, OptimizerConfig, make_optimizer


class WithMask(NamedTuple):
    """Stands for a ModelDef whose parameters are those of a test."""

    mask: Any

    def decay_mask(self):
        return self.mask


def test_ten_steps_are_those_of_optax_adamw():
    config = OptimizerConfig(peak=0.01, warmup=3, b1=0.8, b2=0.9, eps=1e-6, weight_decay=0.3, clip=0.7)
    optimizer = make_optimizer(config, steps=10)
    rng = np.random.default_rng(0)
    params = {
        "layers": {"q": jnp.asarray(rng.standard_normal((2, 3, 4)), jnp.float32), "norm": {"scale": jnp.ones((2, 3))}},
        "head": jnp.asarray(rng.standard_normal((4, 5)), jnp.float32),
    }
    decay_mask = {"layers": {"q": True, "norm": {"scale": False}}, "head": True}
    transformation = optimizer.make_transformation(cast("ModelDef", WithMask(decay_mask)), None)
    plain = optax.chain(
        optax.clip_by_global_norm(0.7),
        optax.adamw(
            lambda step: jnp.array([optimizer.learning_rate(s) for s in range(10)])[step],
            b1=0.8,
            b2=0.9,
            eps=1e-6,
            weight_decay=0.3,
            mask=decay_mask,
        ),
    )
    ours, state, theirs, plain_state = params, transformation.init(params), params, plain.init(params)
    for step in range(10):
        # Some gradients are clipped and some are not.
        size = 0.01 if step % 2 else 2.0
        gradient = jax.tree.map(lambda w: jnp.asarray(size * rng.standard_normal(w.shape), jnp.float32), params)  # noqa: B023
        direction, state = transformation.update(gradient, state, ours)
        ours = jax.tree.map(lambda w, u: w - optimizer.learning_rate(step) * u, ours, direction)  # noqa: B023
        update, plain_state = plain.update(gradient, plain_state, theirs)
        theirs = optax.apply_updates(theirs, update)
    chex.assert_trees_all_close(ours, theirs, rtol=1e-5)


@pytest.mark.parametrize("decay", ["cosine", "linear", "constant"])
def test_schedules_have_their_closed_forms(decay):
    optimizer = make_optimizer(OptimizerConfig(peak=2.0, warmup=10, decay=decay, final=0.1), steps=50)
    for step in range(10):
        assert optimizer.learning_rate(step) == pytest.approx(2.0 * (step + 1) / 10)
    for step in range(10, 60):
        x = min(1.0, (step - 10) / 40)
        shape = {"cosine": (1 + math.cos(math.pi * x)) / 2, "linear": 1 - x, "constant": 1}[decay]
        assert optimizer.learning_rate(step) == pytest.approx(2.0 * (0.1 + 0.9 * shape))
    assert optimizer.learning_rate(10) == pytest.approx(2.0)
    assert (
        optimizer.learning_rate(50)
        == optimizer.learning_rate(1000)
        == pytest.approx(2.0 if decay == "constant" else 0.2)
    )


@pytest.mark.parametrize("decay", ["cosine", "linear"])
def test_a_stable_part_precedes_the_decay(decay):
    rate = make_optimizer(
        OptimizerConfig(peak=2.0, warmup=10, stable=0.75, decay=decay, final=0.5), steps=50
    ).learning_rate
    assert [rate(step) for step in range(9, 41)] == [2.0] * 32
    for step in range(40, 60):
        x = min(1.0, (step - 40) / 10)
        shape = {"cosine": (1 + math.cos(math.pi * x)) / 2, "linear": 1 - x}[decay]
        assert rate(step) == pytest.approx(2.0 * (0.5 + 0.5 * shape))


def test_without_a_warm_up_the_first_step_has_the_peak():
    assert make_optimizer(OptimizerConfig(peak=0.3), steps=5).learning_rate(0) == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "adamx"}, "optimizer.name='adamx' is unknown; use one of adamw, muon"),
        ({"decay": "sine"}, "optimizer.decay='sine' is unknown; use 'cosine', 'linear' or 'constant'"),
        ({"peak": -1.0}, "optimizer.peak=-1.0 is not positive"),
        ({"clip": 0.0}, "optimizer.clip=0.0 is not positive"),
        ({"warmup": -1}, "optimizer.warmup=-1 is negative"),
        ({"b2": 1.0}, "optimizer.b2=1.0 is not a decay rate"),
        ({"momentum": -0.1}, "optimizer.momentum=-0.1 is not a decay rate"),
        ({"moment_dtype": "int8"}, "optimizer.moment_dtype='int8' is unknown"),
        ({"stable": 1.0}, "optimizer.stable=1.0 leaves no steps for the decay"),
        ({"final": 1.5}, "optimizer.final=1.5 is not a fraction of the peak"),
    ],
    ids=str,
)
def test_a_value_out_of_range_is_refused_by_its_name(fields, message):
    with pytest.raises(UserError, match=message):
        OptimizerConfig(**fields)


def test_a_stage_without_steps_is_refused():
    with pytest.raises(UserError, match="steps=0"):
        make_optimizer(OptimizerConfig(), steps=0)


def sgd(config: OptimizerConfig, steps: int) -> Optimizer:
    return Optimizer(lambda definition, mesh: optax.identity(), lambda step: config.peak / steps)


def test_an_import_path_names_a_users_optimizer():
    optimizer = make_optimizer(OptimizerConfig(name=f"{__name__}:sgd", peak=3.0), steps=6)
    assert optimizer.learning_rate(0) == 0.5
    with pytest.raises(UserError, match="optimizer.name='tests.train.nothing:sgd' cannot be imported"):
        make_optimizer(OptimizerConfig(name="tests.train.nothing:sgd"), steps=6)
