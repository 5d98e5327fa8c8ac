"""Our rendering of chat templates against that of the transformers library, in text and in token ids."""

import json

import pytest

from composer_jax.data.chat.chat_format import Message, declarations
from composer_jax.data.chat.load_chat_format import load_chat_format
from composer_jax.data.chat.messages import AssistantMessage, ToolCall
from composer_jax.data.chat.typescript_tools import VARIABLE, typescript_declarations
from tests.data.formats import TEMPLATES, Declaration
from tests.data.model_folders import (
    KIMI,
    KIMI_OPENS,
    KIMI_THINKING,
    KIMI_THINKING_TOKENS,
    KIMI_TOKENS,
    QWEN,
    QWEN_TOKENS,
    tokenizer_json,
    write_folder,
)

pytestmark = pytest.mark.parity

CALLS = (ToolCall("read", {"path": "a é.py", "lines": [1, 2.5, None, True]}), ToolCall("run_tests", {}))
TOOLS = [Declaration("read", "Shows <b>a</b> file.", {"type": "object", "properties": {"path": {"type": "string"}}})]
MESSAGES = [
    Message("system", "Be brief & exact."),
    Message("user", 'Go: it\'s <x> "quoted" \u4e2d\U0001f600'),
    AssistantMessage("I look.\n", CALLS, True),
    Message("tool", "  x = 1\n\n\ty = 2"),
    Message("tool", ""),
    AssistantMessage("", CALLS[:1], True),
    Message("tool", "ok\n"),
]
# A template that uses what the environment offers beside plain Jinja.
EXTRAS = QWEN.replace(
    "{%- for message in messages %}",
    "{{- bos_token }}{{ tools | tojson(indent=2) }}\n   {% for i in range(9) %}\n{% if i > 2 %}{% break %}{% endif %}\n"
    "{{ i }} & {{ ['<b>', 'ü'] | tojson }} {{ strftime_now('%%') }}\n{% endfor %}\n{%- for message in messages %}",
    1,
)


def as_dicts(messages):
    """As transformers wants them; ids as the style makes them."""
    ids, names, count, dicts = [], [], 0, []
    for message in messages:
        if isinstance(message, AssistantMessage):
            ids = [f"functions.{call.name}:{number}" for number, call in enumerate(message.calls, count)]
            names = [call.name for call in message.calls]
            count += len(ids)
            functions = [{"name": call.name, "arguments": call.arguments} for call in message.calls]
            asked = [{"id": key, "type": "function", "function": f} for key, f in zip(ids, functions, strict=True)]
            dicts.append({"role": "assistant", "content": message.content})
            if asked:
                dicts[-1]["tool_calls"] = asked
        else:
            answered = {"name": names.pop(0), "tool_call_id": ids.pop(0)} if message.role == "tool" else {}
            dicts.append({"role": message.role, "content": message.content, **answered})
    return dicts


@pytest.mark.parametrize("declared", [TOOLS, []], ids=["tools", "no_tools"])
@pytest.mark.parametrize(
    ("tokens", "template"),
    [
        (QWEN_TOKENS, QWEN),
        (QWEN_TOKENS | {"[BOS]": True}, EXTRAS),
        (KIMI_TOKENS, KIMI),
        (KIMI_THINKING_TOKENS, KIMI_THINKING),
        (KIMI_THINKING_TOKENS, KIMI_OPENS),
    ],
    ids=["qwen", "extras", "kimi", "kimi_thinking", "kimi_opens"],
)
def test_ids_are_those_of_transformers(tmp_path, tokens, template, declared):
    from transformers import PreTrainedTokenizerFast

    folder = write_folder(tmp_path, tokenizer_json(tokens), template)
    chat = load_chat_format(folder)
    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), chat_template=template, bos_token="[BOS]", eos_token="<|im_end|>"
    )
    tools = declarations(declared) or None
    extra = {}
    if "<|im_middle|>" in tokens:  # the tokenizer of Kimi, which is code, sorts the keys and writes the TypeScript
        tools = json.loads(json.dumps(tools, sort_keys=True))
        extra = {VARIABLE: typescript_declarations(tools)} if tools else {}
    for length in (2, 5, 7):
        want = theirs.apply_chat_template(
            as_dicts(MESSAGES[:length]), tools=tools, add_generation_prompt=True, return_dict=False, **extra
        )
        assert chat.render(MESSAGES[:length], declared) + chat.generation_prompt == want


@pytest.mark.parametrize("name", ["chatml", "headers", "thinks", "opens"])
def test_a_given_conversation_without_calls_has_the_ids_of_transformers(tmp_path, name):
    """Where the template drops thinking, adds a system message and the day, or begins the thinking in its prompt."""
    from transformers import PreTrainedTokenizerFast

    tokens, template = TEMPLATES[name]
    folder = write_folder(tmp_path, tokenizer_json(tokens), template)
    chat = load_chat_format(folder)
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), chat_template=template)
    said = AssistantMessage("<think>\nhm, <x>\n</think>\n\nIt is x.", (), True)
    ask = Message("user", 'it\'s "quoted" \u4e2d\U0001f600')
    for system in ([], [Message("system", "Be brief & exact.")]):
        for messages in ([*system, ask], [*system, ask, said, ask], [*system, ask, said, ask, said, ask]):
            want = theirs.apply_chat_template(as_dicts(messages), add_generation_prompt=True, return_dict=False)
            assert chat.render(messages) + chat.generation_prompt == want
        whole = [*system, ask, said, ask, said]
        want = theirs.apply_chat_template(as_dicts(whole), return_dict=False)
        assert chat.render(whole) == want[: len(want) - len(chat.close([chat.end]))]
