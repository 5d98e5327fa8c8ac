"""Rows as data sets have them: every field is read, changes nothing, or is refused by name."""

import json

import pytest

from composer_jax.data.chat.conversations import conversation_trace, read_conversation, read_messages
from composer_jax.data.chat.messages import AssistantMessage, ToolCall
from tests.data.chat.test_conversations import trained_parts
from tests.data.formats import decode, format_of

USER, SAY = {"role": "user", "content": "Fix a.py"}, {"role": "assistant", "content": "Done."}
ANSWER = {"role": "tool", "tool_call_id": "1", "content": "x = 1"}


def called(arguments, name="run", **fields):
    return {"role": "assistant", "content": None, "tool_calls": [function(arguments, name)], **fields}


def function(arguments, name="run"):
    return {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}


def trained(row, name="chatml"):
    """The texts of the messages that are trained, without the end token."""
    chat = format_of(name)
    end = decode(chat, [chat.end])
    return [decode(chat, part).removesuffix(end) for part in trained_parts(*whole(row, name))]


def whole(row, name="chatml"):
    return conversation_trace(read_conversation(row), format_of(name))


def text(row, name="chatml"):
    return decode(format_of(name), whole(row, name)[0].tolist())


def calls_of(row):
    return [call for turn in read_conversation(row).turns for call in turn.message.calls]


THOUGHT = "<think>\nLet me think.\n</think>\n\nDone."


@pytest.mark.parametrize("name", ["chatml", "qwen", "kimi", "compact", "thinks"])
@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
def test_what_the_model_thought_is_trained(name, field):
    assert trained({"messages": [USER, {**SAY, field: "Let me think."}]}, name) == [THOUGHT]
    assert trained({"messages": [USER, {**SAY, field: "\nLet me think.\n"}]}, name) == [THOUGHT]


def test_a_generation_prompt_that_opens_the_thinking_is_not_trained():
    row = {"messages": [USER, {**SAY, "reasoning_content": "Let me think."}]}
    assert trained(row, "opens") == ["Let me think.\n</think>\n\nDone."]
    assert "<think>\nLet me think.\n</think>\n\nDone." in text(row, "opens")


def test_thoughts_stay_in_every_turn_and_beside_calls():
    said = {"role": "assistant", "content": None, "reasoning": "I look.", "tool_calls": [function("{}")]}
    last = {**SAY, "reasoning": "Seen.", "reasoning_content": "Seen.", "thinking": None}
    row = {"messages": [USER, said, ANSWER, SAY | {"reasoning": "Sure?"}, USER, last]}
    first, *others = trained(row, "thinks")
    assert first.startswith("<think>\nI look.\n</think>\n\n") and '"name": "run"' in first
    assert others == ["<think>\nSure?\n</think>\n\nDone.", "<think>\nSeen.\n</think>\n\nDone."]


@pytest.mark.parametrize("nothing", [None, "", " \n"])
def test_no_thoughts_are_no_thinking(nothing):
    assert trained({"messages": [USER, {**SAY, "reasoning_content": nothing}]}) == ["Done."]


def test_one_weight_of_openai_and_one_of_ours():
    wrong = {"role": "assistant", "content": "A wrong answer."}
    for untrained in ({"weight": 0}, {"weight": 0.0}, {"train": False}, {"train": False, "weight": 0}):
        row = {"messages": [USER | {"weight": 1}, wrong | untrained, USER, SAY | {"weight": 1, "train": None}]}
        assert trained(row) == ["Done."] and "A wrong answer." in text(row)


def test_the_legacy_form_of_calls_and_answers_is_read():
    asked = {"role": "assistant", "content": None, "function_call": {"name": "read", "arguments": '{"path":"a.py"}'}}
    last = {"role": "function", "name": "read", "content": "x = 1"}
    want = {"messages": [USER, called({"path": "a.py"}, "read"), ANSWER, SAY]}
    for call in (asked, asked | {"function_call": json.dumps(asked["function_call"])}):
        row = {"messages": [USER, call, last, SAY], "functions": [{"name": "read", "parameters": {}}]}
        assert trained(row, "qwen") == trained(want, "qwen") and "x = 1" in text(row, "qwen")
        assert '"name": "read"' in text(row, "qwen").split("<|im_end|>")[0], "the functions are declared"
    assert trained({"messages": [USER, called({"path": "a.py"}, "read", function_call=None)]}, "qwen")


