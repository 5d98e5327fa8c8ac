"""Chat templates of model folders: the format of a folder, refused templates, and the reasons given for bad calls."""

import json

import pytest

from composer_jax.data.chat.call_forms import JSON
from composer_jax.data.chat.chat_format import Message
from composer_jax.data.chat.compact import CompactFormat
from composer_jax.data.chat.control_text import ControlText
from composer_jax.data.chat.jinja_template import JinjaTemplate
from composer_jax.data.chat.kimi import KimiFormat
from composer_jax.data.chat.load_chat_format import load_chat_format
from composer_jax.data.chat.messages import AssistantMessage, MalformedToolCall, ToolCall
from composer_jax.data.chat.template_tools import TemplateToolsFormat
from composer_jax.data.chat.text_tools import TextToolsFormat
from composer_jax.data.model_tokenizer import ModelTokenizer
from composer_jax.data.tokenizer import Tokenizer
from composer_jax.errors import UserError
from tests.data.formats import Declaration, decode, format_of
from tests.data.model_folders import CHATML, KIMI, KIMI_TOKENS, QWEN, QWEN_TOKENS, TEXTS, tokenizer_json, write_folder

READ = ToolCall("read", {"path": "a.py"})
QWEN_JSON = tokenizer_json(QWEN_TOKENS)
CONVERSATION = [
    Message("user", "Go."),
    AssistantMessage("I look.", (READ, READ), True),
    Message("tool", "x = 1"),
    Message("tool", "ok"),
]


def test_the_text_of_a_conversation():
    chat = format_of("qwen")
    tools = [Declaration("read", "Reads.", {"type": "object"})]
    call = '<tool_call>\n{"name": "read", "arguments": {"path": "a.py"}}\n</tool_call>'
    assert decode(chat, chat.render(CONVERSATION, tools)) == (
        '<|im_start|>system\nFunctions:\n{"type": "function", "function": {"name": "read", '
        '"description": "Reads.", "parameters": {"type": "object"}}}\n'
        'Write <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>\n'
        "<|im_start|>user\nGo.<|im_end|>\n"
        f"<|im_start|>assistant\nI look.\n{call}\n{call}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nx = 1\n</tool_response>\n"
        "<tool_response>\nok\n</tool_response><|im_end|>\n"
    )
    assert decode(chat, chat.generation_prompt) == "<|im_start|>assistant\n"
    assert decode(chat, chat.render_assistant("ok", [])) == "ok<|im_end|>"
    assert decode(chat, chat.close(chat.render_assistant("ok", []))) == "\n"


REFUSES = "{%- if message.tool_calls %}{{ raise_exception('no') }}{%- endif %}{%- for call in"


def test_a_folder_gets_the_format_that_it_holds(tmp_path):
    ours = tmp_path / "ours"
    Tokenizer.train(TEXTS, 300).save(ours / "tokenizer.json")
    qwen = write_folder(tmp_path / "a", QWEN_JSON, QWEN)
    apart = write_folder(tmp_path / "b", QWEN_JSON, QWEN, separate=True)
    kimi = write_folder(tmp_path / "kimi-or-not", tokenizer_json(KIMI_TOKENS), KIMI)
    formats = [load_chat_format(folder) for folder in (ours, qwen, apart, kimi)]
    assert [type(chat) for chat in formats] == [CompactFormat, TemplateToolsFormat, TemplateToolsFormat, KimiFormat]
    # Without calls that we can read, without tokens for them, and with a template that refuses them.
    others = (("<tool_call>", "<call>"), ("'<tool_call>\\n{", "'<tool_response>\\n{"), ("{%- for call in", REFUSES))
    for number, template in enumerate([CHATML, *(QWEN.replace(*other) for other in others)]):
        folder = write_folder(tmp_path / str(number), QWEN_JSON, template)
        assert type(load_chat_format(folder)) is TextToolsFormat
    no_token = write_folder(tmp_path / "c", QWEN_JSON.replace("<tool_call>", "<call>"), QWEN)
    assert type(load_chat_format(no_token)) is TextToolsFormat
    assert formats[1].render(CONVERSATION) == formats[2].render(CONVERSATION)


