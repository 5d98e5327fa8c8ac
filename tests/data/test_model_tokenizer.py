"""Tokenizers of published models: what every TextTokenizer offers, and where their files are read from."""

import itertools
import json

import fsspec
import pytest
import tokenizers

from composer_jax.data.chat.load_chat_format import load_chat_format, load_tokenizer
from composer_jax.data.chat.messages import AssistantMessage, ToolCall
from composer_jax.data.model_tokenizer import ModelTokenizer
from composer_jax.data.text_tokenizer import TextTokenizer, check_vocab_size
from composer_jax.data.tokenizer import Tokenizer
from composer_jax.errors import UserError
from tests.data.model_folders import QWEN, QWEN_TOKENS, TEXTS, tokenizer_json, write_folder

QWEN_JSON = tokenizer_json(QWEN_TOKENS)
IDS = {token["content"]: token["id"] for token in json.loads(QWEN_JSON)["added_tokens"]}
END, ENDOFTEXT = IDS["<|im_end|>"], IDS["<|endoftext|>"]
READ = ToolCall("read", {"path": "a.py"})


class Texts:
    """Files in memory, as a GGUF file presents them."""

    name = "model.gguf"

    def __init__(self, **texts):
        self.texts = texts

    def text(self, file):
        return self.texts.get(file.split(".")[0])


def qwen_texts(generation=None, **config):
    texts = {"tokenizer": QWEN_JSON, "chat_template": QWEN, "tokenizer_config": json.dumps(config)}
    return Texts(**texts, **({"generation_config": json.dumps(generation)} if generation else {}))


@pytest.mark.parametrize("kind", ["ours", "published"])
def test_every_tokenizer_offers_the_same(kind):
    tok: TextTokenizer = (
        Tokenizer.train(TEXTS, 300) if kind == "ours" else load_tokenizer(qwen_texts({"eos_token_id": 1}))
    )
    texts = ["def f():\n    return 1\n", "", "<|im_end|><|end|> é", "\ud800"]
    assert tok.encode_batch(texts) == [tok.encode(text) for text in texts]
    assert [tok.decode(ids) for ids in tok.encode_batch(texts)] == [*texts[:3], "\ufffd"]
    assert all(0 <= i < tok.vocab_size for i in (tok.eod, tok.pad, *sum(tok.encode_batch(texts), [])))
    assert tok.decode([tok.vocab_size]) == "\ufffd" != tok.decode([tok.vocab_size - 1])
    assert len(tok.fingerprint) == 16


def test_the_fingerprint_follows_the_encoding():
    tok = load_tokenizer(qwen_texts())
    assert tok.fingerprint == load_tokenizer(qwen_texts(eos_token="<|im_end|>")).fingerprint
    others = [tokenizer_json(QWEN_TOKENS, vocab_size=280), QWEN_JSON]
    templates = [QWEN, ""]  # without the template, <tool_call> is not a control token
    prints = [ModelTokenizer(*pair, "x").fingerprint for pair in zip(others, templates, strict=True)]
    assert len({tok.fingerprint, *prints}) == 3


@pytest.mark.parametrize(
    ("eos_token", "eos_token_id", "eod"),
    [
        ("<|im_end|>", None, END),
        ({"content": "<|endoftext|>"}, None, ENDOFTEXT),
        (None, END, END),
        ("<|im_end|>", [END, ENDOFTEXT], ENDOFTEXT),  # what ends no message of the template ends a document
        ("<|im_end|>", [END], END),
    ],
)
def test_the_id_that_ends_a_document(eos_token, eos_token_id, eod):
    generation = None if eos_token_id is None else {"eos_token_id": eos_token_id}
    tok = load_tokenizer(qwen_texts(generation, eos_token=eos_token))
    assert (tok.eod, tok.pad) == (eod, eod)
    assert (
        load_tokenizer(qwen_texts(generation, eos_token=eos_token, pad_token="<|im_start|>")).pad == IDS["<|im_start|>"]
    )


def test_the_id_0_may_pad_and_ids_may_have_gaps():
    description = json.loads(QWEN_JSON)
    vocab = description["model"]["vocab"]
    first, last = min(vocab, key=vocab.get), max(vocab, key=vocab.get)
    vocab[last] = 500
    config = {"eos_token": "<|im_end|>", "pad_token": first}
    tok = ModelTokenizer(json.dumps(description), QWEN, "x", config=config)
    assert (tok.pad, tok.vocab_size) == (0, 501)


def test_a_model_without_an_end_of_text_says_so_when_it_is_asked():
    tok = load_tokenizer(qwen_texts())
    with pytest.raises(UserError, match="model.gguf names no end of text; set eos_token"):
        _ = tok.eod


def test_bos_is_what_the_model_expects_before_a_text():
    post = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}]}
    post["single"].append({"Sequence": {"id": "A", "type_id": 0}})
    post |= {"pair": post["single"], "special_tokens": {}}
    post["special_tokens"] = {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [ENDOFTEXT], "tokens": ["<|endoftext|>"]}}
    adds = json.dumps(json.loads(QWEN_JSON) | {"post_processor": post})

    def bos(text, **config):
        return ModelTokenizer(text, QWEN, "x", config={"bos_token": "<|endoftext|>", **config}).bos

    assert bos(adds) == bos(QWEN_JSON, add_bos_token=True) == ENDOFTEXT
    assert bos(QWEN_JSON) is bos(adds, add_bos_token=False) is bos(adds, bos_token=None) is None


