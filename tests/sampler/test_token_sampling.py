"""Drawing one token: the distribution, and what the random choice depends on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.sampler.token_sampling import RowParams, process_logits, sample_token

LOGITS = jnp.asarray(np.random.default_rng(0).standard_normal(12) * 1.5, jnp.float32)
PROBABILITIES = np.exp(np.asarray(LOGITS, np.float64)) / np.exp(np.asarray(LOGITS, np.float64)).sum()
draw = jax.jit(sample_token)
process = jax.jit(process_logits)


def row_params(*rows: tuple) -> RowParams:
    """rows: (temperature, top_p, top_k) of each, and min_p where it is not 0."""
    temperature, top_p, top_k, min_p = zip(*((*row, 0.0)[:4] for row in rows), strict=True)
    return RowParams(
        np.float32(temperature), np.float32(top_p), np.int32(top_k), np.float32(min_p), np.zeros(len(rows), np.int32)
    )


def processed_by_numpy(logits, temperature, top_p, top_k, min_p=0.0):
    """Probabilities in float64 by sorting, written from the definition: top_k, then the smallest set of mass top_p,
    then what is as likely as min_p times the likeliest."""
    logits = np.asarray(logits, np.float64) / temperature
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if 0 < top_k < len(logits):
        order = [i for i in order if logits[i] >= logits[order[top_k - 1]]]
    weights = np.exp(logits - logits.max())
    total, kept, mass = weights[order].sum(), [], 0.0
    for i in order:
        if kept and mass >= top_p:
            break
        kept.append(i)
        mass += weights[i] / total
    kept = [i for i in kept if weights[i] >= min_p * weights.max()]
    probabilities = np.zeros(len(logits))
    probabilities[kept] = weights[kept] / weights[kept].sum()
    return probabilities


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
    tokens, logprobs, raw_logprobs, _ = draw(
        jnp.broadcast_to(LOGITS, (N, 12)), jnp.asarray(seeds, jnp.uint32), jnp.asarray(positions, jnp.int32)
    )
    np.testing.assert_array_equal(logprobs, raw_logprobs)
    assert_distributed_as(np.asarray(tokens), PROBABILITIES)
    np.testing.assert_allclose(logprobs, np.log(PROBABILITIES)[tokens], atol=1e-5)


PARAMS = [(0.5, 1.0, 0), (2.0, 1.0, 0), (1.0, 0.8, 0), (1.0, 1.0, 4), (0.7, 0.9, 5), (1.6, 0.35, 9), (1.0, 0.5, 0)]
PARAMS += [(1.0, 1.0, 0, 0.2), (1.5, 0.9, 8, 0.1)]


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_tokens_are_distributed_as_temperature_top_p_and_top_k_say(params):
    expected = processed_by_numpy(LOGITS, *params)
    seeds = jnp.arange(N, dtype=jnp.uint32)
    tokens, logprobs, raw_logprobs, _ = draw(
        jnp.broadcast_to(LOGITS, (N, 12)), seeds, jnp.zeros(N, jnp.int32), row_params(*[params] * N)
    )
    np.testing.assert_allclose(raw_logprobs, np.log(PROBABILITIES)[tokens], atol=1e-5)
    kept = np.flatnonzero(expected)
    assert set(np.unique(tokens)) == set(kept)
    assert_distributed_as(np.searchsorted(kept, tokens), expected[kept])
    np.testing.assert_allclose(logprobs, np.log(expected[np.asarray(tokens)]), atol=1e-5)


@pytest.mark.parametrize("vocabulary", [2, 12, 301])
def test_the_kept_tokens_are_those_of_numpy(vocabulary):
    """Also with many ties: the logits are rounded to halves."""
    rng = np.random.default_rng(vocabulary)
    logits = np.float32(np.round(4 * rng.standard_normal((64, vocabulary))) / 2)
    params = [
        (
            float(rng.choice([0.3, 1.0, 2.5])),
            float(rng.choice([1e-60, 0.2, 0.6, 0.93, 1.0])),
            int(rng.integers(0, vocabulary + 3)),
            float(rng.choice([0.0, 0.05, 0.4])),
        )
        for _ in logits
    ]
    actual = np.asarray(jax.nn.softmax(process(logits, row_params(*params))), np.float64)
    for row, p in enumerate(params):
        np.testing.assert_allclose(actual[row], processed_by_numpy(logits[row], *p), atol=2e-6, err_msg=str(p))


def test_greedy_takes_the_likeliest_token_with_its_log_p_at_temperature_1():
    rng = np.random.default_rng(5)
    logits = jnp.asarray(rng.standard_normal((40, 12)), jnp.float32).at[0].set(0.0)
    seeds, positions = jnp.arange(40, dtype=jnp.uint32), jnp.zeros(40, jnp.int32)
    tokens, logprobs, *_ = draw(logits, seeds, positions, row_params(*[(0.0, 0.1, 2, 0.5)] * 40))
    np.testing.assert_array_equal(tokens, np.argmax(logits, -1))
    np.testing.assert_array_equal(logprobs, np.asarray(jax.nn.log_softmax(logits)).max(-1))


@pytest.mark.parametrize("temperature", [1e-4, 1e4])
def test_extreme_temperatures_overflow_nothing(temperature):
    logits = jnp.array([[3000.0, -2000.0, 2999.0]] * 50)
    tokens, logprobs, *_ = draw(
        logits, jnp.arange(50, dtype=jnp.uint32), jnp.zeros(50, jnp.int32), row_params(*[(temperature, 0.99, 2)] * 50)
    )
    assert np.isfinite(logprobs).all()
    assert set(np.unique(tokens)) == ({0} if temperature < 1 else {0, 2})


def test_rows_do_not_depend_on_the_parameters_of_others():
    """A row at temperature 1 gives the bits of a call without parameters, whatever the other rows ask for."""
    rng = np.random.default_rng(3)
    logits = jnp.asarray(rng.standard_normal((4, 301)), jnp.float32)
    seeds, positions = jnp.arange(4, dtype=jnp.uint32), jnp.arange(4)
    plain = draw(logits, seeds, positions)
    alone = draw(logits, seeds, positions, row_params(*[(1.0, 1.0, 0)] * 4))
    mixed = draw(logits, seeds, positions, row_params((1.0, 1.0, 0), (0.4, 0.5, 7), (1.0, 1.0, 0), (0.0, 1.0, 0)))
    for expected, one, other in zip(plain[:3], alone[:3], mixed[:3], strict=True):
        np.testing.assert_array_equal(one, expected)
        np.testing.assert_array_equal(np.asarray(other)[[0, 2]], np.asarray(expected)[[0, 2]])


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
    for a, b in zip(together[:3], shuffled[:3], strict=True):
        np.testing.assert_array_equal(np.asarray(a)[order], b)


@pytest.mark.parametrize("position", [0, 1, 2, 11])
def test_a_certain_token_is_always_drawn(position):
    """Also at the ends of the vocabulary, where the cumulative sum is rounded most."""
    logits = jnp.full((2000, 12), -200.0).at[:, position].set(50.0)
    tokens, logprobs, *_ = draw(logits, jnp.arange(2000, dtype=jnp.uint32), jnp.zeros(2000, jnp.int32))
    np.testing.assert_array_equal(tokens, position)
    np.testing.assert_allclose(logprobs, 0, atol=1e-6)


def test_an_impossible_token_is_never_drawn():
    logits = jnp.broadcast_to(jnp.array([-jnp.inf, 0.0, -jnp.inf, 0.0, -jnp.inf]), (N, 5))
    tokens = draw(logits, jnp.arange(N, dtype=jnp.uint32), jnp.zeros(N, jnp.int32)).token_B
    assert set(np.unique(tokens)) == {1, 3}


def test_the_tail_of_a_large_vocabulary_is_drawn():
    """One token has 99 %, and 20,000 after it share the rest; a single cumulative sum would skip most of them."""
    logits = jnp.full(20_001, jnp.log(0.01 / 20_000)).at[0].set(jnp.log(0.99))
    positions = jnp.arange(500, dtype=jnp.int32)
    drawn = np.concatenate(
        [
            draw(jnp.broadcast_to(logits, (500, 20_001)), jnp.full(500, s, jnp.uint32), positions).token_B
            for s in range(40)
        ]
    )
    tail = drawn[drawn > 0]
    assert 140 < len(tail) < 265, "200 are expected"
    assert len(np.unique(tail % 64)) > 50 and len(np.unique(tail)) > len(tail) - 8, "few are drawn twice"


def test_arrays_of_another_shape_or_dtype_are_refused():
    logits, seeds, positions = jnp.zeros((3, 12)), jnp.zeros(3, jnp.uint32), jnp.zeros(3, jnp.int32)
    with pytest.raises(AssertionError, match=r"seed_B is int32\[3\], not of dtype uint32"):
        sample_token(logits, positions, positions)
    with pytest.raises(AssertionError, match=r"position_B is int32\[2\], not \[B\] with B=3"):
        sample_token(logits, seeds, positions[:2])