@pytest.mark.parametrize("arguments", ["", " ", None, "null", "{}", {}])
def test_no_arguments_are_an_empty_object(arguments):
    assert calls_of({"messages": [USER, called(arguments), ANSWER, SAY]}) == [ToolCall("run", {})]
    given = called(arguments)
    if arguments is None:
        del given["tool_calls"][0]["function"]["arguments"]
    assert read_messages([USER, given, ANSWER])[1] == AssistantMessage("", (ToolCall("run", {}),), True)


def test_calls_in_a_text_and_without_a_wrapper_are_read():
    flat = {"name": "run", "arguments": {"cmd": None}}
    for calls in (json.dumps([function({"cmd": None})]), [flat], [json.dumps(flat)]):
        assert calls_of({"messages": [USER, called("") | {"tool_calls": calls}]}) == [ToolCall("run", {"cmd": None})]


@pytest.mark.parametrize("tool", ["3d_render", "-x", "get.weather", "_", "9" * 64])
def test_tool_names_are_those_of_openai(tool):
    row = {"messages": [USER, called("{}", tool), ANSWER, SAY]}
    for name in ("chatml", "qwen", "kimi", "compact"):
        chat = format_of(name)
        ids = trained_parts(*whole(row, name))[0]
        assert chat.parse(ids).calls == (ToolCall(tool, {}),)


DECLARED = {"name": "read", "description": "Reads.", "parameters": {"type": "object"}}


def test_system_and_tools_in_columns_of_their_own_are_read():
    wanted = {"messages": [{"role": "system", "content": "Be brief."}, USER, SAY], "tools": [{"function": DECLARED}]}
    tools = ([DECLARED], json.dumps([DECLARED]), [json.dumps({"type": "function", "function": DECLARED})])
    tools += ([DECLARED | {"parameters": json.dumps(DECLARED["parameters"])}],)
    for name in ("tools", "functions"):
        for given in tools:
            assert text({"system": "Be brief.", "messages": [USER, SAY], name: given}) == text(wanted)
    assert text(wanted | {"system": "Be brief.", "functions": []}) == text(wanted), "it is there already"


def test_the_form_of_sharegpt_is_read():
    call = json.dumps({"name": "read", "arguments": {"path": "a.py"}})
    talk = [("human", "Fix a.py"), ("function_call", call), ("observation", "x = 1"), ("gpt", "Done.")]
    row = {"conversations": [{"from": who, "value": said} for who, said in talk], "system": "Be brief."}
    system = {"role": "system", "content": "Be brief."}
    want = {"messages": [system, USER, called({"path": "a.py"}, "read"), ANSWER, SAY]}
    assert text(row) == text(want) and trained(row) == trained(want)
    turns = row["conversations"][:1] + [{"from": "gpt", "value": "Hm.", "weight": 0}, *row["conversations"][::3]]
    assert trained({"conversations": turns}) == ["Done."]
    assert text({"conversations": [USER, SAY]}) == text({"messages": [USER, SAY]})
    assert text({"messages": json.dumps([USER, SAY]), "conversations": None}) == text({"messages": [USER, SAY]})


def test_of_a_prompt_and_a_completion_the_completion_is_trained():
    want = text({"messages": [USER, SAY]})
    assert text({"prompt": "Fix a.py", "completion": "Done."}) == want
    assert text({"prompt": [USER], "completion": [SAY]}) == want
    row = {"prompt": [USER, SAY | {"weight": 1}, USER], "completion": [SAY | {"content": "Yes."}]}
    assert trained(row) == ["Yes."]


