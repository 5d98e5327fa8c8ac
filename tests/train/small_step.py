"""What the tests of the learner share: a model whose sizes divide over eight devices, a batch, gradients, and a
walk over a traced program."""

from collections.abc import Iterator

import jax
import numpy as np

from composer_jax.train.optimizer import OptimizerConfig, make_optimizer
from tests.models.small import rows, small

CONFIG = small(n_layers=2, embedding_taps=1)
# A large eps keeps Adam's update a smooth function of the gradient: with a small one, the rounding of a gradient near
# zero would decide the sign of a whole step.
OPTIMIZER_CONFIG = OptimizerConfig(peak=0.05, eps=1e-3)
OPTIMIZER = make_optimizer(OPTIMIZER_CONFIG, steps=10)
BIAS_RATE = 0.01


def make_batch(seed: int, n: int = 16, length: int = 16) -> dict[str, np.ndarray]:
    """Rows with one to three documents and different amounts of padding."""
    rng = np.random.default_rng(seed)
    documents = [
        [rng.integers(0, 64, rng.integers(2, 6)).tolist() for _ in range(rng.integers(1, 4))] for _ in range(n)
    ]
    batch = rows(documents, length)
    weights = rng.random((n, length)) * (batch["positions"] > 0)
    return batch | {"weights": weights.astype(np.float32)}


def full_gradient(learner, weights, batch, normaliser):
    """The gradient of one batch over the whole mesh, as NumPy."""
    part = learner.gradient(*weights, batch, normaliser)
    gradient = jax.tree.map(np.asarray, part["gradient"])
    return jax.tree.map(lambda g: g.sum(0), gradient) if learner.host_reduction else gradient


def equations(jaxpr) -> Iterator:
    """All equations of a program, those of inner programs included."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda p: hasattr(p, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from equations(inner)
