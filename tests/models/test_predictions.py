"""Predictions on one device and with the vocabulary sharded over several."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from composer_jax.models.predictions import Predictions
from composer_jax.parallel.mesh import make_mesh
from tests.models.small import relative_error

RNG = np.random.default_rng(0)
TEACHER, STUDENT = (5 * RNG.standard_normal((6, 32)).astype(np.float32) for _ in range(2))
TOKENS = RNG.integers(0, 32, 6)
WEIGHT = RNG.standard_normal((3, 6)).astype(np.float32)


def tell(logits, student):
    main = Predictions(logits)
    return jnp.stack([main.logprob(TOKENS), main.entropy(), main.divergence(Predictions(student))])


def plainly(logits, student):
    p, q = jax.nn.log_softmax(logits), jax.nn.log_softmax(student)
    teacher = jax.lax.stop_gradient(p)
    return jnp.stack([p[np.arange(6), TOKENS], -(jnp.exp(p) * p).sum(-1), (jnp.exp(teacher) * (teacher - q)).sum(-1)])


@pytest.mark.parametrize("tensor", [1, 2, 8])
def test_values_and_gradients_are_those_of_a_plain_softmax(tensor):
    mesh = make_mesh(jax.devices()[:tensor], tensor=tensor)
    words = PartitionSpec(None, "tensor") if tensor > 1 else PartitionSpec()

    def program(function, logits, student):
        def objective(logits, student):
            actual = function(logits, student)
            return (actual * WEIGHT).sum(), actual

        return jax.grad(objective, argnums=(0, 1), has_aux=True)(logits, student)

    mapped = jax.shard_map(
        lambda *logits: program(tell, *logits),
        mesh=mesh,
        in_specs=(words, words),
        out_specs=((words, words), PartitionSpec()),
    )
    (found_gradient, actual), (wanted_gradient, expected) = (
        jax.jit(f)(TEACHER, STUDENT) for f in (mapped, lambda *logits: program(plainly, *logits))
    )
    assert relative_error(actual, expected) < 1e-5
    for f, w in zip(found_gradient, wanted_gradient, strict=True):
        assert relative_error(f, w) < 1e-5
