"""Published trust regions and the mask of sequences, against the formulas of their papers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.errors import UserError
from composer_jax.parallel.context import zigzag_order
from composer_jax.parallel.mesh import BATCH_SPEC, make_mesh
from composer_jax.train.losses import PolicyLoss, PolicyLossConfig
from composer_jax.train.sequence_sums import sequence_sums
from composer_jax.train.trust_region import PUBLISHED_REGIONS, log_ratio_widths
from tests.train.table_decoder import TableDecoder, log_softmax

RATIOS = np.exp(np.linspace(-1.5, 1.5, 61))
W = 4


def weights(config: PolicyLossConfig, sign: float) -> np.ndarray:
    """What log p of tokens with RATIOS is multiplied by, over their advantage, from the gradient of the loss."""
    n = len(RATIOS)
    states = jnp.asarray(np.random.default_rng(0).standard_normal((n, 2, W)), jnp.float32)
    logprobs = log_softmax(states)[:, 0, 0]
    second = np.tile(np.array([[0, 1]], np.float32), (n, 1))
    batch = {
        "tokens": np.zeros((n, 2), np.int32),
        "positions": second.astype(np.int32),
        "segments": np.ones((n, 2), np.int32),
        "weights": second,
        "advantages": sign * second,
        "sampler_logprobs": (second * (logprobs - np.log(RATIOS))[:, None]).astype(np.float32),
    }
    gradient = jax.grad(lambda s: PolicyLoss(config)(TableDecoder(s), batch, jnp.float32(1)).loss)(states)
    return -np.asarray(gradient)[:, 0, 0] / (1 - np.exp(logprobs)) / sign


def ppo(low, high):
    """d/dr of min(r A, clip(r, 1 - low, 1 + high) A) over A, times r, since dr = r d log p."""
    return lambda r, a: np.where((r > 1 + high) if a > 0 else (r < 1 - low), 0, r)


PAPERS = {
    "ppo": ppo(0.2, 0.2),
    "dapo": ppo(0.2, 0.28),
    "dual_clip": lambda r, a: np.where((a < 0) & (r > 3), 0, ppo(0.2, 0.2)(r, a)),
    "glm5": lambda r, _: r * ((1 - 0.2 < r) & (r < 1 + 0.28)),
    "icepop": lambda r, _: r * ((1 / 2 < r) & (r < 2)),
    "truncated": lambda r, _: np.minimum(r, 2),
    "cispo": lambda r, _: np.minimum(r, 1.28),
}


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("name", PUBLISHED_REGIONS)
def test_a_published_region_weighs_tokens_as_its_paper_says(name, sign):
    actual = weights(PolicyLossConfig(**PUBLISHED_REGIONS[name]), sign)
    np.testing.assert_allclose(actual, PAPERS[name](RATIOS, sign), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_k2_5s_mask_bounds_the_log_ratio(sign):
    actual = weights(PolicyLossConfig(**log_ratio_widths(-0.52, 0.33)), sign)
    inside = (np.log(RATIOS) > -0.52) & (np.log(RATIOS) < 0.33)
    np.testing.assert_allclose(actual, RATIOS * inside, rtol=1e-4, atol=1e-6)
    assert 0 < inside.sum() < len(inside)


def test_log_ratios_that_exclude_an_unmoved_token_are_refused():
    with pytest.raises(UserError, match=r"log-ratios from 0.1 to 0.3 exclude 0"):
        log_ratio_widths(0.1, 0.3)


# -- the mask of sequences (DeepSeek-V3.2) ------------------------------------------------------------------------

LENGTHS = (4, 3, 5)
"""Of the documents of one packed row."""


def drifted_row(drifts, signs):
    """One row whose documents have these means of log(p_sampler / p) over their sampled tokens, all but the first."""
    rng, n = np.random.default_rng(1), sum(LENGTHS)
    states = jnp.asarray(rng.standard_normal((1, n, W)), jnp.float32)
    tokens = rng.integers(0, W, (1, n)).astype(np.int32)
    documents = []
    for number, (length, drift, sign) in enumerate(zip(LENGTHS, drifts, signs, strict=True), start=1):
        noise = rng.standard_normal(length - 1)
        sampled = np.arange(length) > 0
        documents.append(
            {
                "segments": np.full(length, number, np.int32),
                "positions": np.arange(length, dtype=np.int32),
                "weights": sampled.astype(np.float32),
                "advantages": (sign * sampled).astype(np.float32),
                "drift": np.concatenate([[0], drift + noise - noise.mean()]),
            }
        )
    batch = {name: np.concatenate([d[name] for d in documents])[None] for name in documents[0]}
    logprobs = np.zeros((1, n))
    logprobs[0, 1:] = log_softmax(states)[0, np.arange(n - 1), tokens[0, 1:]]
    sampler = (batch["weights"] * (logprobs + batch.pop("drift"))).astype(np.float32)
    return states, batch | {"tokens": tokens, "sampler_logprobs": sampler}


def masked_documents(drifts, signs, delta) -> list[bool]:
    """Which documents of the row have no gradient, with a trust region that holds all tokens."""
    states, batch = drifted_row(drifts, signs)
    loss = PolicyLoss(PolicyLossConfig(ratio_low=1.0, ratio_high=1e9, dual_clip=np.inf, sequence_mask=delta))
    gradient = jax.grad(lambda s: loss(TableDecoder(s), batch, jnp.float32(1)).loss)(states)
    has_gradient = np.abs(np.asarray(gradient)).max(-1)[0, :-1] > 0
    segments, sampled = batch["segments"][0, 1:], batch["weights"][0, 1:] > 0
    by_document = [set(has_gradient[(segments == number) & sampled].tolist()) for number in (1, 2, 3)]
    assert all(len(values) == 1 for values in by_document), "a document is masked as a whole"
    masked = [values == {False} for values in by_document]
    if delta:
        sums = loss(TableDecoder(states), batch, jnp.float32(1)).sums
        assert float(sums["sequence_masked"]) == sum(n - 1 for n, m in zip(LENGTHS, masked, strict=True) if m)
    return masked


@pytest.mark.parametrize(
    ("drifts", "signs", "delta", "expected"),
    [
        ((0.3, 0.1, 0.3), (-1, -1, -1), 0.2, [True, False, True]),
        ((0.3, 0.3, 0.3), (1, -1, 1), 0.2, [False, True, False]),
        ((-0.3, -0.3, 0.21), (-1, -1, -1), 0.2, [False, False, True]),
        ((0.3, 0.1, 0.3), (-1, -1, -1), 0.0, [False, False, False]),
    ],
    ids=["by drift", "by sign", "by direction", "off"],
)
def test_drifted_sequences_of_negative_advantage_are_masked(drifts, signs, delta, expected):
    assert masked_documents(drifts, signs, delta) == expected


@pytest.mark.parametrize("sizes", [{}, {"data": 2, "context": 4}, {"expert": 2, "context": 2, "tensor": 2}], ids=str)
def test_sums_over_documents_on_every_mesh(sizes):
    """A document may lie on several devices, and equal numbers in two rows are two documents."""
    rng = np.random.default_rng(2)
    values = rng.standard_normal((4, 16)).astype(np.float32)
    segments = np.sort(rng.integers(0, 5, (4, 16)), axis=1).astype(np.int32)
    expected = np.array([[v[s == number].sum() for number in s] for v, s in zip(values, segments, strict=True)])
    mesh = make_mesh(jax.devices()[: int(np.prod(list(sizes.values())))], **sizes)
    order = zigzag_order(16, mesh.shape["context"])
    summed = jax.jit(jax.shard_map(sequence_sums, mesh=mesh, in_specs=(BATCH_SPEC, BATCH_SPEC), out_specs=BATCH_SPEC))(
        values[:, order], segments[:, order]
    )
    np.testing.assert_allclose(summed, expected[:, order], atol=1e-5)


def test_a_negative_delta_is_refused():
    with pytest.raises(UserError, match=r"loss.sequence_mask=-0.1 is negative"):
        PolicyLossConfig(sequence_mask=-0.1)