def test_fields_that_change_nothing_are_ignored():
    more = {"name": "x", "id": "msg_1", "timestamp": "2026", "metadata": {"a": 1}, "refusal": None, "audio": None}
    more |= {"images": [], "prefix": False, "annotations": [{"url": "x"}]}
    tool = {"type": "function", "function": DECLARED | {"strict": True}, "cache_control": {"type": "ephemeral"}}
    row = {"messages": [USER | more, SAY | more], "tools": [tool]}
    assert text(row) == text({"messages": [USER, SAY], "tools": [DECLARED]})
    call = function("{}") | {"index": 0}
    assert calls_of({"messages": [USER, called("") | {"tool_calls": [call]}]}) == [ToolCall("run", {})]
    parts = [{"type": "text", "text": "Do", "cache_control": None}, {"type": "output_text", "text": "ne."}]
    assert trained({"messages": [USER, SAY | {"content": parts}]}) == ["Done."]
    row = {"messages": [USER, SAY], "difficulty": 3, "source": None, "task_id": "x", "reward": 1.0}
    assert read_conversation(row).ignored_columns == ("difficulty",)
    row = {"messages": [USER, SAY], "prompt": "Fix", "conversations": [USER, SAY]}
    assert set(read_conversation(row).ignored_columns) == {"prompt", "conversations"}


