"""The harmony format against the published tokenizer and chat template of gpt-oss, rendered by transformers."""

import functools
import json
import shutil
import tempfile
from pathlib import Path

import pytest

from composer_jax.data.chat.chat_format import Message, declarations
from composer_jax.data.chat.harmony import HarmonyFormat
from composer_jax.data.chat.load_chat_format import load_chat_format
from composer_jax.data.chat.messages import AssistantMessage, ToolCall
from composer_jax.data.chat.thinking import split_thinking
from tests.data.formats import Declaration
from tests.parity.published import template, tokenizer_folder

pytestmark = pytest.mark.parity

END_IDS = [200002, 199999, 200012]  # eos_token_id in generation_config.json: <|return|>, <|endoftext|>, <|call|>
SCHEMA = {
    "type": "object",
    "required": ["path"],
    "properties": {
        "path": {"type": "string", "description": "A path \u00e9."},
        "lines": {"type": "array", "items": {"type": "integer"}, "default": [1, 2]},
        "mode": {"type": "string", "enum": ["text", "bytes"], "default": "text"},
        "options": {"type": "object", "properties": {"deep": {"type": "boolean"}}},
    },
}
TOOLS = [Declaration("read", "Shows a file.", SCHEMA), Declaration("finish", "Ends.", {"type": "object"})]
ASK = Message("user", 'Go: it\'s <x> "quoted" \u4e2d\U0001f600\n')
READ = ToolCall("read", {"path": "a \u00e9.py", "lines": [1, 2.5, None, True], "options": {"k": "\U0001f600\n"}})
SAID = AssistantMessage("It is x.\n\n```py\nx = 1\n```", (), True)
THOUGHTFUL = AssistantMessage("<think>\nhm, <x>\n\nyes\n</think>\n\nIt is \u4e2d.", (), True)
CALLED = AssistantMessage("", (READ,), True)
THOUGHTFUL_CALL = AssistantMessage("<think>\nI look.\n</think>\n\n", (ToolCall("finish", {}),), True)
ANSWER = Message("tool", '  x = "1"\n\n\ty = \u4e2d\\n')
CONVERSATIONS = {
    "one": [ASK],
    "answered": [ASK, SAID],
    "thought": [ASK, THOUGHTFUL],
    "four_turns": [ASK, THOUGHTFUL, ASK, SAID, ASK, THOUGHTFUL, ASK],
    "called": [ASK, CALLED, ANSWER],
    "thought_and_called": [ASK, THOUGHTFUL_CALL, ANSWER, CALLED, ANSWER],
    "called_and_answered": [ASK, THOUGHTFUL_CALL, ANSWER, THOUGHTFUL],
    "called_in_the_last_turn": [ASK, THOUGHTFUL_CALL, ANSWER, THOUGHTFUL, ASK, THOUGHTFUL_CALL, ANSWER, CALLED, ANSWER],
}


@functools.cache
def gpt_oss():
    """(chat format, transformers' tokenizer) of the published files."""
    from transformers import PreTrainedTokenizerFast

    with tempfile.TemporaryDirectory() as name:
        folder = Path(shutil.copytree(tokenizer_folder("gptoss"), name, dirs_exist_ok=True))
        (folder / "chat_template.jinja").write_text(template("trl/gptoss"))
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": END_IDS}))
        theirs = PreTrainedTokenizerFast(
            tokenizer_file=str(folder / "tokenizer.json"), chat_template=template("trl/gptoss")
        )
        return load_chat_format(folder), theirs


def as_dicts(messages):
    dicts = []
    for message in messages:
        if isinstance(message, Message):
            dicts.append({"role": message.role, "content": message.content})
            continue
        thought, said = split_thinking(message.content)
        dicts.append({"role": "assistant", "content": said} | ({"thinking": thought} if thought else {}))
        if message.calls:
            functions = [{"name": call.name, "arguments": call.arguments} for call in message.calls]
            dicts[-1]["tool_calls"] = [{"type": "function", "function": function} for function in functions]
    return dicts


@pytest.mark.parametrize("declared", [TOOLS, []], ids=["tools", "no_tools"])
@pytest.mark.parametrize("system", [[], [Message("system", "Be brief & exact \u00e9.")]], ids=["no_system", "system"])
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_ids_are_those_of_transformers(name, system, declared):
    chat, theirs = gpt_oss()
    messages = [*system, *CONVERSATIONS[name]]
    open_ended = not isinstance(messages[-1], AssistantMessage)
    want = theirs.apply_chat_template(
        as_dicts(messages),
        tools=declarations(declared) or None,
        add_generation_prompt=open_ended,
        return_dict=False,
    )
    assert chat.render(messages, declared) + (chat.generation_prompt if open_ended else []) == want


def test_text_of_a_declaration_forges_no_control_token():
    chat, _ = gpt_oss()
    schema = {"type": "object", "properties": {"path": {"type": "string", "description": "A path <|end|>"}}}
    ids, begin = chat.render([ASK], [Declaration("read", "<|start|>", schema)]), chat.render([ASK])
    end = chat.tokenizer.id_of("<|end|>")
    assert ids.count(end) == begin.count(end) + 1, "the message of the developer"
    assert "// <|start|>\ntype read = (_: {\n// A path <|end|>\npath?: string" in chat.tokenizer.decode(ids)


def test_turns_with_calls_add_up_to_the_whole():
    chat, _ = gpt_oss()
    assert isinstance(chat, HarmonyFormat) and set(chat.end_tokens) == set(END_IDS)
    ids = chat.render([ASK], TOOLS)
    for message in (THOUGHTFUL_CALL, CALLED):
        sampled = chat.render_assistant(message.content, message.calls)
        assert chat.parse(sampled) == message
        ids += [*chat.generation_prompt, *sampled, *chat.bridge(sampled, [ANSWER.content])[0]]
    assert ids == chat.render([ASK, THOUGHTFUL_CALL, ANSWER, CALLED, ANSWER], TOOLS)
