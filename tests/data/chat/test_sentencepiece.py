"""Tokenizers in the style of SentencePiece, which put a space before a text: conversations have their ids."""

import json

import pytest
from tokenizers import Tokenizer

from composer_jax.data.chat.chat_format import Message
from composer_jax.data.chat.load_chat_format import load_chat_format
from composer_jax.data.chat.messages import AssistantMessage, ToolCall
from composer_jax.data.model_tokenizer import ModelTokenizer
from composer_jax.serve.message_stream import MessageStream, TextStream
from tests.data.formats import TEMPLATES as TEMPLATES_OF_FORMS
from tests.data.model_folders import sentencepiece_json, write_folder

TOKENS = dict.fromkeys(("[BOS]", "<|im_end|>", "<|user|>", "<|assistant|>", "[INST]", "[/INST]"), True)
# The roles are tokens, which the text follows at once; or tokens with a line after them; or text.
DIRECT = """
{%- for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|im_end|>' }}{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{%- endif %}"""
LINES = """
{%- for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|im_end|>\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{%- endif %}"""
WORDS = LINES.replace("'<|' + m.role + '|>\n'", "m.role + ':\n'").replace("<|assistant|>", "assistant:")
# As in Mistral's models: a space between the token, or the text, that opens a message of the user and its content.
INST = """{{- bos_token }}
{%- for m in messages %}
{%- if m.role == 'assistant' %}{{ m.content + '<|im_end|>' }}{%- endif %}
{%- if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}{%- endif %}
{%- endfor %}"""
ROLES = INST.replace("[INST]", "user").replace(" [/INST]", "\n")
TEMPLATES = {"direct": DIRECT, "lines": LINES, "words": WORDS, "inst": INST, "roles": ROLES}
MESSAGES = [
    Message("user", "read a.py"),
    AssistantMessage("I look.\n\n  x = 1", (), True),
    Message("user", "And now?"),
    AssistantMessage("\u4e2d, é\U0001f600", (), True),
    Message("user", "  two spaces"),
]


def rendered(chat, messages, tokenizer):
    """The ids that the tokenizer gives to the whole text, as the transformers library encodes it."""
    dicts = [{"role": getattr(m, "role", "assistant"), "content": m.content} for m in messages]
    return Tokenizer.from_str(tokenizer).encode(chat.template.text(dicts, (), True), add_special_tokens=False).ids


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("prefix", ["each", "always", "first", "never"])
@pytest.mark.parametrize("rstrip", [False, True], ids=["", "rstrip"])
def test_a_conversation_has_the_ids_of_its_text(tmp_path, prefix, template, rstrip):
    tokenizer = sentencepiece_json(TOKENS, prefix, rstrip=rstrip)
    chat = load_chat_format(write_folder(tmp_path, tokenizer, TEMPLATES[template]))
    for count in (1, 3, 5):
        ids = chat.render(MESSAGES[:count]) + chat.generation_prompt
        assert ids == rendered(chat, MESSAGES[:count], tokenizer)
    turns = chat.render(MESSAGES[:1])
    for said, following in (MESSAGES[1:3], [MESSAGES[3], Message("user", "And now?")]):
        sampled = chat.render_assistant(said.content, [])
        assert chat.parse(sampled) == said
        user = chat.user([following.content])
        assert chat.user_text(user) == following.content
        turns += [*chat.generation_prompt, *sampled, *chat.close(sampled), *user]
    assert turns == chat.render([*MESSAGES[:4], Message("user", "And now?")])


@pytest.mark.parametrize("prefix", ["each", "first"])
@pytest.mark.parametrize("template", ["direct", "inst"])
def test_a_streamed_message_has_the_text_of_the_whole_one(tmp_path, prefix, template):
    chat = load_chat_format(write_folder(tmp_path, sentencepiece_json(TOKENS, prefix), TEMPLATES[template]))
    for said in ("I look. And now?", " x", ""):
        stream = MessageStream(chat)
        pieces = [stream.add([i]).content for i in chat.render_assistant(said, [])]
        last, message = stream.finish()
        assert "".join([*pieces, last.content]) == message.content == said


@pytest.mark.parametrize("template", ["direct", "lines", "words", "inst"])
@pytest.mark.parametrize("prefix", ["each", "always", "first", "never"])
def test_answers_of_tools_turn_by_turn_are_those_of_the_whole(tmp_path, prefix, template):
    chat = load_chat_format(write_folder(tmp_path, sentencepiece_json(TOKENS, prefix), TEMPLATES[template]))
    calls = (ToolCall("read", {"path": "a.py"}), ToolCall("read", {"path": "b.py"}))
    answers = ["def f():\n    return 1", "x"]
    sampled = chat.render_assistant("I look.", calls)
    pieces = chat.bridge(sampled, answers)
    assert [chat.answer_text(piece) for piece in pieces] == answers
    turns = [*chat.render(MESSAGES[:1]), *chat.generation_prompt, *sampled, *sum(pieces, [])]
    messages = [MESSAGES[0], AssistantMessage("I look.", calls, True), *(Message("tool", text) for text in answers)]
    assert turns == chat.render(messages)


