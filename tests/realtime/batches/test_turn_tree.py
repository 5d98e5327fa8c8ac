"""A session's turns, as a server has written them, make the rows of the Transcript that was played."""

import numpy as np
import pytest

from composer_jax.agent.transcript import Transcript
from composer_jax.realtime.batches.turn_tree import own_routes, session_transcript
from composer_jax.serve.traffic.folder import TrafficFolder
from tests.rl.made_up import conversation

SHAPE = (2, 3)


def routes_of(tokens):
    """int16 [n, 2, 3]: experts that follow from each id and those before it, as a network's do."""
    sums = np.cumsum(np.asarray(tokens, np.int64))
    return ((sums[:, None, None] * np.arange(1, 7).reshape(1, *SHAPE)) % 64).astype(np.int16)


def play(transcript, nodes=None):
    """(a transcript with routes, [(context, sampled node)]): the nodes of another one as an episode appends them."""
    played, samples, ids = Transcript(), [], {}
    for node in transcript.nodes:
        if node.parent is not None:
            played.branch(ids[node.parent])
        context = [*played.tokens, *node.harness_tokens.tolist()]
        fields = [node.sampled_tokens, node.logprobs, node.versions] if node.sampled else [(), (), ()]
        routes = routes_of([*context, *node.sampled_tokens.tolist()])[:-1] if node.sampled else None
        ids[node.id] = played.append(node.kind, node.harness_tokens, *fields, routes=routes)
        if node.sampled:
            samples.append((context, ids[node.id], routes))
    return played, samples


def assert_same_rows(one, other):
    ours, theirs = one.rows(), other.rows()
    assert len(ours) == len(theirs)
    for row, expected in zip(ours, theirs, strict=True):
        for name in ("tokens", "trained", "logprobs", "versions", "routes"):
            np.testing.assert_array_equal(getattr(row, name), getattr(expected, name), err_msg=name)


@pytest.mark.parametrize("summaries", [0, 1, 2])
def test_the_rows_of_an_episode_that_was_played_over_the_server(new_traffic, summaries):
    """Also with summaries, each of which begins a new root of the tree: its prompt is shorter."""
    played, samples = play(conversation(100, turns=3, summaries=summaries))
    traffic = new_traffic(routing=True)
    for context, node, routes in samples:
        kind = "summary" if node.kind == "summary" else "main"
        traffic.answer("s", context, node.sampled_tokens.tolist(), version=node.versions.tolist(),
                       logprobs=node.logprobs.tolist(), routing=routes, kind=kind)  # fmt: skip
    traffic.close()
    turns = TrafficFolder(traffic.path).read("s").turns
    assert len([turn for turn in turns if not turn.parent]) == 1 + summaries
    assert all(own_routes(turn).shape[1:] == SHAPE for turn in turns)
    ours = session_transcript(turns, {turn.id for turn in turns}, has_routes=True)
    assert_same_rows(ours, played)
    assert all(not len(row.tokens_without_routes()) for row in ours.rows())
    without = session_transcript(turns, {turn.id for turn in turns})
    assert all(row.routes is None for row in without.rows())


def test_only_what_is_trained_and_what_comes_before_it_is_in_the_tree(new_traffic):
    traffic = new_traffic()
    _, after = traffic.answer("s", [1, 2], [10, 11])
    traffic.answer("s", [*after, 3], [12], finish="cancelled")
    _, other = traffic.answer("s", [*after, 4], [13, 14])
    traffic.answer("s", [9, 9], [15])
    traffic.answer("s", [*other, 5], [16])
    traffic.close()
    turns = TrafficFolder(traffic.path).read("s").turns
    transcript = session_transcript(turns, {turns[2].id, turns[4].id})
    (row,) = transcript.rows()
    assert row.tokens.tolist() == [1, 2, 10, 11, 4, 13, 14, 5, 16]
    assert row.trained.tolist() == [False] * 5 + [True, True, False, True]
    assert list(transcript.trained_spans()) == [1, 2]
    both = session_transcript(turns, {turns[0].id, turns[3].id})
    assert [row.tokens.tolist() for row in both.rows()] == [[1, 2, 10, 11], [9, 9, 15]]
    with pytest.raises(ValueError, match="a parent that is not stored"):
        session_transcript(turns[1:], {turns[4].id})


def test_routes_of_a_cut_stream_are_missing_for_all_after_it(new_traffic):
    traffic = new_traffic(routing=True)
    first, second = [1, 2, 10, 11], [1, 2, 10, 11, 3, 12]
    traffic.answer("s", first[:2], first[2:], routing=routes_of(first)[:-1])
    _, cut = traffic.answer("s", [*first, 3], [12], finish="cancelled")
    assert cut == second
    traffic.answer("s", [*second, 4], [13], routing=routes_of([*second, 4, 13])[:-1])
    traffic.close()
    turns = TrafficFolder(traffic.path).read("s").turns
    assert [own_routes(turn) is None for turn in turns] == [False, True, False]
    (row,) = session_transcript(turns, {turns[2].id}, has_routes=True).rows()
    assert row.tokens_without_routes().tolist() == [3, 4, 5, 6]
