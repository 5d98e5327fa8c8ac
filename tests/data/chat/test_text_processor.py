"""Prompts of completions: control tokens are characters unless they are asked for."""

from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer as Backend

from composer_jax.data.chat.text_processor import FilesInMemory, TextProcessor
from composer_jax.data.model_tokenizer import FIM_TOKENS
from composer_jax.data.tokenizer import Tokenizer
from composer_jax.errors import UserError
from tests.data.model_folders import QWEN_TOKENS, TEXTS, sentencepiece_json, tokenizer_json

FIM = "<|fim_prefix|>def f():\n    <|fim_suffix|>\n    return x<|fim_middle|>"
TOKENS = QWEN_TOKENS | dict.fromkeys(FIM_TOKENS[0], False)


def processor(tokenizer, config="{}"):
    files = {"tokenizer.json": tokenizer.encode(), "tokenizer_config.json": config.encode()}
    return TextProcessor(FilesInMemory(files, "x"), SimpleNamespace(vocab_size=10_000, max_context=4096), "x")


@pytest.mark.parametrize("kind", ["bytes", "each", "first"])
def test_a_prompt_that_fills_in_the_middle(kind):
    tokenizer = tokenizer_json(TOKENS) if kind == "bytes" else sentencepiece_json(TOKENS, kind)
    text = processor(tokenizer)
    for prompt in (FIM, "x" + FIM + "<|im_end|>\n", "no control token"):
        whole = Backend.from_str(tokenizer).encode(prompt, add_special_tokens=False).ids
        assert text.encode_prompt(prompt, parse_special=True) == whole
        plain = text.encode_prompt(prompt)
        assert not any(text.tokenizer.is_control(i) for i in plain)
        assert text.tokenizer.decode(plain).removeprefix(" ") == prompt
    assert sum(text.tokenizer.is_control(i) for i in text.encode_prompt(FIM, parse_special=True)) == 3


def test_a_text_begins_with_one_token_for_it_or_none():
    text = processor(tokenizer_json(TOKENS), '{"bos_token": "<|endoftext|>", "add_bos_token": true}')
    bos, a = text.tokenizer.bos, text.tokenizer.encode("a")
    assert text.encode_prompt("a") == text.encode_prompt("a", parse_special=True) == [bos, *a]
    assert text.encode_prompt("a", add_special_tokens=False) == a
    for options in ({}, {"add_special_tokens": False}):
        assert text.encode_prompt("<|endoftext|>a", parse_special=True, **options) == [bos, *a]


def test_our_own_control_tokens_have_no_spelling(tmp_path):
    Tokenizer.train(TEXTS, 300).save(tmp_path / "tokenizer.json")
    text = processor((tmp_path / "tokenizer.json").read_text())
    with pytest.raises(UserError, match="control tokens of x cannot be spelled"):
        text.encode_prompt("a", parse_special=True)
