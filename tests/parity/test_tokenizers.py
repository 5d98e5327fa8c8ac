"""Published tokenizers in the style of SentencePiece: ids of conversations are those of the transformers library."""

import functools
import json
from types import SimpleNamespace

import pytest

from composer_jax.data.chat.chat_format import Message
from composer_jax.data.chat.load_chat_format import load_chat_format, load_tokenizer
from composer_jax.data.chat.messages import AssistantMessage
from composer_jax.data.chat.text_processor import TextProcessor
from composer_jax.data.text_files import text_files
from composer_jax.serve.message_stream import TextStream
from tests.data.chat.test_sentencepiece import DIRECT, INST, LINES, WORDS
from tests.parity.published import template, tokenizer_folder

pytestmark = pytest.mark.parity

ASK = "hi, \u4e2d\U0001f600\n\n\n  def f():\n\treturn [1]"
SAID = AssistantMessage("I look.\n\n    x = 1 ", (), True)
NEXT = "  And now? <s> <end_of_turn>"


@functools.cache
def tokenizer(name):
    return load_tokenizer(tokenizer_folder(name))


def load(tmp_path, name, source, added=()):
    """(Our chat format, their tokenizer) of a published tokenizer with a template, and with special tokens added."""
    from transformers import PreTrainedTokenizerFast

    description = json.loads((tokenizer_folder(name) / "tokenizer.json").read_text())
    first = 1 + max(token["id"] for token in description["added_tokens"])
    first = max(first, len(description["model"]["vocab"]))
    entry = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    description["added_tokens"] += [{"id": i, "content": text, **entry} for i, text in enumerate(added, first)]
    config = json.loads((tokenizer_folder(name) / "tokenizer_config.json").read_text())
    config = {key: config[key] for key in ("bos_token", "eos_token")}
    (tmp_path / "tokenizer.json").write_text(json.dumps(description))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "chat_template.jinja").write_text(source)
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), chat_template=source, **config)
    return load_chat_format(tmp_path), theirs


@pytest.mark.parametrize(
    ("name", "source", "added"),
    [
        ("llama2", LINES.replace("<|im_end|>", "</s>"), ()),
        ("llama2", WORDS.replace("<|im_end|>", "</s>"), ()),
        ("llama2", INST.replace("<|im_end|>", "</s>"), ()),
        ("llama2", INST.replace("<|im_end|>", "</s>"), ("[INST]", "[/INST]")),
        ("llama2", DIRECT, ("<|user|>", "<|assistant|>", "<|im_end|>")),
        ("gemma3", "trl/gemma3", ()),
    ],
    ids=["lines", "words", "inst", "inst_tokens", "direct", "gemma3"],
)
def test_ids_are_those_of_transformers(tmp_path, name, source, added):
    chat, theirs = load(tmp_path, name, template(source) if source.startswith("trl/") else source, added)
    messages = [Message("user", ASK), SAID, Message("user", NEXT.partition(" <")[0])]
    dicts = [{"role": "user", "content": ASK}, {"role": "assistant", "content": SAID.content}]
    dicts.append({"role": "user", "content": messages[2].content})
    for count in (1, 3):
        want = theirs.apply_chat_template(dicts[:count], add_generation_prompt=True, return_dict=False)
        assert chat.render(messages[:count]) + chat.generation_prompt == want
    if name == "gemma3":  # its template trims content, and refuses the conversations that `user` is derived from
        return
    sampled = chat.render_assistant(SAID.content, [])
    assert chat.parse(sampled) == SAID
    turns = [*chat.render(messages[:1]), *chat.generation_prompt, *sampled, *chat.close(sampled)]
    assert [*turns, *chat.user([messages[2].content])] == chat.render(messages)


@pytest.mark.parametrize("name", ["llama2", "gemma3"])
def test_documents_and_continued_texts(name):
    from transformers import PreTrainedTokenizerFast

    tok = tokenizer(name)
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer_folder(name) / "tokenizer.json"))
    for text in ("Hello world and all", ASK, " x", "\n\n\t\t<b>   </b>"):
        ids = tok.encode_document(text)
        assert ids == theirs.encode(text, add_special_tokens=False)
        assert tok.decode(tok.encode(text)) == text
    assert tok.decode(tok.encode(NEXT)) == NEXT
    assert not any(tok.is_control(i) for i in tok.encode(NEXT))
    stream = TextStream(tok.decode)
    ids = tok.encode_document("Hello world and all")[1:]
    assert "".join(stream.add([i]) for i in ids) + stream.finish() == " world and all"


def test_white_space_of_gemma_is_text():
    tok = tokenizer("gemma3")
    assert tok.encode("\n") == [107] and tok.encode("\n\n\t") == [108, 255968]
    assert {"<start_of_turn>", "<end_of_turn>", "<bos>"} <= tok.control.keys()
    assert not any(text.isspace() for text in tok.control)


def test_a_prompt_of_qwen_that_fills_in_the_middle():
    from transformers import PreTrainedTokenizerFast

    folder = tokenizer_folder("qwen3")
    text = TextProcessor(text_files(folder), SimpleNamespace(vocab_size=200_000, max_context=4096), "qwen3")
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    prompt = "<|repo_name|>x\n<|file_sep|>a.py\n<|fim_prefix|>def f():\n    <|fim_suffix|>\n\nf()<|fim_middle|>"
    assert text.encode_prompt(prompt, parse_special=True) == theirs.encode(prompt, add_special_tokens=False)
