"""Routes in a transcript: every row has those of its own tokens, whatever was sampled, branched and stored between."""

import copy

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_jax.agent.transcript import Transcript, TranscriptError
from composer_jax.frames import encode_frame
from tests.test_frames import read

L, K = 2, 3
TURN = st.tuples(
    st.lists(st.integers(0, 900), max_size=4),
    st.lists(st.integers(0, 900), min_size=1, max_size=4),
    st.booleans(),  # whether the engine returns routes
    st.none() | st.integers(0, 30),  # a node to branch from before it
)


def engine_routes(tokens, version=0) -> np.ndarray:
    """What an engine would say: ids that depend on token, place, layer, rank and version of the weights; int16."""
    token, place = np.asarray(tokens, np.int64), np.arange(len(tokens))
    base = (token * 31 + place * 7 + version * 101)[:, None, None]
    return ((base + np.arange(L)[:, None] * 5 + np.arange(K)) % 384).astype(np.int16)


def say(transcript, harness, sampled, routed=True, version=0):
    context = transcript.tokens + list(harness) + list(sampled)
    start = transcript.routes_known
    routes = engine_routes(context[:-1], version)[start:] if routed else None
    n = len(sampled)
    return transcript.append(
        "assistant", harness, sampled, [-0.5] * n, [version] * n, routes=routes, routes_start=start
    )


def grown(turns) -> Transcript:
    transcript = Transcript()
    transcript.append("prompt", [7, 8, 9])
    for harness, sampled, routed, branch in turns:
        if branch is not None:
            transcript.branch(transcript.nodes[branch % len(transcript.nodes)])
        say(transcript, harness, sampled, routed)
        transcript.append("tool", [1, 2])
    return transcript


@given(st.lists(TURN, min_size=1, max_size=8))
def test_every_token_of_a_row_has_its_own_routes_or_none(turns):
    transcript = grown(turns)
    for row in transcript.rows():
        if row.routes is None:
            assert not any(routed for _, _, routed, _ in turns)
            continue
        assert row.routes.dtype == np.int16 and row.routes.shape == (len(row.tokens), L, K)
        known = (row.routes >= 0).all((1, 2))
        np.testing.assert_array_equal(row.routes[known], engine_routes(row.tokens)[known])
        assert (row.routes[~known] == -1).all()


@given(st.lists(TURN, min_size=1, max_size=8))
def test_rows_of_an_engine_that_always_returns_routes_have_no_gap(turns):
    transcript = grown([(harness, sampled, True, branch) for harness, sampled, _, branch in turns])
    assert len(transcript.rows()) == len({path[-1].id for path in transcript.branches()})
    for row in transcript.rows():
        assert len(row.tokens_without_routes()) == 0
        np.testing.assert_array_equal(row.routes[:-1], engine_routes(row.tokens)[:-1])


@given(st.lists(TURN, min_size=1, max_size=8))
def test_a_frame_keeps_routes_bit_for_bit(turns):
    transcript = grown(turns)
    back = Transcript.from_frame(*read(encode_frame(*transcript.to_frame())))
    assert back == transcript
    for ours, theirs in zip(transcript.nodes, back.nodes, strict=True):
        a, b = transcript._routes[ours.id], back._routes[theirs.id]
        assert (a is None) == (b is None)
        if a is not None:
            assert a.dtype == b.dtype and a.shape == b.shape
            assert a.tobytes() == b.tobytes()
    changed = Transcript.from_frame(*transcript.to_frame())
    say(changed, [3], [4])
    assert changed != transcript


def test_a_token_keeps_the_routes_of_the_call_that_sampled_after_it():
    transcript = Transcript()
    prompt = transcript.append("prompt", [5, 6])
    say(transcript, [1], [10, 11], version=0)
    say(transcript, [2], [12], version=1)  # the engine computed all of the context again with new weights
    (row,) = transcript.rows()
    np.testing.assert_array_equal(row.routes[:4], engine_routes([5, 6, 1, 10])[:4])
    np.testing.assert_array_equal(row.routes[4:6], engine_routes([5, 6, 1, 10, 11, 2], version=1)[4:])
    transcript.branch(prompt)
    say(transcript, [3], [13, 14], version=2)
    other = transcript.rows()[1]
    np.testing.assert_array_equal(other.routes[:2], row.routes[:2])
    np.testing.assert_array_equal(other.routes[2:4], engine_routes([5, 6, 3, 13], version=2)[2:])


def test_ids_are_stored_in_as_few_bytes_as_hold_them():
    for largest, dtype in ((255, np.uint8), (256, np.uint16)):
        transcript = Transcript()
        node = transcript.append("prompt", [1, 2], [3], [0.0], [0], routes=np.full((2, L, K), largest, np.int16))
        assert transcript._routes[node.id].dtype == dtype
        assert transcript.rows()[0].routes[0, 0, 0] == largest


def test_a_sample_without_routes_leaves_a_gap_that_later_routes_fill():
    transcript = Transcript()
    transcript.append("prompt", [5, 6])
    say(transcript, [1], [10, 11], routed=False)
    assert transcript.rows()[0].tokens_without_routes().tolist() == [0, 1, 2, 3]
    node = say(transcript, [1], [12, 13])
    assert len(transcript.rows()[0].tokens_without_routes()) == 0
    transcript.append("tool", [2])
    say(transcript, [1], [14, 15], routed=False)
    assert transcript.rows()[0].tokens_without_routes().tolist() == [7, 8, 9, 10]
    assert len(transcript._routes[node.id]) == 2


def test_routes_may_begin_before_the_first_gap_and_not_after_it():
    transcript = Transcript()
    prompt = transcript.append("prompt", [5, 6])
    assert transcript.routes_known == 0
    say(transcript, [1], [10, 11])
    transcript.append("tool", [2, 3])
    assert transcript.routes_known == 4, "the last sampled token and the observation have none yet"
    tokens = [*transcript.tokens, 1, 12]
    for start, n in ((5, 3), (4, 3), (4, 5)):
        broken = copy.deepcopy(transcript)
        routes = engine_routes(tokens)[start : start + n]
        with pytest.raises(TranscriptError, match="token"):
            broken.append("assistant", [1], [12], [0.0], [0], routes=routes, routes_start=start)
    early = engine_routes(tokens[:-1], version=1)[2:]
    transcript.append("assistant", [1], [12], [0.0], [1], routes=early, routes_start=2)
    (row,) = transcript.rows()
    np.testing.assert_array_equal(row.routes[:4], engine_routes(tokens)[:4])
    np.testing.assert_array_equal(row.routes[4:-1], engine_routes(tokens, version=1)[4:-1])
    transcript.branch(prompt)
    assert transcript.routes_known == 2, "a branch has the routes of what it shares"