THINKS = {"reasoning_content": "a"}


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([USER, SAY | THINKS | {"thinking": "b"}], "reasoning_content and thinking differ"),
        ([USER, SAY | THINKS | {"content": "<think>a</think>b"}], "reasoning_content.*its content begins with <think>"),
        ([USER | THINKS, SAY], "message 1: the field 'reasoning_content'"),
        ([USER, SAY | {"reasoning": ["a"]}], "reasoning is not a text"),
        ([USER, SAY | {"reasoning": "a </think> b"}], "reasoning holds </think>"),
        ([USER, SAY | {"weight": 0.5}], "weight=0.5 is neither 0 nor 1"),
        ([USER, SAY | {"weight": True}], "weight=True is neither 0 nor 1"),
        ([USER | {"weight": 2}, SAY], "message 1: weight=2 is neither 0 nor 1"),
        ([USER, called("{}"), ANSWER | {"weight": "x"}, SAY], "message 3: weight='x' is neither 0 nor 1"),
        ([USER, SAY | {"weight": 0, "train": True}], "weight=0 and train=True contradict each other"),
        ([USER, SAY | {"train": 0}], "train=0 is neither true nor false"),
        ([USER | {"train": True}, SAY], "message 1: the field 'train' of a message of the user is not read"),
        ([USER, called("{}") | {"function_call": {"name": "a"}}], "both tool_calls and function_call"),
        ([USER, {"role": "assistant", "function_call": {"name": None}}], "call 1 has no function with a name"),
        (
            [USER, called("{}"), {"role": "function", "name": "read", "content": "x"}, SAY],
            "answers 'read', and the.*'run'",
        ),
        (
            [USER, called("{}") | {"tool_calls": [{"type": "custom", "custom": {"name": "a"}}]}],
            "call 1 has the type 'custom'",
        ),
        (
            [USER, called("{}") | {"tool_calls": [function("{}") | {"output": "x"}]}],
            "field 'output' of call 1 is not read",
        ),
        (
            [USER, called("{}") | {"tool_calls": [{"function": {"name": "a", "parameters": {"b": 1}}}]}],
            "field 'parameters' of",
        ),
        ([USER, called('"{}"')], "the arguments of call 1 are not a JSON object"),
        ([USER, called({"a": float("nan")})], "the arguments of call 1 are not JSON"),
        ([USER, called({"a": "\ud800"})], "the arguments of call 1 hold half of a surrogate pair"),
        ([USER, called({"a": b"x"})], "the arguments of call 1 are not JSON"),
        ([USER, SAY | {"prefix": True}], "the field 'prefix' of a message of the assistant is not read"),
        ([USER, {"role": "assistant", "content": None, "refusal": "No."}], "the field 'refusal'"),
        ([USER | {"images": ["a.png"]}, SAY], "the field 'images' of a message of the user is not read"),
        ([USER | {"tool_call_id": "1"}, SAY], "the field 'tool_call_id' of a message of the user is not read"),
        ([USER, {"role": "assistant", "content": None}], "message 2: it has neither content nor calls"),
        ([{"role": "user"}, SAY], "message 1: it has no content"),
        ([USER | {"content": []}, SAY], "message 1: it has no content"),
        ([USER | {"token_ids": [1]}, SAY], "message 1: token_ids are read after the first message of the model"),
        ([USER, SAY | {"content": [{"type": "text", "content": "x"}]}], "its content is not text"),
        ([USER, SAY | {"content": [{"type": "thinking", "thinking": "x"}]}], "its content is not text.*'thinking'"),
        (
            [USER, SAY | {"content": [{"type": "text", "text": "x", "thoughts": "y"}]}],
            "the field 'thoughts' of its content",
        ),
        ([USER, SAY | {"content": "\ud800"}], "its content holds half of a surrogate pair"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(messages, reason):
    with pytest.raises(ValueError, match=reason):
        read_conversation({"messages": messages})


def nested(depth):
    return {"a": nested(depth - 1)} if depth else {}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": [USER, SAY], "system": 3}, "the column system is not a text"),
        ({"messages": [{"role": "system", "content": "A"}, USER, SAY], "system": "B"}, "two messages of the system"),
        (
            {"messages": [USER, SAY], "tools": [DECLARED], "functions": [DECLARED | {"name": "b"}]},
            "tools and functions differ",
        ),
        ({"messages": [USER, SAY], "tools": [{"name": "a", "input_schema": {}}]}, None),
        (
            {"messages": [USER, SAY], "tools": [{"name": "a", "input_schema": {"b": 1}}]},
            "field 'input_schema' of tool 1 is not read",
        ),
        ({"messages": [USER, SAY], "tools": [DECLARED | {"parameters": nested(200)}]}, "tool 1.*nested"),
        ({"messages": [USER, called(nested(200))]}, "the arguments of call 1.*nested"),
        (
            {"messages": [USER, SAY], "chat_template_kwargs": {"enable_thinking": False}},
            "the column chat_template_kwargs",
        ),
        (
            {"conversations": [{"from": "robot", "value": "x"}]},
            "message 1: 'robot' is not an author of ShareGPT's form",
        ),
        ({"conversations": [{"from": "function_call", "value": "read()"}]}, "message 1: the calls are not JSON"),
        ({"prompt": "x", "completion": [SAY]}, "the prompt is a text and the completion a list"),
        ({"prompt": [USER], "completion": {"role": "assistant"}}, "the prompt is a list and the completion"),
        ({"prompt": [USER, SAY | {"weight": 3}], "completion": [SAY]}, "message 2: weight=3 is neither 0 nor 1"),
        ({"prompt": [USER]}, "the row has 'prompt' and no list of messages"),
        ({"instruction": "x", "input": "", "output": "y"}, "Alpaca.* and no list of messages"),
        ({"prompt": "x", "chosen": "y", "rejected": "z"}, "preference.* and no list of messages"),
        ({"role": "user", "content": "x"}, "a single message.* and no list of messages"),
        ({"text": "x"}, "the row has 'text' and no list of messages"),
        ({"messages": "["}, "the messages are not JSON"),
    ],
)
def test_forms_that_cannot_be_read_are_named(row, reason):
    if reason is None:
        assert read_conversation(row).tools[0].parameters == {}
        return
    with pytest.raises(ValueError, match=reason):
        read_conversation(row)


def test_a_template_that_leaves_out_tools_or_answers_is_refused():
    tool = DECLARED | {"description": "Reads. </think> Quickly."}
    row = {"messages": [USER, called("{}", "read"), ANSWER | {"content": "One. </think> Two."}, SAY], "tools": [tool]}
    assert "One. </think> Two." in text(row, "chatml") and "Reads. </think> Quickly." in text(row, "chatml")
    assert "Reads" not in text(row, "compact"), "it declares no tools"
    with pytest.raises(ValueError, match="the chat template does not write '.*' of the declared tools"):
        whole(row, "opens")
    with pytest.raises(ValueError, match="the chat template does not write the whole of 'One. </think> Two.'"):
        whole(row | {"tools": [DECLARED]}, "opens")


def test_a_template_that_leaves_out_what_was_said_is_refused():
    row = {"messages": [USER, SAY | {"content": "One. <think>Two.</think> Three."}]}
    assert trained(row, "chatml") == ["One. <think>Two.</think> Three."]
    with pytest.raises(ValueError, match="the chat template of .* changes the content 'One. "):
        whole(row, "thinks")