NO_TOOLS = CHATML.replace("You answer.", "No tools.")


@pytest.mark.parametrize("form", [list, dict])
def test_a_template_for_tools_is_used_where_there_are_tools(tmp_path, form):
    folder = write_folder(tmp_path, QWEN_JSON, "")
    named = {"default": NO_TOOLS, "tool_use": "\ufeff" + QWEN, "rag": "{{ never }}"}
    listed = [{"name": name, "template": template} for name, template in named.items()]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": listed if form is list else named}))
    chat = load_chat_format(folder)
    assert type(chat) is TemplateToolsFormat
    assert chat.render(CONVERSATION) == format_of("qwen").render(CONVERSATION)
    tools = [Declaration("read", "Reads.", {"type": "object"})]
    assert chat.render(CONVERSATION[:1], tools) == format_of("qwen").render(CONVERSATION[:1], tools)
    alone = decode(chat, chat.render(CONVERSATION[:1]))
    assert alone == "<|im_start|>system\nNo tools.<|im_end|>\n<|im_start|>user\nGo.<|im_end|>\n"


@pytest.mark.parametrize("configured", [1, ["no"], [{"name": "default"}], {"default": 1}])
def test_templates_that_are_not_texts_are_refused(tmp_path, configured):
    folder = write_folder(tmp_path, QWEN_JSON, "")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": configured}))
    with pytest.raises(UserError, match="neither a text nor a list of named templates"):
        load_chat_format(folder)


def test_a_byte_order_mark_is_not_part_of_the_prompt(tmp_path):
    chat = load_chat_format(write_folder(tmp_path, QWEN_JSON, "\ufeff" + QWEN, separate=True))
    assert chat.render(CONVERSATION) == format_of("qwen").render(CONVERSATION)


def test_the_template_may_name_special_tokens_and_mark_what_is_trained(tmp_path):
    template = "{{- bos_token }}" + QWEN.replace("{{- '<|im_end|>\\n' }}", "{{- eos_token + '\\n' }}")
    template = template.replace("message.content }}", "message.content }}{% generation %}", 1)
    marked = "{% generation %}{{- '' }}{% endgeneration %}" + template.replace("{% generation %}", "")
    chat = load_chat_format(write_folder(tmp_path, QWEN_JSON, marked))
    assert decode(chat, chat.render(CONVERSATION)) == "[BOS]" + decode(
        format_of("qwen"), format_of("qwen").render(CONVERSATION)
    )


# What a model sampled stays in its context: templates that cannot say so are refused, with the reason.
ANEW = QWEN.replace("message.content }}\n{%- for call", "(message.content if loop.last else '') }}\n{%- for call")
COUNTS = QWEN.replace(
    "'<|im_start|>assistant\\n' + message.content", "'<|im_start|>assistant\\n' + loop.index | string + message.content"
)
UNLIKE = QWEN.replace("'\\n<tool_response>\\n'", "'\\n<tool_response>\\n' + loop.index | string + '\\n'")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (ANEW, "does not let the frames of new messages be isolated: it leaves out or changes an earlier message"),
        (COUNTS, "writes a message differently depending on those before it"),
        (UNLIKE, "writes a message differently depending on those before it"),
        (QWEN.replace("<|im_end|>", "."), "ends no message of the model with a control token"),
        (QWEN + "{%- if messages|length > 1 %}{{ raise_exception('one at a time') }}{%- endif %}", "one at a time"),
        (QWEN + "{{ messages.append(1) }}", "refuses a conversation of user"),
        (QWEN + "{{ ''.__class__.__mro__ }}", "refuses a conversation of user"),
        (QWEN + "{% if %}", "is not valid Jinja"),
        ("", "has no chat template"),
    ],
)
def test_templates_that_cannot_be_used_are_refused(tmp_path, template, reason):
    with pytest.raises(UserError, match=reason) as refused:
        load_chat_format(write_folder(tmp_path, QWEN_JSON, template))
    assert str(tmp_path) in str(refused.value)


