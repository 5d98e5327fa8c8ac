"""The transcript: rows are contexts of the model, and every sampled token is trained exactly once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_jax.agent.transcript import KINDS, Transcript, TranscriptError
from composer_jax.frames import FrameError, encode_frame
from tests.test_frames import read

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False, max_value=0)
IDS = st.integers(0, 70000)
SAMPLED = st.lists(st.tuples(IDS, FLOATS, st.integers(-1, 1000)), max_size=5)
STEP = st.tuples(st.sampled_from(KINDS), st.lists(IDS, max_size=5), SAMPLED, st.none() | st.integers(0, 30))


def grown(steps):
    """A transcript made of (kind, harness tokens, sampled tokens, node to branch from before it)."""
    transcript = Transcript()
    for kind, harness_ids, sampled, branch in steps:
        if branch is not None and transcript.nodes:
            transcript.branch(transcript.nodes[branch % len(transcript.nodes)])
        tokens, logprobs, versions = zip(*sampled, strict=True) if sampled else ((), (), ())
        transcript.append(kind, harness_ids, tokens, logprobs, versions)
    return transcript


@given(st.lists(STEP, min_size=1, max_size=12))
def test_every_sampled_token_is_trained_exactly_once(steps):
    transcript = grown(steps)
    rows = transcript.rows()
    assert sum(int(row.trained.sum()) for row in rows) == transcript.total_sampled
    seen = sorted(lp for row in rows for lp in row.logprobs[row.trained].tolist())
    assert seen == sorted(lp for node in transcript.nodes for lp in node.logprobs.tolist())
    for row in rows:
        assert row.tokens.dtype == np.int32 and row.versions.dtype == np.int32
        assert row.logprobs.dtype == np.float32 and row.trained.dtype == np.bool_
        assert len(row.tokens) == len(row.trained) == len(row.logprobs) == len(row.versions)
        assert row.trained.any()
        assert (row.logprobs[~row.trained] == 0).all()
        assert (row.versions[~row.trained] == -1).all()


@given(st.lists(STEP, min_size=1, max_size=12))
def test_rows_are_the_branches_from_root_to_leaf(steps):
    transcript = grown(steps)
    assert transcript.tokens == [token for node in transcript.path() for token in node.tokens]
    assert len(transcript.tokens) == transcript.length
    branches = transcript.branches()
    leaves = [branch[-1].id for branch in branches]
    parents = {node.parent for node in transcript.nodes}
    assert leaves == [node.id for node in transcript.nodes if node.id not in parents]
    contexts = [[t for node in branch for t in node.tokens.tolist()] for branch in branches]
    for row in transcript.rows():
        assert any(row.tokens.tolist() == context[: len(row.tokens)] for context in contexts)
        assert row.trained[-1]
    assert {node.id for branch in branches for node in branch} == {node.id for node in transcript.nodes}
    for branch in branches:
        assert branch[0].parent is None
        assert all(child.parent == parent.id for parent, child in zip(branch, branch[1:], strict=False))


@given(st.lists(STEP, min_size=1, max_size=8))
def test_a_frame_is_exact(steps):
    transcript = grown(steps)
    back = Transcript.from_frame(*read(encode_frame(*transcript.to_frame())))
    assert back == transcript
    assert back.tip == transcript.tip
    for ours, theirs in zip(transcript.nodes, back.nodes, strict=True):
        for name in ("tokens", "logprobs", "versions"):
            a, b = getattr(ours, name), getattr(theirs, name)
            assert a.dtype == b.dtype
            assert a.tobytes() == b.tobytes(), "bit by bit"


def test_an_observation_at_the_end_of_a_branch_is_in_no_row():
    transcript = Transcript()
    transcript.append("prompt", [1, 2])
    assert transcript.rows() == []
    transcript.append("assistant", [3], [4], [-1], [0])
    transcript.append("tool", [5, 6])
    [row] = transcript.rows()
    assert row.tokens.tolist() == [1, 2, 3, 4]
    assert Transcript().rows() == [] and Transcript().branches() == []


def test_trained_spans_are_where_rows_train_the_nodes():
    """With a shared node, an untrained one, a summary and a branch that trains nothing."""
    transcript = Transcript()
    prompt = transcript.append("prompt", [1])
    shared = transcript.append("assistant", [2], [3, 4], [-1, -2], [0, 0])
    transcript.append("assistant", [2], [5], [-3], [0])
    transcript.branch(shared)
    transcript.append("tool", [6])
    transcript.branch(shared)
    hidden = transcript.append("assistant", [2], [7], [-4], [0], trained=False)
    transcript.append("summary", [2, 8], [9, 10], [-5, -6], [0, 0])
    transcript.branch(prompt)
    transcript.append("assistant", [], [11], [-7], [0])
    spans, rows = transcript.trained_spans(), transcript.rows()
    assert len(rows) == 3 and hidden.id not in spans and spans[shared.id].row == 0
    covered = [np.zeros(len(row.tokens), bool) for row in rows]
    for number, span in spans.items():
        np.testing.assert_array_equal(
            rows[span.row].tokens[span.start : span.stop], transcript.nodes[number].sampled_tokens
        )
        covered[span.row][span.start : span.stop] = True
    for row, mask in zip(rows, covered, strict=True):
        np.testing.assert_array_equal(row.trained, mask)


def test_an_untrained_node_is_context_and_never_trained():
    transcript = Transcript()
    prompt = transcript.append("prompt", [1])
    transcript.append("assistant", [2], [3, 4], [-1, -2], [0, 0], trained=False)
    transcript.append("assistant", [2], [5], [-3], [0])
    transcript.append("assistant", [2], [6], [-4], [0], trained=False)
    transcript.branch(prompt)
    transcript.append("assistant", [], [7], [-5], [0], trained=False)
    for same in (transcript, Transcript.from_frame(*read(encode_frame(*transcript.to_frame())))):
        [row] = same.rows()  # the second branch trains nothing
        assert row.tokens.tolist() == [1, 2, 3, 4, 2, 5]
        assert row.trained.tolist() == [False] * 5 + [True]
        assert row.logprobs.tolist() == [0] * 5 + [-3]
        assert same.total_sampled == 5
    node = transcript.nodes[2]
    transcript.untrain(node)
    assert transcript.rows() == [] and len(transcript.tokens) == 2
    assert Transcript.from_frame(*transcript.to_frame()) == transcript
    with pytest.raises(TranscriptError, match="node 2"):
        transcript.untrain(node)


def zeros(*shape):
    return {"routes": np.zeros(shape, np.int16)}


ROOTLESS = [0, "prompt", 1, 0, True, False]
ARRAYS = [np.array([1], np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32)]


@pytest.mark.parametrize(
    "refused",
    [
        lambda transcript: transcript.append("chat", [1]),
        lambda transcript: transcript.append("assistant", [], [1, 2], [-1.0], [0, 0]),
        lambda transcript: transcript.branch(Transcript().append("prompt", [1])),
        lambda transcript: Transcript.from_frame({"nodes": [ROOTLESS], "tip": 0}, ARRAYS),
        lambda transcript: transcript.append("assistant", [1], [10], [0.0], [0], **zeros(3, 2, 3)),
        lambda transcript: transcript.append("assistant", [1], [10], [0.0], [0], **zeros(5, 2, 3)),
        lambda transcript: transcript.append("assistant", [1], [10], [0.0], [0], **zeros(4, 1, 3)),
    ],
    ids=["kind", "logprobs", "foreign branch", "parent", "too few routes", "too many routes", "another network"],
)
def test_malformed_nodes_are_refused(refused):
    transcript = Transcript()
    transcript.append("prompt", [5, 6], [7], [0.0], [0], **zeros(2, 2, 3))
    with pytest.raises(TranscriptError):
        refused(transcript)


@pytest.mark.parametrize(
    "damage",
    [
        lambda header, arrays: (header, arrays[:2]),
        lambda header, arrays: (header, [arrays[0][1:], *arrays[1:]]),
        lambda header, arrays: (header, [arrays[0].astype(np.int64), *arrays[1:]]),
        lambda header, arrays: ({**header, "nodes": [node[:4] for node in header["nodes"]]}, arrays),
        lambda header, arrays: ({"tip": 0}, arrays),
        lambda header, arrays: (header, [*arrays[:3], arrays[3].astype(np.int16)]),
        lambda header, arrays: (header, [*arrays[:3], np.repeat(arrays[3], 3, 0)]),
        lambda header, arrays: (header, arrays[:3]),
    ],
    ids=["arrays", "tokens", "dtype", "nodes", "header", "dtype of routes", "routes", "no routes"],
)
def test_a_frame_of_something_else_is_refused(damage):
    transcript = Transcript()
    transcript.append("prompt", [5, 6], [7], [0.0], [0], **zeros(2, 2, 3))
    assert Transcript.from_frame(*transcript.to_frame()) == transcript
    with pytest.raises(FrameError):
        Transcript.from_frame(*damage(*transcript.to_frame()))
