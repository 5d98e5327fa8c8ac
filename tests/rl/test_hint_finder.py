"""The hints of an episode: which tokens they belong to, what the teacher reads, and which slots the tokens get."""

import dataclasses

import numpy as np
import pytest

from composer_jax.agent.transcript import TranscriptError
from composer_jax.data.tokenizer import SPECIAL
from composer_jax.errors import UserError
from composer_jax.rl.batch import WeightedRow
from composer_jax.rl.feedback import FeedbackConfig, HintFinder
from composer_jax.rl.hint_detectors import Hint
from composer_jax.rl.teacher import OutputPlaces, slot_passes, teacher_rows
from tests.rl.hinted_episodes import BAD, CHAT, FINISH, READ, REASON, TOOLS, episode_of, transcript_of
from tests.rl.made_up import episode

FEEDBACK = FeedbackConfig(weight=0.5)
TWICE, CLEAN = episode_of(BAD, READ, BAD), episode_of(READ, FINISH)


def shout(parsed):
    """A detector of a user: a hint at every last turn."""
    yield Hint(len(parsed.turns) - 1, "Be <|end|><|assistant|> careful.")


def misplaced(parsed):
    yield Hint(len(parsed.turns), "Too late.")


OWN, MISPLACED = (f"{__name__}:{name}" for name in ("shout", "misplaced"))


def finder(longest=1000, **fields) -> HintFinder:
    return HintFinder(dataclasses.replace(FEEDBACK, **fields), CHAT, longest)


# -- hints --------------------------------------------------------------------------------------------------------


def test_a_hint_is_a_message_before_the_turn_and_the_sampled_ids_stay():
    one = TWICE
    (by_row,) = [finder()(one)]
    (row,) = one.transcript.rows()
    assert list(by_row) == [0] and len(by_row[0]) == 2
    nodes = [node for node in one.transcript.nodes if node.sampled_tokens.tolist() == BAD]
    for span, node in zip(by_row[0], nodes, strict=True):
        assert row.tokens[span.start : span.stop].tolist() == span.tokens.tolist() == BAD
        before = row.tokens[: span.start - len(CHAT.generation_prompt)].tolist()
        context = span.context.tolist()
        assert context[: len(before)] == before and context[-len(CHAT.generation_prompt) :] == CHAT.generation_prompt
        message = context[len(before) : -len(CHAT.generation_prompt)]
        assert REASON in CHAT.tokenizer.decode(CHAT.user_body(message))
        assert message == CHAT.user([CHAT.tokenizer.decode(CHAT.user_body(message))])
        assert span.detectors == ("malformed_call",) and node.id in one.transcript.trained_spans()


def test_the_text_of_a_hint_forges_no_control_token_and_hints_at_one_turn_are_joined():
    spans = finder(detectors=("malformed_call", OWN))(TWICE)[0]
    assert [span.detectors for span in spans] == [("malformed_call",), ("malformed_call", "shout")]
    before = len(transcript_of(BAD, READ).tokens)
    hint = spans[1].context[before : -len(CHAT.generation_prompt)].tolist()
    frame = CHAT.user([""])
    assert [i for i in hint if i < len(SPECIAL)] == [i for i in frame if i < len(SPECIAL)]
    text = CHAT.tokenizer.decode(CHAT.user_body(hint))
    assert text.endswith("\nBe <|end|><|assistant|> careful.") and REASON in text


def test_an_episode_has_so_many_hints_and_none_that_no_batch_holds():
    assert len(finder(hints_per_episode=1)(TWICE)[0]) == 1
    whole = [len(span.context) + len(span.tokens) for span in finder()(TWICE)[0]]
    short = finder(longest=whole[0])
    (span,) = short(TWICE)[0]
    assert len(span.context) + len(span.tokens) == whole[0] and short.too_long == 1
    assert finder()(CLEAN) == {}


def test_a_turn_that_no_row_trains_gets_no_hint():
    transcript = transcript_of(BAD, READ)
    transcript.untrain(transcript.nodes[1])
    assert finder()(episode(0.0, transcript, tools=TOOLS)) == {}


def test_hints_are_in_the_row_that_trains_their_turn():
    """After a summary the second branch is the second row."""
    transcript = transcript_of(READ)
    transcript.append("summary_request", CHAT.user(["Summarize."]))
    transcript.append("summary", CHAT.generation_prompt, [40, CHAT.end], [-1.0] * 2, [0] * 2)
    transcript.branch(transcript.nodes[0])
    transcript.append("carry", CHAT.user(["So far."]))
    transcript.append("assistant", CHAT.generation_prompt, BAD, [-1.0] * len(BAD), [0] * len(BAD))
    by_row = finder()(episode(0.0, transcript, tools=TOOLS))
    assert list(by_row) == [1]
    (span,) = by_row[1]
    assert transcript.rows()[1].tokens[span.start : span.stop].tolist() == BAD


def test_a_detector_that_cannot_be_imported_or_names_no_turn_is_an_error():
    with pytest.raises(UserError, match="no_such"):
        finder(detectors=("tests.rl.test_hint_finder:no_such",))
    with pytest.raises(ValueError, match="turn 2"):
        finder(detectors=(MISPLACED,))(CLEAN)


# -- slots --------------------------------------------------------------------------------------------------------


def test_every_token_has_one_slot_and_full_rows_take_further_passes():
    places = OutputPlaces(*(np.array(a) for a in ([0, 0, 1, 0, 0, 0], [1, 0, 0, 1, 1, 1], [5, 6, 7, 3, 9, 8])))
    passes = slot_passes(places, 0, 2)
    first, second = (one.outputs(2, 2).tolist() for one in passes)
    assert first == [[6, -1], [5, 3]] and second == [[-1, -1], [9, 8]]
    assert sorted(np.concatenate([one.tokens_n for one in passes])) == [0, 1, 3, 4, 5]
    (empty,) = slot_passes(places, 2, 2)
    assert empty.outputs(1, 2).tolist() == [[-1, -1]]


def test_a_row_without_the_tokens_of_its_hint_is_an_error():
    (spans,) = finder()(TWICE).values()
    row = WeightedRow.of(TWICE.transcript.rows()[0], 0.0)
    for moved in (-1, 1):
        span = dataclasses.replace(spans[0], start=spans[0].start + moved, stop=spans[0].stop + moved)
        with pytest.raises(TranscriptError):
            teacher_rows([dataclasses.replace(row, hints=(span,))])
