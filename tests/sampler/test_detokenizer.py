"""Pieces of text that arrive token by token join to the text of all tokens, and never split a character."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_jax.sampler.detokenizer import IncrementalDetokenizer


def decode_bytes(ids) -> str:
    """Every id is a byte; ids from 256 are control tokens without text."""
    return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


def pieces(decode, calls) -> list[str]:
    detokenizer = IncrementalDetokenizer(decode)
    return [*(detokenizer.add(ids) for ids in calls), detokenizer.finish()]


@given(st.text(), st.integers(1, 4))
def test_whole_characters_come_without_a_replacement_character(text, size):
    ids = list(text.encode())
    out = pieces(decode_bytes, [ids[i : i + size] for i in range(0, len(ids), size)])
    assert "".join(out) == text
    if "\ufffd" not in text:
        assert out[-1] == ""  # nothing waits


@given(st.lists(st.lists(st.integers(0, 300), max_size=4)))
def test_any_bytes_come_as_the_decoder_writes_them_together(calls):
    assert "".join(pieces(decode_bytes, calls)) == decode_bytes([i for ids in calls for i in ids])


def test_a_character_waits_for_its_last_byte_and_what_stands_before_it_does_not():
    detokenizer = IncrementalDetokenizer(decode_bytes)
    euro = list("€".encode())
    assert detokenizer.add([ord("a"), euro[0]]) == "a"
    assert detokenizer.add([euro[1]]) == ""
    assert detokenizer.add([euro[2], ord("b")]) == "€b"
    assert detokenizer.add([euro[0]]) == "" and detokenizer.finish() == "\ufffd"


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_decoder_that_strips_the_first_space_loses_no_other(size):
    words = [" def", " add", "(a", ",", " b", ")", " ", " x"]
    decode = lambda ids: "".join(words[i] for i in ids).removeprefix(" ")  # noqa: E731
    ids = list(range(len(words)))
    assert "".join(pieces(decode, [ids[i : i + size] for i in range(0, len(ids), size)])) == decode(ids)
