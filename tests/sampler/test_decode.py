"""Drawing one token: the distribution, and what the random choice depends on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.sampler.decode import sample_token

LOGITS = jnp.asarray(np.random.default_rng(0).standard_normal(12) * 1.5, jnp.float32)
PROBABILITIES = np.exp(np.asarray(LOGITS, np.float64)) / np.exp(np.asarray(LOGITS, np.float64)).sum()
draw = jax.jit(sample_token)


def assert_distributed_as(tokens, probabilities):
    """Pearson's chi-square, five standard deviations: a fixed seed, so it passes always or never."""
    counts = np.bincount(tokens, minlength=len(probabilities))
    expected = probabilities * len(tokens)
    assert expected.min() > 5
    degrees = len(probabilities) - 1
    assert ((counts - expected) ** 2 / expected).sum() < degrees + 5 * np.sqrt(2 * degrees)


N = 20_000


@pytest.mark.parametrize(
    ("seeds", "positions"),
    [
        (np.arange(N), np.zeros(N)),
        (np.full(N, 7), np.arange(N)),
        (np.random.default_rng(1).integers(0, 2**32, N), np.full(N, 100)),
    ],
    ids=["over_seeds", "over_positions", "over_hashed_seeds"],
)
def test_tokens_are_distributed_as_the_softmax(seeds, positions):
    tokens, logprobs = draw(
        jnp.broadcast_to(LOGITS, (N, 12)), jnp.asarray(seeds, jnp.uint32), jnp.asarray(positions, jnp.int32)
    )
    assert_distributed_as(np.asarray(tokens), PROBABILITIES)
    np.testing.assert_allclose(logprobs, np.log(PROBABILITIES)[tokens], atol=1e-5)


def test_neighbouring_positions_draw_independently():
    seeds, logits = jnp.arange(N, dtype=jnp.uint32), jnp.broadcast_to(jnp.log(jnp.array([0.3, 0.7])), (N, 2))
    first = np.asarray(draw(logits, seeds, jnp.full(N, 4, jnp.int32))[0])
    second = np.asarray(draw(logits, seeds, jnp.full(N, 5, jnp.int32))[0])
    pairs = np.array([0.09, 0.21, 0.21, 0.49])
    assert_distributed_as(2 * first + second, pairs)


def test_the_choice_depends_on_seed_and_position_alone():
    rng = np.random.default_rng(2)
    logits = jnp.asarray(rng.standard_normal((6, 12)), jnp.float32)
    seeds, positions = jnp.asarray(rng.integers(0, 2**32, 6), jnp.uint32), jnp.arange(6)
    together = draw(logits, seeds, positions)
    order = jnp.array([3, 1, 5, 0, 2, 4])
    shuffled = draw(logits[order], seeds[order], positions[order])
    for a, b in zip(together, shuffled, strict=True):
        np.testing.assert_array_equal(np.asarray(a)[order], b)


@pytest.mark.parametrize("position", [0, 1, 2, 11])
def test_a_certain_token_is_always_drawn(position):
    """Also at the ends of the vocabulary, where the cumulative sum is rounded most."""
    logits = jnp.full((2000, 12), -200.0).at[:, position].set(50.0)
    tokens, logprobs = draw(logits, jnp.arange(2000, dtype=jnp.uint32), jnp.zeros(2000, jnp.int32))
    np.testing.assert_array_equal(tokens, position)
    np.testing.assert_allclose(logprobs, 0, atol=1e-6)


def test_an_impossible_token_is_never_drawn():
    logits = jnp.broadcast_to(jnp.array([-jnp.inf, 0.0, -jnp.inf, 0.0, -jnp.inf]), (N, 5))
    tokens, _ = draw(logits, jnp.arange(N, dtype=jnp.uint32), jnp.zeros(N, jnp.int32))
    assert set(np.unique(tokens)) == {1, 3}


def test_arrays_of_another_shape_or_dtype_are_refused():
    logits, seeds, positions = jnp.zeros((3, 12)), jnp.zeros(3, jnp.uint32), jnp.zeros(3, jnp.int32)
    with pytest.raises(AssertionError, match=r"seed_B is int32\[3\], not of dtype uint32"):
        sample_token(logits, positions, positions)
    with pytest.raises(AssertionError, match=r"position_B is int32\[2\], not \[B\] with B=3"):
        sample_token(logits, seeds, positions[:2])
