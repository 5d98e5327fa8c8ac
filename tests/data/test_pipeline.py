"""The Grain pipelines: every document once per epoch, in an order fixed by the seed, and resumed to the bit."""

import json
import threading
import time
from collections import Counter
from functools import partial

import grain
import numpy as np
import pytest

from composer_jax.data.pipeline import heldout_batches, pretraining_batches, trace_batches
from composer_jax.data.token_source import DocumentSource, TraceSource
from composer_jax.errors import UserError

S, B, EOD = 32, 4, 2


def make_documents(count=30, seed=0):
    """Documents of unique tokens (from 100 up), some shorter than a row, some exactly one, some several."""
    rng = np.random.default_rng(seed)
    lengths = [1, S, S - 1, 2 * S, 3 * S + 1, *rng.integers(2, 4 * S, count - 5)]
    return np.split(np.arange(100, 100 + sum(lengths)), np.cumsum(lengths)[:-1])


def make_traces(count=20, seed=0):
    rng = np.random.default_rng(seed)
    tokens = np.split(np.arange(100, 100 + count * S), count)
    return [(t[: rng.integers(2, S + 1)], rng.random(S) < 0.5) for t in tokens]


def cut_masks(traces):
    return [(t, m[: len(t)]) for t, m in traces]


class NoiseSource:
    """A user's source: rows of random tokens below 100."""

    def rows(self, *, seq_len, batch_size, seed):
        def row(index):
            tokens = np.random.default_rng((seed, index)).integers(10, 100, seq_len).astype(np.int32)
            return {"tokens": tokens, "segments": np.ones(seq_len, np.int32), "weights": np.ones(seq_len, np.float32)}

        return grain.MapDataset.range(2**40).map(row).to_iter_dataset()

    def identity(self):
        return {}


class SlowNoise(NoiseSource):
    """The same rows, whose tokens the stream has to read."""

    def __init__(self):
        self.allowed, self.tokens = threading.Semaphore(0), []

    def rows(self, **arguments):
        return super().rows(**arguments).map(lambda row: row | {"tokens": partial(self.read, row["tokens"])})

    def read(self, tokens):
        self.allowed.acquire(timeout=20)
        self.tokens.append(tokens.tolist())
        if len(self.tokens) > 2 * B:
            raise OSError("the disk is gone")
        return tokens


def pretraining(documents=None, *, noise=0.0, exercises=0.0, **arguments):
    """Documents mixed with noise and with traces whose tokens start at 10,000; noise, exercises: their shares."""
    traces = [(t + 10_000, m) for t, m in cut_masks(make_traces())]
    sources = {
        "documents": (DocumentSource(make_documents() if documents is None else documents, EOD), 1 - noise - exercises),
        "noise": (NoiseSource(), noise),
        "exercises": (TraceSource(traces), exercises),
    }
    return pretraining_batches(sources, **(dict(seq_len=S, batch_size=B, seed=0) | arguments))


def traces(**arguments):
    return trace_batches(cut_masks(make_traces()), **(dict(seq_len=S, batch_size=B, seed=0) | arguments))


def segments_of(batch):
    for tokens, segments in zip(batch.tokens, batch.segments, strict=True):
        for segment in range(1, segments.max() + 1):
            yield tokens[segments == segment]


def flat(batch):
    return [f.tolist() for f in (batch.tokens, batch.positions, batch.segments, batch.weights)]


