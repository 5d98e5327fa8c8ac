"""The tokenizer of a GGUF file: ids, control tokens, files, and the sentences that refuse others."""

import json

import pytest
import tokenizers

from composer_jax.checkpoint.gguf import open_gguf
from composer_jax.checkpoint.gguf.tokenizer import PRE_TOKENIZERS
from composer_jax.data.chat.load_chat_format import load_tokenizer
from composer_jax.errors import UserError
from tests.checkpoint.gguf.small_gguf import TEMPLATE, TOKENS, write_small

ODD = "x = 123\n    the\n\n  12 in ３٤½ thé 漢字 \U0001f600 <|im_end|><think> 's\t\r\n\x00 12"


def texts(path, **changes):
    return open_gguf(write_small(path / "a.gguf", **changes)).texts


def encode(files: dict[str, str], text: str) -> list[str]:
    """The tokens of a text, encoded with special tokens."""
    return tokenizers.Tokenizer.from_str(files["tokenizer.json"]).encode(text).tokens


def test_ids_are_the_positions_of_the_tokens(tmp_path):
    tokenizer = tokenizers.Tokenizer.from_str(texts(tmp_path)["tokenizer.json"])
    assert [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())] == TOKENS
    assert tokenizer.decode(tokenizer.encode(ODD).ids, skip_special_tokens=False) == ODD


def test_control_tokens_are_special_and_user_defined_ones_are_text(tmp_path):
    description = json.loads(texts(tmp_path)["tokenizer.json"])
    added = {token["content"]: (token["id"], token["special"]) for token in description["added_tokens"]}
    expected = {"<|endoftext|>": (0, True), "<|im_start|>": (1, True), "<|im_end|>": (2, True)}
    assert added == expected | {"<think>": (TOKENS.index("<think>"), False)}
    assert encode(texts(tmp_path), "in<|im_end|><think>in") == ["in", "<|im_end|>", "<think>", "in"]


PIECES = {  # of "a  1234 the's": where digits are cut, and whether they take a space
    "smollm": ["a", "ĠĠ", "1", "2", "3", "4", "Ġthe", "'s"],
    "gpt-2": ["a", "Ġ", "Ġ", "1234", "Ġthe", "'s"],
    "qwen2": ["a", "Ġ", "Ġ", "1", "2", "3", "4", "Ġthe", "'s"],
    "llama-bpe": ["a", "Ġ", "Ġ", "123", "4", "Ġthe", "'s"],
}


@pytest.mark.parametrize("name", PIECES)
def test_a_text_is_split_as_the_name_says(tmp_path, name):
    files = texts(tmp_path, tokenizer__ggml__pre=name)
    assert encode(files, "a  1234 the's") == PIECES[name]


def test_every_rule_gives_every_text_back(tmp_path):
    for name in PRE_TOKENIZERS:
        tokenizer = tokenizers.Tokenizer.from_str(texts(tmp_path, tokenizer__ggml__pre=name)["tokenizer.json"])
        ids = tokenizer.encode(ODD, add_special_tokens=False).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == ODD, name


def test_begin_and_end_are_added_where_the_file_says_so(tmp_path):
    assert encode(texts(tmp_path), "in") == ["in"]
    both = texts(tmp_path, tokenizer__ggml__add_bos_token=True, tokenizer__ggml__add_eos_token=True)
    assert encode(both, "in") == ["<|im_start|>", "in", "<|im_end|>"]
    silent = dict(without=("tokenizer.ggml.add_bos_token",))
    assert encode(texts(tmp_path, tokenizer__ggml__pre="llama-bpe", **silent), "in") == ["<|im_start|>", "in"]
    assert encode(texts(tmp_path, **silent), "in") == ["in"]


def test_configs_name_tokens_and_template(tmp_path):
    files = texts(tmp_path, tokenizer__ggml__eot_token_id=0)
    config = json.loads(files["tokenizer_config.json"])
    assert [config[f"{name}_token"] for name in ("unk", "bos", "eos")] == TOKENS[:3]
    assert config["chat_template"] == TEMPLATE and config["pad_token"] == "<|im_end|>"
    assert config["model_max_length"] == 128
    assert json.loads(files["generation_config.json"]) == {"bos_token_id": 1, "pad_token_id": 2, "eos_token_id": [2, 0]}
    assert json.loads(texts(tmp_path)["generation_config.json"])["eos_token_id"] == 2


def test_several_templates_are_a_list(tmp_path):
    changes = {"tokenizer__chat_templates": ["tool_use"], "tokenizer__chat_template__tool_use": "{{ tools }}"}
    assert json.loads(texts(tmp_path, **changes)["tokenizer_config.json"])["chat_template"] == [
        {"name": "default", "template": TEMPLATE},
        {"name": "tool_use", "template": "{{ tools }}"},
    ]


def test_a_file_is_a_source_of_texts(tmp_path):
    file = open_gguf(write_small(tmp_path / "a.gguf", tokenizer__ggml__eot_token_id=0))
    assert file.text("chat_template.jinja") is None
    assert json.loads(file.text("config.json") or "") == file.config
    tok = load_tokenizer(file)
    assert tok.encode("in the<|im_end|>") != tok.encode("in the") + [2]  # the characters of a control token are text
    assert tok.decode(tok.encode(ODD)) == ODD
    assert tok.vocab_size == len(TOKENS)


REFUSED = {
    "none": (dict(without=("tokenizer.ggml.tokens",)), "holds no tokenizer; convert the model from a file that does"),
    "another kind": (dict(tokenizer__ggml__model="llama"), "a tokenizer of the kind 'llama'; only byte-level BPE"),
    "no rule": (dict(without=("tokenizer.ggml.pre",)), "does not name its pre-tokenizer"),
    "unknown rule": (
        dict(tokenizer__ggml__pre="tekken"),
        "splits text by 'tekken'; .* Supported are gpt-2, phi-2, smollm",
    ),
    "merges of nothing": (
        dict(tokenizer__ggml__merges=["ab cd"]),
        "the merges of the tokenizer in .*a.gguf are damaged",
    ),
    "torn merges": (dict(tokenizer__ggml__merges=["ab"]), "the merges of the tokenizer in .*a.gguf are damaged"),
    "twice": (dict(tokenizer__ggml__tokens=[*TOKENS[:-1], "a"]), "has the token 'a' twice"),
    "types": (dict(tokenizer__ggml__token_type=[1, 1]), "[0-9]+ tokens and 2 token types"),
    "no such id": (dict(tokenizer__ggml__eos_token_id=70_000), "eos_token_id=70000 and [0-9]+ tokens"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_tokenizer_that_is_not_read_leaves_the_weights(tmp_path, name):
    changes, message = REFUSED[name]
    file = open_gguf(write_small(tmp_path / "a.gguf", **changes))
    assert file.has_tokenizer == (name != "none")
    assert file.tensors.read("model.norm.weight").shape == (32,)
    with pytest.raises(UserError, match=message):
        _ = file.texts
