"""The demo's mix of documents, copy curriculum and exercises: its batches are fixed to the bit."""

import hashlib

import numpy as np
import pytest

from composer_jax.data.pipeline import pretraining_batches
from composer_jax.data.token_source import DocumentSource, TraceSource
from composer_jax.demo.copying import CopyCurriculum

S, B, EOD = 32, 4, 2


def documents():
    rng = np.random.default_rng(0)
    lengths = [1, S, S - 1, 2 * S, 3 * S + 1, *rng.integers(2, 4 * S, 25)]
    return np.split(np.arange(100, 100 + sum(lengths)), np.cumsum(lengths)[:-1])


def traces():
    rng = np.random.default_rng(0)
    tokens = np.split(np.arange(10_100, 10_100 + 20 * S), 20)
    cut = [(t[: rng.integers(2, S + 1)], rng.random(S) < 0.5) for t in tokens]
    return [(t, m[: len(t)]) for t, m in cut]


def digest_of_six_batches(weights, seed) -> str:
    sources = DocumentSource(documents(), EOD), CopyCurriculum(vocab_size=100), TraceSource(traces())
    named = zip(("documents", "copying", "exercises"), zip(sources, weights, strict=True), strict=True)
    stream = pretraining_batches(dict(named), seq_len=S, batch_size=B, seed=seed)
    digest = hashlib.sha256()
    for _ in range(6):
        batch = next(stream)
        for array in (batch.tokens, batch.positions, batch.segments, batch.weights):
            digest.update(str((array.dtype, array.shape)).encode() + array.tobytes())
    return digest.hexdigest()[:16]


@pytest.mark.parametrize(
    ("weights", "seed", "digest"),
    [
        ((1.0, 0.0, 0.0), 0, "9e7907e4ef76696b"),
        ((0.8, 0.2, 0.0), 0, "abbe33cd409494cb"),
        ((0.4, 0.2, 0.4), 0, "8834047594bdcc5f"),
        ((0.6, 0.0, 0.4), 5, "2b421f7b4cd46eba"),
        ((0.0, 1.0, 0.0), 0, "ecd8577e0c185f92"),
    ],
)
def test_batches_are_those_recorded_before_sources_could_be_named(weights, seed, digest):
    assert digest_of_six_batches(weights, seed) == digest
