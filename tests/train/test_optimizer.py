"""The optimizer against plain optax, and the schedules against their formulas."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from composer_jax.errors import UserError
from composer_jax.train.optimizer import OptimizerConfig


def test_ten_steps_are_those_of_optax_adamw():
    config = OptimizerConfig(peak=0.01, steps=10, warmup=3, b1=0.8, b2=0.9, eps=1e-6, weight_decay=0.3, clip=0.7)
    rng = np.random.default_rng(0)
    params = {
        "layers": {"q": jnp.asarray(rng.standard_normal((2, 3, 4)), jnp.float32), "norm": {"scale": jnp.ones((2, 3))}},
        "head": jnp.asarray(rng.standard_normal((4, 5)), jnp.float32),
    }
    plain = optax.chain(
        optax.clip_by_global_norm(0.7),
        optax.adamw(
            lambda step: jnp.array([config.learning_rate(s) for s in range(10)])[step],
            b1=0.8,
            b2=0.9,
            eps=1e-6,
            weight_decay=0.3,
            mask={"layers": {"q": True, "norm": {"scale": False}}, "head": True},
        ),
    )
    ours, state, theirs, plain_state = params, config.transformation().init(params), params, plain.init(params)
    for step in range(10):
        # Some gradients are clipped and some are not.
        size = 0.01 if step % 2 else 2.0
        gradient = jax.tree.map(lambda w: jnp.asarray(size * rng.standard_normal(w.shape), jnp.float32), params)  # noqa: B023
        direction, state = config.transformation().update(gradient, state, ours)
        ours = jax.tree.map(lambda w, u: w - config.learning_rate(step) * u, ours, direction)  # noqa: B023
        update, plain_state = plain.update(gradient, plain_state, theirs)
        theirs = optax.apply_updates(theirs, update)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), ours, theirs)


def test_norms_do_not_decay_and_matrices_do():
    params = {"norm": {"scale": jnp.ones(3)}, "w": jnp.ones((3, 3))}
    transformation = OptimizerConfig(peak=1.0, steps=1, weight_decay=0.5).transformation()
    nothing = jax.tree.map(jnp.zeros_like, params)
    direction, _ = transformation.update(nothing, transformation.init(params), params)
    np.testing.assert_array_equal(direction["norm"]["scale"], 0)
    np.testing.assert_array_equal(direction["w"], 0.5)


@pytest.mark.parametrize("decay", ["cosine", "linear", "constant"])
def test_schedules_have_their_closed_forms(decay):
    config = OptimizerConfig(peak=2.0, steps=50, warmup=10, decay=decay, final=0.1)
    for step in range(10):
        assert config.learning_rate(step) == pytest.approx(2.0 * (step + 1) / 10)
    for step in range(10, 60):
        x = min(1.0, (step - 10) / 40)
        shape = {"cosine": (1 + math.cos(math.pi * x)) / 2, "linear": 1 - x, "constant": 1}[decay]
        assert config.learning_rate(step) == pytest.approx(2.0 * (0.1 + 0.9 * shape))
    assert config.learning_rate(10) == pytest.approx(2.0)
    assert config.learning_rate(50) == config.learning_rate(1000) == pytest.approx(2.0 if decay == "constant" else 0.2)


def test_without_a_warm_up_the_first_step_has_the_peak():
    assert OptimizerConfig(peak=0.3, steps=5).learning_rate(0) == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"decay": "sine"}, "decay='sine'"),
        ({"steps": 0}, "steps=0"),
        ({"peak": -1.0}, "peak=-1.0"),
    ],
    ids=str,
)
def test_impossible_settings_are_named(fields, named):
    with pytest.raises(UserError, match=named):
        OptimizerConfig(**{"peak": 1.0, "steps": 5} | fields)
