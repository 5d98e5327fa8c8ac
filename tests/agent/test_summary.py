"""The rules of compaction."""

import pytest

from composer_jax.agent import summary
from composer_jax.agent.summary import Compaction
from composer_jax.errors import UserError
from tests.agent.conftest import task_of
from tests.data.formats import format_of


def test_is_due():
    assert not Compaction().is_due(10**9, prompt=10)
    assert not Compaction(trigger=100).is_due(100, prompt=10)
    assert Compaction(trigger=100).is_due(101, prompt=10)


def test_a_summary_waits_until_enough_follows_the_prompt():
    """Every branch repeats the prompt: summarizing the little that follows it would use up a segment."""
    assert not Compaction(trigger=126).is_due(285, prompt=222)
    assert Compaction(trigger=126).is_due(286, prompt=222)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"request": ""}, "compaction.request is empty; give the text"),
        ({"trigger": 0}, "compaction.trigger is 0"),
        ({"max_segments": 0}, "compaction.max_segments is 0"),
        ({"max_summary_tokens": -1}, "compaction.max_summary_tokens is -1"),
    ],
)
def test_impossible_values_are_refused(values, said):
    with pytest.raises(UserError, match=said):
        Compaction(**values)


def test_the_ids_of_a_summary_are_carried_as_they_are(tok, chat_format):
    # Ids that the tokenizer itself would not choose for this text: r, a, t, e instead of one word.
    ids = [tok.encode(letter)[0] for letter in "rate"]
    carried = summary.carry_message(chat_format, 3, [*ids, tok.end])
    assert tok.decode(carried) == "<|user|>Summary 3:\nrate<|end|>"
    assert carried[-5:-1] == ids != tok.encode("rate")


def test_the_plan_is_carried_below_the_summary(tok, chat_format):
    carried = summary.carry_message(chat_format, 1, tok.encode("rate"), "[x] read\n[ ] mend")
    assert tok.decode(carried) == "<|user|>Summary 1:\nrate\nPlan:\n[x] read\n[ ] mend<|end|>"


def test_of_a_long_plan_the_beginning_is_carried(tok, chat_format):
    plan = "[ ] " + "a" * summary.MAX_PLAN_CHARACTERS
    assert tok.decode(summary.carry_message(chat_format, 1, [], plan)) == (
        f"<|user|>Summary 1:\n\nPlan:\n{plan[: summary.MAX_PLAN_CHARACTERS]}<|end|>"
    )


def test_a_config_words_what_is_carried(tok, chat_format):
    ids = tok.encode("all read")
    carried = summary.carry_message(chat_format, 2, ids, "[ ] mend {number}", "{number}{plan}\nSo far: {summary}.")
    assert tok.decode(carried) == "<|user|>2\nPlan:\n[ ] mend {number}\nSo far: all read.<|end|>"
    with pytest.raises(UserError, match="'So far.'"):
        Compaction(100, carry="So far.")


def test_a_summary_has_failed_if_it_was_cut_or_says_nothing(tok, chat_format):
    text = tok.encode("all read")
    assert not summary.is_failed(chat_format, [*text, tok.end])
    assert summary.is_failed(chat_format, text), "it was cut"
    assert summary.is_failed(chat_format, [tok.end]) and summary.is_failed(chat_format, [])
    assert summary.is_failed(chat_format, [*tok.encode(" \n"), tok.end])


@pytest.mark.parametrize("name", ["thinks", "opens"])
def test_a_summary_that_is_only_thinking_has_failed(name):
    chat = format_of(name)
    thoughtful = chat.render_assistant("<think>\nhm\n</think>\n\nIt is x.", [])
    assert not summary.is_failed(chat, thoughtful)
    length = chat.thinking_length(thoughtful)
    assert summary.is_failed(chat, [*thoughtful[:length], chat.end]), "nothing follows the thinking"
    assert summary.is_failed(chat, [*thoughtful[: length // 2], chat.end]), "the thinking does not end"


def test_facts_are_lines_of_the_summary(tok, chat_format):
    task = task_of({}, metadata={summary.FACTS: ["rate = 47", "size = 12"]})
    kept = lambda text: summary.facts_kept(task, chat_format, [*tok.encode(text), tok.end])  # noqa: E731
    assert kept("read a.py\nrate = 47") == 0.5 and kept("size = 12\n rate = 47 ") == 1.0
    assert kept("rate = 4") == 0.0 and kept("rate = 479") == 0.0
    assert summary.facts_kept(task_of({}), chat_format, tok.encode("rate = 47")) is None