def test_added_tokens_that_are_not_control_tokens_keep_their_ids():
    description = json.loads(QWEN_JSON)
    tok = ModelTokenizer(QWEN_JSON, "", "x")  # the markers of calls are special nowhere
    text = "a<tool_call>\n</tool_response><|im_end|>"
    assert [i for i in tok.encode(text) if i >= ENDOFTEXT] == [IDS["<tool_call>"], IDS["</tool_response>"]]
    assert tok.decode(tok.encode(text)) == text
    description["model"]["vocab"] |= {"<|im_start|>": IDS["<|im_start|>"]}  # a hole where a control token was
    assert ModelTokenizer(json.dumps(description), "", "x").encode(text) == tok.encode(text)


def test_a_tokenizer_larger_than_the_embedding_is_refused():
    tok = load_tokenizer(qwen_texts())
    check_vocab_size(tok, tok.vocab_size, "hf:x")
    check_vocab_size(tok, tok.vocab_size + 64, "hf:x")
    sentence = f"the tokenizer of hf:x has {tok.vocab_size} ids and the embedding {tok.vocab_size - 1} rows"
    with pytest.raises(UserError, match=sentence):
        check_vocab_size(tok, tok.vocab_size - 1, "hf:x")


def test_files_come_from_a_folder_a_url_or_a_container(tmp_path):
    folder = write_folder(tmp_path, QWEN_JSON, QWEN)
    memory = fsspec.filesystem("memory")
    for file in folder.iterdir():
        memory.pipe_file(f"/bucket/model/{file.name}", file.read_bytes())
    chats = [load_chat_format(source) for source in (folder, str(folder), "memory://bucket/model/", qwen_texts())]
    assert len({tuple(chat.render_assistant("x", [READ])) for chat in chats}) == 1
    (folder / "generation_config.json").write_bytes(b"\xff")
    nothing = [(source, "has no tokenizer.json") for source in (Texts(), tmp_path / "none", "memory://bucket/none")]
    for source, words in (
        *nothing,
        ("nosuch://x", "neither a folder nor a readable URL"),
        (folder, "generation_config.json cannot be read"),
        (qwen_texts({"eos_token_id": "x"}), "eos_token_id='x'; it must be a token id"),
    ):
        with pytest.raises(UserError, match=words):
            load_tokenizer(source)


def test_every_end_token_ends_a_message():
    chat = load_chat_format(qwen_texts({"eos_token_id": [END, ENDOFTEXT]}))
    assert chat.end_tokens == (END, ENDOFTEXT)
    assert load_chat_format(qwen_texts({"eos_token_id": ENDOFTEXT})).end_tokens == (END, ENDOFTEXT)
    assert load_chat_format(qwen_texts()).end_tokens == (END,)
    whole = chat.render_assistant("so", [READ])
    other = [*whole[:-1], ENDOFTEXT]
    assert chat.parse(other) == AssistantMessage("so", (READ,), True) == chat.parse([*other, 1, 2])
    assert chat.close(other) == [END, *chat.close(whole)], "the template needs its own end"
    assert chat.bridge(other, ["x"])[0] == [END, *chat.bridge(whole, ["x"])[0]]


def added(text, texts):
    """A tokenizer with more tokens, which are not special."""
    description = json.loads(text)
    numbers = itertools.count(max(token["id"] for token in description["added_tokens"]) + 1)
    entry = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True, "special": False}
    ids = [known if (known := description["model"]["vocab"].get(text)) is not None else next(numbers) for text in texts]
    description["added_tokens"] += [{"id": i, "content": text, **entry} for i, text in zip(ids, texts, strict=True)]
    return json.dumps(description)


def test_added_tokens_that_are_text_are_no_control_tokens():
    """White space, words and punctuation, even if the template has them; and what the tokenizer cuts otherwise."""
    text = ("\n", "\n\n", "\t", "a", "message", "->", "{%", "<tool", "tool_call>")
    description = added(QWEN_JSON, text)
    tok = ModelTokenizer(description, QWEN + "->", "x")
    assert tok.control.keys() == QWEN_TOKENS.keys()
    ids = tok.encode("a\n\n\t->\nmessage")
    assert ids == tokenizers.Tokenizer.from_str(description).encode("a\n\n\t->\nmessage").ids
    assert len(ids) == 6 and tok.decode(ids) == "a\n\n\t->\nmessage"


def test_a_template_with_added_line_ends_is_loaded():
    template = "{% for m in messages %}\n{{ m.role }} {{ m.content }}<|im_end|>\n{% endfor %}"
    texts = {"tokenizer": added(QWEN_JSON, ["\n"]), "chat_template": template, "tokenizer_config": "{}"}
    chat = load_chat_format(Texts(**texts))
    assert "\n" not in chat.tokenizer.control
    assert chat.render_assistant("a\nb", [])[-4:] == [*chat.tokenizer.encode("a\nb"), END]