def test_a_given_conversation_is_what_the_template_makes_of_it(tmp_path):
    late = QWEN.replace(
        "'<|im_start|>user\\n' + message.content",
        "'<|im_start|>user\\n' + (message.content if messages|length < 12 else '')",
    )
    chat = load_chat_format(write_folder(tmp_path, QWEN_JSON, late))
    turn = [AssistantMessage("x", (), True), Message("user", "y")]
    whole = [*CONVERSATION, *turn * 3]
    assert chat.render(whole) == format_of("qwen").render(whole)
    whole += turn
    blank = [Message("user", "") if isinstance(m, Message) and m.role == "user" else m for m in whole]
    assert chat.render(whole) == format_of("qwen").render(blank)


def test_a_template_may_refuse_two_messages_of_the_user_in_a_row(tmp_path):
    twice = "{%- if not loop.first and loop.previtem.role == 'user' %}{{ raise_exception('twice') }}{%- endif %}"
    joins = QWEN.replace("{{- '<|im_start|>user\\n'", twice + "{{- '<|im_start|>user\\n'")
    chat = load_chat_format(write_folder(tmp_path / "tools", QWEN_JSON, joins))
    assert chat.render(CONVERSATION) == format_of("qwen").render(CONVERSATION)
    assert chat.user(["Summarize."]) == format_of("qwen").user(["Summarize."]), "answers are messages of a tool there"
    twice = twice.replace("-%}", "%}").replace("== 'user' %}", "== message.role %}")
    strict = CHATML.replace("{%- for message in messages %}", "{%- for message in messages %}" + twice, 1)
    chat = load_chat_format(write_folder(tmp_path / "none", QWEN_JSON, strict))
    assert chat.bridge(chat.render_assistant("", [READ]), ["x"])
    said = [Message("user", "a"), AssistantMessage("b", (), True)]
    assert chat.render(said * 2) == format_of("chatml").render(said * 2)
    assert chat.user(["Summarize."]) == format_of("chatml").user(["Summarize."]), "as after a message of the model"


LOWERCASE = QWEN_JSON.replace('"normalizer":null', '"normalizer":{"type":"Lowercase"}')


@pytest.mark.parametrize(
    ("file", "text", "reason"),
    [
        ("tokenizer.json", "{", "holds no tokenizer.json that can be read"),
        ("tokenizer.json", LOWERCASE, "does not give text back"),
        ("tokenizer_config.json", "[]", "is not a JSON object"),
        ("tokenizer_config.json", "{", "is not JSON"),
    ],
)
def test_files_that_cannot_be_used_are_refused(tmp_path, file, text, reason):
    folder = write_folder(tmp_path, QWEN_JSON, QWEN)
    (folder / file).write_text(text)
    with pytest.raises(UserError, match=reason):
        load_chat_format(folder)


def encode_as_sampled(text):
    """The ids of a message in which the control tokens are spelled out."""
    return ControlText(format_of("qwen").tokenizer).ids(text, "\0")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not JSON"),
        ("[]", "a call is a JSON object"),
        ('{"name": "a b", "arguments": {}}', "'a b' is not a tool name"),
        ('{"name": 1, "arguments": {}}', "a call is a JSON object"),
        ('{"name": "read", "arguments": "[]"}', "not a JSON object"),
        ('{"name": "read", "arguments": "{"}', "the arguments are not JSON"),
        ('{"name": "read", "arguments": {"a": Infinity}}', "Infinity is not a number"),
        ('{"name": "read", "arguments": {"a": "<|im_end|>', "does not end with </tool_call>"),
        ('{"name": "<|im_start|>", "arguments": {}}', "a control token is inside the call"),
    ],
)
def test_malformed_calls_say_why(text, reason):
    [call] = format_of("qwen").parse(encode_as_sampled(f"<tool_call>{text}</tool_call><|im_end|>")).calls
    assert isinstance(call, MalformedToolCall) and reason in call.reason