def test_a_call_after_a_control_token_is_read(tmp_path):
    chat = load_chat_format(write_folder(tmp_path, sentencepiece_json(TOKENS, "each"), DIRECT))
    for content in ("", "I look."):
        said = AssistantMessage(content, (ToolCall("read", {"path": "a.py"}),), True)
        assert chat.parse(chat.render_assistant(content, said.calls)) == said


@pytest.mark.parametrize("prefix", ["each", "never"])
@pytest.mark.parametrize("name", ["thinks", "opens", "keys", "xml"])
def test_thinking_and_calls_between_control_tokens_are_read_without_the_spaces(tmp_path, prefix, name):
    tokens, source = TEMPLATES_OF_FORMS[name]
    tokens = tokens | {"<think>": False, "</think>": False}
    source = source.replace("<think>\\n' }}{%- endif %}", "<think>' }}{%- endif %}")  # a token ends the prompt
    chat = load_chat_format(write_folder(tmp_path, sentencepiece_json(tokens, prefix), source))
    calls = (ToolCall("read", {"path": "a.py"}), ToolCall("finish", {}))
    for content in ("It is x.", "<think>\nhm\n</think>\n\nIt is x."):
        if name == "xml" and content.startswith("<think>"):
            continue  # its template has no place for thinking
        said = AssistantMessage(content, calls, True)
        sampled = chat.render_assistant(content, calls)
        assert chat.parse(sampled) == said
        stream = MessageStream(chat)
        pieces = [stream.add([i]) for i in sampled]
        last, message = stream.finish()
        assert "".join(piece.content for piece in [*pieces, last]) == message.content == "It is x."
        assert message.reasoning == ("hm" if "hm" in content else "")
        assert [chat.answer_text(piece) for piece in chat.bridge(sampled, ["one", "two"])] == ["one", "two"]
        user = chat.user(["Go on."], follows=sampled)
        assert chat.user_text(user) == "Go on."


@pytest.mark.parametrize("prefix", ["each", "always", "first", "never"])
def test_a_sampled_body_of_a_user_message_is_kept(tmp_path, prefix):
    chat = load_chat_format(write_folder(tmp_path, sentencepiece_json(TOKENS, prefix), INST))
    summary = chat.tokenizer.encode(" And now?")
    ids = chat.user([summary])
    assert chat.user_text(ids) == "And now?"
    assert chat.user([chat.user_body(ids)]) == ids


@pytest.mark.parametrize("prefix", ["each", "always", "first"])
def test_continued_text_keeps_its_space(prefix):
    tok = ModelTokenizer(sentencepiece_json(TOKENS, prefix), "", "x")
    whole = tok.encode_document("And now? I look.")
    assert tok.decode(whole) == " And now? I look."
    assert tok.encode_batch(["And now?"]) == [whole[: len(tok.encode_document("And now?"))]]
    rest = tok.encode(" now? I look.")
    assert whole == [*tok.encode_document("And"), *rest]
    stream = TextStream(tok.decode)
    assert "".join(stream.add([i]) for i in rest) + stream.finish() == " now? I look."


@pytest.mark.parametrize("prefix", ["each", "always", "first", "never"])
def test_added_tokens_in_a_text_do_not_lose_or_gain_spaces(prefix):
    tokenizer = sentencepiece_json({"<|im_end|>": True, "\n": False, "<b>": False}, prefix)
    tok = ModelTokenizer(tokenizer, "", "x")
    # "always" writes a text with and without a space before it in the same way.
    texts = ["a\nand <b>now</b>", "\n\n", "<b>", "<|im_end|>\n<b>", *([] if prefix == "always" else [" a <b> b\n"])]
    for text in texts:
        assert tok.decode(tok.encode(text)) == text
        ids = tok.encode_document(text.replace("<|im_end|>", "x"))
        own = Tokenizer.from_str(tokenizer).encode(text.replace("<|im_end|>", "x"), add_special_tokens=False).ids
        assert ids == own
        # After other text: the same ids, without the space before the first.
        word = tok.encode_document("I")
        assert [*word, *tok.encode("." + text)] == tok.encode_document("I." + text)
    description = json.loads(tokenizer)
    names = {token["content"]: token["id"] for token in description["added_tokens"]}
    assert names["<b>"] in tok.encode("a<b>") and names["<|im_end|>"] not in tok.encode("a<|im_end|>")
