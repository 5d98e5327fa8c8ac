"""OpenAI's client against a server of a model that writes the harmony format."""

import json

import openai
import pytest

from composer_jax.data.chat.messages import ToolCall
from composer_jax.data.chat.text_processor import TextProcessor
from composer_jax.data.text_files import text_files
from composer_jax.serve.app import new_app
from composer_jax.serve.service import ServerLimits, Service
from tests.data.model_folders import HARMONY, HARMONY_TOKENS, tokenizer_json, write_folder
from tests.serve.conftest import running
from tests.serve.scripted_engine import ScriptedEngine
from tests.stages.base_model import NETWORK

ASK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is in a.py?"}]
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "read", "description": "Reads a file", "parameters": SCHEMA}}]
READ = ToolCall("read", {"path": "a.py"})


@pytest.fixture(scope="module")
def harmony(tmp_path_factory):
    folder = write_folder(tmp_path_factory.mktemp("harmony"), tokenizer_json(HARMONY_TOKENS), HARMONY)
    return TextProcessor(text_files(folder), NETWORK, "gpt")


def test_a_tool_is_declared_called_and_answered(harmony):
    chat = harmony.chat_format

    def write(context):
        if "forty-two" in chat.tokenizer.decode(context):
            return chat.render_assistant("<think>\nEasy.\n</think>\n\nIt holds forty-two.", [])
        return chat.render_assistant("<think>\nI must read.\n</think>\n\nI look.", [READ])

    engine = ScriptedEngine(write, harmony.end_tokens)
    with running(new_app(Service(engine, harmony, ServerLimits()), ())) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        options = dict(model="gpt", messages=ASK, tools=TOOLS)
        choice = client.chat.completions.create(**options).choices[0]
        assert choice.finish_reason == "tool_calls"
        assert (choice.message.reasoning_content, choice.message.content) == ("I must read.", "I look.")
        [call] = choice.message.tool_calls
        assert ToolCall(call.function.name, json.loads(call.function.arguments)) == READ
        prompt = chat.tokenizer.decode(engine.requests[-1].tokens)
        assert "<|start|>developer<|message|>Be brief.\n// Reads a file\ntype read = " in prompt
        assert prompt.endswith("<|start|>user<|message|>What is in a.py?<|end|><|start|>assistant")

        answered = {"role": "tool", "tool_call_id": call.id, "content": "forty-two"}
        said = {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]}
        later = client.chat.completions.create(**options | {"messages": [*ASK, said, answered]}).choices[0]
        assert (later.message.content, later.finish_reason) == ("It holds forty-two.", "stop")
        assert chat.tokenizer.decode(engine.requests[-1].tokens).endswith(
            '<|start|>assistant to=functions.read<|channel|>commentary json<|message|>{"path": "a.py"}<|call|>'
            '<|start|>functions.read to=assistant<|channel|>commentary<|message|>"forty-two"<|end|><|start|>assistant'
        )

        deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(**options, stream=True)]
        reasoning = [delta.reasoning_content for delta in deltas if getattr(delta, "reasoning_content", None)]
        assert "".join(reasoning) == "I must read." and len(reasoning) > 1
        assert "".join(delta.content or "" for delta in deltas) == "I look."
        assert [delta.tool_calls[0].function.name for delta in deltas if delta.tool_calls] == ["read"]


def test_a_message_with_two_calls_is_refused_with_a_sentence(harmony):
    engine = ScriptedEngine(lambda context: [], harmony.end_tokens)
    function = {"name": "read", "arguments": "{}"}
    calls = [{"id": key, "type": "function", "function": function} for key in ("a", "b")]
    answers = [{"role": "tool", "tool_call_id": key, "content": "x"} for key in ("a", "b")]
    with running(new_app(Service(engine, harmony, ServerLimits()), ())) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.BadRequestError, match=r"a message has 2 calls \(read, read\)"):
            messages = [*ASK, {"role": "assistant", "content": "", "tool_calls": calls}, *answers]
            client.chat.completions.create(model="gpt", messages=messages)