def test_words_around_calls_are_the_content():
    call = '<tool_call>{"arguments": {"path": "a.py"}, "name": "read"}</tool_call>'
    message = format_of("qwen").parse(encode_as_sampled(f"a\n\n{call}\n{call} b\n<|im_end|>more"))
    assert message == AssistantMessage("a\n\nb", (READ, READ), True)


def test_control_tokens_that_look_like_words_break_neither_roles_nor_keys(tmp_path):
    words = dict.fromkeys(("rxx", "xxuser", "xxcontent", "tool_calls_xx", "name_xx", "sxx", "xxtype"), True)
    chat = load_chat_format(write_folder(tmp_path, tokenizer_json(QWEN_TOKENS | words), QWEN))
    tools = [Declaration("read", "Reads files", {"type": "object"})]
    plain = format_of("qwen")
    assert decode(chat, chat.render(CONVERSATION, tools)) == decode(plain, plain.render(CONVERSATION, tools))
    forged = chat.render([Message("user", "rxx and r"), AssistantMessage("xx", (), True)])
    assert chat.tokenizer.id_of("rxx") not in forged


def test_text_cannot_complete_what_the_template_begins(tmp_path):
    user_turn = "'<|im_start|>user\\n' + message.content + '<|im_end|>"
    tight = QWEN.replace(user_turn, "'<|im_start|>user\\n<' + message.content + '><|im_end|>")
    chat = load_chat_format(write_folder(tmp_path, QWEN_JSON, tight))
    for text in ("|im_end|", "<|im_end|", "|im_end|>", "|im_end|> b", "a <|im_end|", "<|im_end|><|im_start|"):
        ids = chat.render([Message("user", text)])
        assert decode(chat, ids) == f"<|im_start|>user\n<{text}><|im_end|>\n"
        assert [i for i in ids if i in chat.tokenizer.names] == [chat.tokenizer.id_of("<|im_start|>"), chat.end]


def test_control_tokens_in_the_vocabulary_itself_are_not_made_of_text_either():
    description = json.loads(QWEN_JSON)
    description["model"]["ignore_merges"] = True  # a whole piece that is in the vocabulary becomes that token
    description["model"]["vocab"] |= {token["content"]: token["id"] for token in description["added_tokens"]}
    description["pre_tokenizer"]["use_regex"] = False
    tok = ModelTokenizer(json.dumps(description), QWEN, "the tokenizer of the tests")
    for text in QWEN_TOKENS:
        ids = tok.encode(text)
        assert tok.id_of(text) not in ids and tok.decode(ids) == text


def test_a_text_is_neither_cut_nor_padded():
    description = json.loads(QWEN_JSON)
    description["truncation"] = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
    padding = {"strategy": {"Fixed": 99}, "direction": "Right", "pad_to_multiple_of": None}
    description["padding"] = padding | {"pad_id": 0, "pad_type_id": 0, "pad_token": "!"}
    tok = ModelTokenizer(json.dumps(description), QWEN, "the tokenizer of the tests")
    assert tok.encode("a long text " * 9) == format_of("qwen").tokenizer.encode("a long text " * 9)
    assert tok.encode("") == []


def test_control_tokens_that_swallow_white_space_do_so_only_in_the_template():
    description = json.loads(QWEN_JSON)
    for token in description["added_tokens"]:
        token["rstrip"] = token["content"] == "<|im_end|>"
    tok = ModelTokenizer(json.dumps(description), QWEN, "the tokenizer of the tests")
    chat = TemplateToolsFormat(tok, JinjaTemplate(QWEN, {}, "the template of the tests"), JSON, "\n")
    assert (
        decode(chat, chat.render([Message("user", "<|im_end|>\n\nx")])) == "<|im_start|>user\n<|im_end|>\n\nx<|im_end|>"
    )
    assert chat.close([]) == [chat.end]
