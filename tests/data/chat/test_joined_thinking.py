"""Thoughts that are joined with a content are cut from it again, in one piece and in the right place."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_jax.data.chat.thinking import join_thinking, split_thinking

TEXTS = st.lists(st.sampled_from(["a", "<think>", "</think>", "\n", " ", "é"]), max_size=5).map("".join)


@given(reasoning=TEXTS, content=TEXTS)
def test_what_is_joined_is_split_again(reasoning, content):
    try:
        joined = join_thinking(reasoning, content)
    except ValueError:
        assert "</think>" in reasoning or content.lstrip().startswith("<think>")
        return
    if not reasoning.strip():
        assert joined == content
        return
    assert split_thinking(joined, thinks=False) == (reasoning.strip("\n"), content.lstrip("\n"))
    if not reasoning.lstrip().startswith("<think>"):
        opened = joined.removeprefix("<think>")
        assert split_thinking(opened, thinks=True) == (reasoning.strip("\n"), content.lstrip("\n"))


@pytest.mark.parametrize(("reasoning", "content"), [("a</think>", "b"), ("a", " <think>b</think>c")])
def test_what_would_be_cut_elsewhere_is_refused(reasoning, content):
    with pytest.raises(ValueError, match="think>"):
        join_thinking(reasoning, content)
