"""Cutting texts for filling in the middle, and the tokens for it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_jax.data.chat.load_chat_format import load_tokenizer
from composer_jax.data.prepare.tokenize_unit import cut_for_fim, fim_segments, find_fim_ids
from composer_jax.errors import UserError
from tests.data.model_folders import tokenizer_json
from tests.data.prepare.folders import make_tokenizer

TOKENS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")


@given(st.text(), st.text(), st.integers(0, 100))
def test_the_parts_are_the_text(text, name, seed):
    cut = cut_for_fim(text, name, seed, 1.0)
    assert cut is not None and "".join(cut) == text
    assert cut == cut_for_fim(text, name, seed, 1.0)
    assert cut_for_fim(text, name, seed, 0.0) is None
    prefix, middle, suffix = cut
    assert fim_segments(cut, (7, 8, 9)) == [7, prefix, 8, suffix, 9, middle]


def test_a_share_is_chosen_and_cut_anywhere():
    cuts = [cut_for_fim("x" * 100, f"{i}.py", 0, 0.3) for i in range(2000)]
    chosen = [cut for cut in cuts if cut is not None]
    assert len(chosen) == pytest.approx(600, abs=80)
    assert np.mean([len(middle) for _, middle, _ in chosen]) == pytest.approx(33, abs=4)
    assert cuts != [cut_for_fim("x" * 100, f"{i}.py", 1, 0.3) for i in range(2000)]


@pytest.mark.parametrize("special", [True, False])
def test_tokens_are_found_and_no_text_encodes_to_them(tmp_path, special):
    (tmp_path / "tokenizer.json").write_text(tokenizer_json(dict.fromkeys(TOKENS, special)))
    tok = load_tokenizer(tmp_path)
    ids = find_fim_ids(tok, str(tmp_path))
    assert [tok.decode([i]) for i in ids] == list(TOKENS)
    assert not set(tok.encode("a" + "".join(TOKENS))) & set(ids)


def test_a_tokenizer_without_the_tokens_is_refused(tmp_path):
    tok = load_tokenizer(make_tokenizer(tmp_path))
    with pytest.raises(UserError, match="the tokenizer here has no tokens for filling in the middle.*--fim_share=0"):
        find_fim_ids(tok, "here")