def test_an_epoch_is_every_token_once_and_no_segment_mixes_documents():
    documents = make_documents()
    owner = {int(t): i for i, d in enumerate(documents) for t in d}
    stream = pretraining(documents)
    total = sum(len(d) for d in documents)
    seen = Counter()
    for _ in range(total // (S * B)):
        batch = next(stream)
        assert (batch.segments > 0).all()  # concatenate and split leaves no padding
        for segment in segments_of(batch):
            body = segment[:-1] if segment[-1] == EOD else segment
            assert EOD not in body
            assert len({owner[int(t)] for t in body}) <= 1
            assert (np.diff(body) == 1).all()
            seen.update(body.tolist())
    # Almost one epoch has gone by: hardly anything twice, hardly anything missing.
    assert max(seen.values()) == 1
    assert len(seen) > 0.8 * total
    ends = sum(int((next(stream).tokens == EOD).sum()) for _ in range(50))
    assert ends > 20


def test_epochs_are_shuffled_differently_and_seeds_matter():
    documents = np.split(np.arange(100, 100 + 20 * S), 20)  # every document is one row, so rows are documents

    def order(seed, rows=40):
        stream = pretraining(documents, seed=seed)
        return [int(t) for _ in range(rows // B) for t in next(stream).tokens[:, 0]]

    first = order(0)
    assert first == order(0)
    assert sorted(first[:20]) == sorted(first[20:]) == [int(d[0]) for d in documents]
    assert first[:20] != first[20:]
    # Neighbouring seeds share no epoch, not even one apart.
    assert order(1)[:20] not in (first[:20], first[20:])


def test_weights_move_to_their_final_values():
    stream = pretraining(noise=0.0, final_weights={"noise": 1.0, "documents": 0.0}, steps=20)
    noise = [float(np.mean(next(stream).tokens.max(axis=1) < 100)) for _ in range(30)]
    assert np.mean(noise[:10]) == pytest.approx(0.25, abs=0.05)
    assert np.mean(noise[10:20]) == pytest.approx(0.75, abs=0.05)
    assert noise[20:] == [1.0] * 10


@pytest.mark.parametrize(
    "make",
    [
        pretraining,
        lambda: pretraining(noise=0.25, exercises=0.5),
        lambda: pretraining(exercises=0.5, final_weights={"noise": 1.0, "documents": 0.0}, steps=20),
        traces,
    ],
)
def test_resume_is_exact_at_every_place(make):
    stream = make()
    states, batches = [], []
    for _ in range(25):
        states.append(json.dumps(stream.get_state()))
        batches.append(flat(next(stream)))
    assert max(map(len, states)) < 900
    for place in range(0, 25, 2):
        resumed = make()
        resumed.set_state(json.loads(states[place]))
        assert json.dumps(resumed.get_state()) == states[place]
        assert [flat(next(resumed)) for _ in range(min(3, 25 - place))] == batches[place : place + 3]
    stream.set_state(json.loads(states[4]))  # back in time on the same stream
    assert flat(next(stream)) == batches[4]


def test_resume_on_other_data_is_refused():
    state = pretraining().get_state()
    other = pretraining_batches({"noise": (NoiseSource(), 1.0)}, seq_len=S, batch_size=B, seed=0)
    for stream, word in (
        (pretraining(make_documents(10)), "documents.count was 30 and is 10"),
        (pretraining(seed=3), "seed was 0"),
        (other, "is None"),
    ):
        with pytest.raises(UserError, match=word):
            stream.set_state(state)
    # Shares may change in the middle of a run.
    pretraining(noise=0.5).set_state(pretraining(noise=0.2).get_state())


def test_the_next_batch_is_read_in_the_background():
    slow = SlowNoise()
    stream, plain = (
        pretraining_batches({"noise": (source, 1.0)}, seq_len=S, batch_size=B, seed=0)
        for source in (slow, NoiseSource())
    )
    slow.allowed.release(B)
    first, second = next(plain), next(plain)
    assert flat(next(stream)) == flat(first)
    place = stream.get_state()
    slow.allowed.release(B)
    deadline = time.monotonic() + 20
    while len(slow.tokens) < 2 * B and time.monotonic() < deadline:
        time.sleep(0.001)
    assert sorted(slow.tokens[B:]) == sorted(second.tokens.tolist())
    # It does not move the position before it is asked for.
    assert stream.get_state() == place
    plain.set_state(json.loads(json.dumps(place)))
    assert flat(next(plain)) == flat(second) == flat(next(stream))
    place = stream.get_state()
    slow.allowed.release(B)
    for _ in range(2):
        with pytest.raises(OSError, match="the disk is gone"):
            next(stream)
    assert stream.get_state() == place


@pytest.mark.parametrize("fraction", [0.25, 1.0])
def test_exercises_have_their_share_and_only_the_answers_are_weighted(fraction):
    expected = {
        int(token) + 10_000: bool(m) for t, mask in cut_masks(make_traces()) for token, m in zip(t, mask, strict=True)
    }
    stream = pretraining(exercises=fraction)
    batches = [next(stream) for _ in range(15)]
    tokens, weights, positions = (
        np.concatenate([getattr(b, name) for b in batches]) for name in ("tokens", "weights", "positions")
    )
    rows = tokens.max(axis=1) >= 10_000
    assert rows.mean() == pytest.approx(fraction, abs=0.02)
    # Nothing comes before the first token of an exercise that could predict it.
    predicted = rows[:, None] & (positions > 0) & (tokens >= 10_000)
    for token, weight in zip(tokens[predicted], weights[predicted], strict=True):
        assert weight == expected[int(token)]
    assert weights[predicted].any()
    assert fraction == 1 or (weights[~rows] == 1).mean() > 0.9


def test_traces_are_packed_whole_and_only_masked_tokens_are_weighted():
    expected = {int(t[0]): (t, m) for t, m in cut_masks(make_traces())}
    stream = traces()
    seen = Counter()
    for _ in range(12):
        batch = next(stream)
        assert batch.tokens.shape == (B, S)
        for tokens, positions, segments, weights in zip(
            batch.tokens, batch.positions, batch.segments, batch.weights, strict=True
        ):
            for segment in range(1, segments.max() + 1):
                inside = segments == segment
                trace, mask = expected[int(tokens[inside][0])]
                seen[int(trace[0])] += 1
                assert tokens[inside].tolist() == trace.tolist()
                assert positions[inside].tolist() == list(range(len(trace)))
                assert weights[inside].tolist() == [0.0, *mask[1:].astype(float)]
            assert not weights[segments == 0].any()
    assert set(seen) == set(expected)
    assert max(seen.values()) - min(seen.values()) <= 1  # epoch after epoch, none more often than another


def test_long_traces_are_left_out_and_counted():
    long = [(np.arange(S + 1), np.ones(S + 1)), (np.arange(5), np.ones(5))]
    stream = trace_batches(long, seq_len=S, batch_size=B, seed=0)
    assert stream.dropped == 1
    assert next(stream).tokens.max() == 4
    with pytest.raises(UserError, match="no traces"):
        trace_batches(long[:1], seq_len=S, batch_size=B, seed=0)


def test_heldout_is_one_pass_over_everything():
    documents = make_documents()
    batches = list(heldout_batches(documents, seq_len=S, batch_size=B, eod=EOD))
    tokens = np.concatenate([b.tokens[b.segments > 0] for b in batches])
    assert sorted(tokens[tokens != EOD].tolist()) == np.concatenate(documents).tolist()
    # A document whose end falls on the end of a row has no room for its <|eod|>; every other one has it.
    assert (tokens == EOD).sum() == sum(len(d) % S != 0 for d in documents)
    again = list(heldout_batches(documents, seq_len=S, batch_size=B, eod=EOD))
    assert [flat(b) for b in again] == [flat(b) for b in batches]


def test_sources_that_cannot_be_mixed_are_refused():
    size = dict(seq_len=S, batch_size=B, seed=0)
    for make, reason in (
        (lambda: pretraining([]), "no documents"),
        (lambda: pretraining(exercises=-1), "exercises has weight=-1"),
        (lambda: pretraining_batches({"noise": (NoiseSource(), 0.0)}, **size), "has a weight above 0"),
        (lambda: pretraining(final_weights={"documents": 0.0}, steps=5), "at the end"),
        (lambda: pretraining(final_weights={"noise": -2}, steps=5), "noise has weight=-2"),
        (lambda: pretraining_batches({"traces": (TraceSource([]), 1.0)}, **size), "no traces"),
    ):
        with pytest.raises(UserError, match=reason):
            make()
    assert next(pretraining([], noise=1.0)).tokens.shape == (B, S)


def test_a_source_without_weight_keeps_the_seeds_of_the_others():
    sources = {"noise": (NoiseSource(), 0.5), "documents": (DocumentSource(make_documents(), EOD), 0.5)}
    whole = pretraining_batches(sources, seq_len=S, batch_size=B, seed=0)
    documents_only = pretraining_batches({**sources, "noise": (NoiseSource(), 0.0)}, seq_len=S, batch_size=B, seed=0)
    rows = np.concatenate([next(whole).tokens for _ in range(4)])
    documents = [row.tolist() for row in rows if row.max() >= 100]
    assert documents == next(documents_only).tokens.tolist() + next(documents_only).tokens.tolist()
