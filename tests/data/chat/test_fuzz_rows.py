"""Random and damaged rows are read whole or refused with a reason: the short form of benchmarks/fuzz_rows.py."""

import json

import pytest

from benchmarks.fuzz_rows import FORMATS, RowWriter, fuzz, lost_words
from composer_jax.data.chat import conversations
from tests.data.formats import format_of


def test_rows_are_read_whole_or_refused():
    result = fuzz(700, 5, {name: format_of(name) for name in FORMATS})
    assert result["wrong_rows"] == []
    assert result["accepted"] > 300 and result["refused"] > 150 and len(result["reasons"]) > 20


@pytest.mark.parametrize("name", ["chatml", "thinks"])
def test_what_is_lost_and_what_is_trained_by_mistake_is_found(name, monkeypatch):
    chat = format_of(name)
    said = {"role": "assistant", "content": "word1end", "weight": 0}
    row = {"messages": [{"role": "user", "content": "word2end"}, said, said | {"content": "word3end", "weight": 1}]}
    assert lost_words(row, chat) == (set(), set())
    monkeypatch.setattr(conversations, "read_trained", lambda message: True)
    assert lost_words(row, chat) == (set(), set()), "both are trained, and marked so"
    monkeypatch.setattr(conversations, "read_said", lambda message: "")
    assert lost_words(row, chat) == ({"word1end", "word3end"}, set())
    trace = conversations.conversation_trace
    monkeypatch.undo()
    monkeypatch.setattr(
        "benchmarks.fuzz_rows.conversation_trace", lambda *given: (trace(*given)[0], trace(*given)[1] | True)
    )
    assert lost_words(row, chat) == (set(), {"word1end", "word2end"})


def test_a_seed_gives_its_rows_again():
    first, second = RowWriter(1), RowWriter(1)
    rows = [json.dumps(first.row()) for _ in range(50)]
    assert rows == [json.dumps(second.row()) for _ in range(50)] and len(set(rows)) > 45
