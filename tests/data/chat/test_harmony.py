"""The harmony format: its exact text, what a model may write in it, and what histories leave out."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_jax.agent.summary import carry_message, is_failed
from composer_jax.agent.usage import split_message
from composer_jax.data.chat.chat_format import Message
from composer_jax.data.chat.control_text import ControlText
from composer_jax.data.chat.conversations import assistant_row, conversation_trace, read_conversation
from composer_jax.data.chat.harmony import HarmonyFormat
from composer_jax.data.chat.load_chat_format import load_chat_format
from composer_jax.data.chat.messages import AssistantMessage, MalformedToolCall, ToolCall
from composer_jax.errors import UserError
from composer_jax.sampler.detokenizer import IncrementalDetokenizer
from tests.data.formats import Declaration, calls, contents, declared, decode, format_of
from tests.data.model_folders import HARMONY, HARMONY_TOKENS, tokenizer_json, write_folder

CHAT = format_of("harmony")
READ, RUN = ToolCall("read", {"path": "a.py"}), ToolCall("run.tests-2", {})
THOUGHT = "<think>\nhm\n</think>\n\n"
FINAL = "<|channel|>final<|message|>"
ANALYSIS = "<|channel|>analysis<|message|>"
NEXT = "<|end|><|start|>assistant"
ARGUMENTS = '{"path": "a.py"}'


def say(content, *asked):
    return AssistantMessage(content, asked, True)


def sampled(text):
    """The ids of a message in which the control tokens are spelled out."""
    return ControlText(CHAT.tokenizer).ids(text, "\0")


def text_of(ids):
    """The ids after the system message, which names the day."""
    text = decode(CHAT, ids)
    assert text.startswith("<|start|>system<|message|>Today: ")
    return text.partition("<|end|>")[2]


def test_the_text_of_a_conversation():
    tools = [Declaration("read", "Reads.", {"type": "object"})]
    ask = [Message("system", "Be brief."), Message("user", "Go.")]
    begin = (
        '<|start|>developer<|message|>Be brief.\n// Reads.\ntype read = (_: {"type": "object"}) => any;<|end|>'
        "<|start|>user<|message|>Go.<|end|>"
    )
    thinks = f"<|start|>assistant{ANALYSIS}hm{NEXT}"
    called = f" to=functions.read<|channel|>commentary json<|message|>{ARGUMENTS}<|call|>"
    answer = '<|start|>functions.read to=assistant<|channel|>commentary<|message|>"x = \\"1\\"\\n"<|end|>'
    turn = [*ask, say(THOUGHT, READ), Message("tool", 'x = "1"\n')]
    assert isinstance(CHAT, HarmonyFormat) and decode(CHAT, CHAT.generation_prompt) == "<|start|>assistant"
    assert text_of(CHAT.render(turn, tools)) == f"{begin}{thinks}{called}{answer}"
    done = [*turn, say(THOUGHT + "It is 1.")]
    short = f"{begin}<|start|>assistant{called}{answer}"
    assert text_of(CHAT.render(done, tools)) == f"{short}{thinks}{FINAL}It is 1.<|return|>"
    more = [*done, Message("user", "More."), say(THOUGHT + "I look.", RUN)]
    assert text_of(CHAT.render(more, tools)) == (
        f"{short}<|start|>assistant{FINAL}It is 1.<|end|><|start|>user<|message|>More.<|end|>{thinks}"
        f"<|channel|>commentary<|message|>I look.{NEXT}"
        " to=functions.run.tests-2<|channel|>commentary json<|message|>{}<|call|>"
    )
    assert CHAT.text(CHAT.render(more, tools)).endswith('"x = \\"1\\"\\n"\nIt is 1.\nMore.\nhm\nI look.\n{}')


@pytest.mark.parametrize(
    "message",
    [
        say("It is x."),
        say(""),
        say(f"{THOUGHT}It is \u4e2d\U0001f600.\n\n"),
        say(f"{THOUGHT}"),
        say("<think>\nhm"),
        say("<think>\n<|end|> <tool_call> to=functions.x\n</think>\n\n<|channel|>final<|message|></think>"),
        say("", READ),
        say("", RUN),
        say("I look.", READ),
        say(f"{THOUGHT}I look.\n", ToolCall("edit", {"old": "<|call|>", "new": 'a = "\u00e9"\n</think>', "n": None})),
        say(THOUGHT, ToolCall("functions.read", {"l": [1, 2.5, {"k": True}]})),
    ],
    ids=str,
)
def test_a_message_is_read_back_as_it_was_written(message):
    ids = CHAT.render_assistant(message.content, message.calls)
    assert CHAT.parse(ids) == message
    assert ids[-1] == (CHAT.tokenizer.id_of("<|call|>") if message.calls else CHAT.end)
    assert [i for i in ids if i in CHAT.end_tokens] == ids[-1:]


@settings(max_examples=50)
@given(data=st.data())
def test_any_message_is_read_back_as_it_was_written(data):
    thought, said = data.draw(contents("harmony")).strip(), data.draw(contents("harmony"))
    said = said.lstrip("\n") if thought else said  # white space at the edges of thinking is not kept
    asked = data.draw(st.lists(calls("harmony"), max_size=1))
    content = f"<think>\n{thought}\n</think>\n\n{said}" if thought else said
    assert CHAT.parse(CHAT.render_assistant(content, asked)) == say(content, *asked)


@settings(max_examples=25)
@given(data=st.data())
def test_turns_with_calls_add_up_to_the_whole(data):
    text = contents("harmony")
    messages = [Message("system", data.draw(text)), Message("user", data.draw(text))]
    tools = data.draw(declared("harmony"))
    ids = CHAT.render(messages, tools)
    for _ in range(data.draw(st.integers(0, 3))):
        message = say(data.draw(text), data.draw(calls("harmony")))
        answer = data.draw(text)
        written = CHAT.render_assistant(message.content, message.calls)
        [bridge] = CHAT.bridge(written, [answer])
        ids += [*CHAT.generation_prompt, *written, *bridge]
        messages += [message, Message("tool", answer)]
        assert CHAT.answer_text(bridge) == answer
    last = data.draw(text)
    assert [*ids, *CHAT.generation_prompt, *CHAT.render_assistant(last, [])] == CHAT.render(
        [*messages, say(last)], tools
    )


def test_a_history_of_an_episode_is_what_was_sampled():
    ids = CHAT.render_assistant(f"{THOUGHT}It is x.", [])
    turns = [*CHAT.generation_prompt, *ids, *CHAT.close(ids), *CHAT.user(["More."])]
    assert decode(CHAT, turns) == (
        f"<|start|>assistant{ANALYSIS}hm{NEXT}{FINAL}It is x.<|return|><|start|>user<|message|>More.<|end|>"
    )
    assert CHAT.tokenizer.decode(CHAT.user_body(CHAT.user(["More."]))) == "More."


@pytest.mark.parametrize(
    "heading",
    [
        " to=functions.read<|channel|>commentary json",
        " to=functions.read<|channel|>commentary <|constrain|>json",
        "<|channel|>commentary to=functions.read <|constrain|>json",
        "<|channel|>commentary to=functions.read<|constrain|>json",
        "<|channel|>commentary to=read",
        "<|channel|>analysis to=functions.read code",
    ],
)
def test_a_call_names_its_tool_before_or_after_the_channel(heading):
    ids = sampled(f"{ANALYSIS}hm{NEXT}{heading}<|message|>{ARGUMENTS}<|call|>")
    assert CHAT.parse(ids) == say(THOUGHT, READ)
    tool = "functions.read" if "functions" in heading else "read"
    [answer] = CHAT.bridge(ids, ["yes"])
    assert decode(CHAT, answer) == f'<|start|>{tool} to=assistant<|channel|>commentary<|message|>"yes"<|end|>'


@pytest.mark.parametrize("arguments", ["", " ", "null", "{}"])
def test_a_call_without_arguments_has_none(arguments):
    ids = sampled(f"<|channel|>commentary to=functions.read<|message|>{arguments}<|call|>")
    assert CHAT.parse(ids).calls == (ToolCall("read", {}),)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (f"<|channel|>commentary to=functions.read<|message|>{ARGUMENTS}<|end|>", "does not end with <|call|>"),
        (f"<|channel|>commentary to=functions.read<|message|>{ARGUMENTS}<|return|>", "does not end with <|call|>"),
        ('<|channel|>commentary to=functions.read<|message|>{"path": "a', "does not end with <|call|>"),
        ("<|channel|>commentary to=functions.re", "does not end with <|call|>"),
        ("<|channel|>commentary to=functions.read<|call|>", "no arguments"),
        ("<|channel|>commentary to=functions.read<|message|>{oops<|call|>", "not JSON"),
        ("<|channel|>commentary to=functions.read<|message|>[]<|call|>", "not a JSON object"),
        ('<|channel|>commentary to=functions.read<|message|>{"a": "<|channel|>"}<|call|>', "a control token is inside"),
        ("<|channel|>commentary to=functions.<|message|>{}<|call|>", "'' is not a tool name"),
        ("<|channel|>commentary to=functions.a(b)<|message|>{}<|call|>", "'a(b)' is not a tool name"),
    ],
)
def test_malformed_calls_say_why(text, reason):
    ids = sampled(text)
    [bad] = CHAT.parse(ids).calls
    assert isinstance(bad, MalformedToolCall) and reason in bad.reason
    assert bad.text in text, "the model's own text"
    [answer] = CHAT.bridge(ids, ["no"])
    assert CHAT.answer_text(answer) == "no" and answer[: len(CHAT.close(ids))] == CHAT.close(ids)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"<|channel|>commentary<|message|>I look.{NEXT}{FINAL}It is x.<|return|>", say("I look.\nIt is x.")),
        (f"{ANALYSIS}a{NEXT}{ANALYSIS}b{NEXT}{FINAL}x<|return|>", say("<think>\na\nb\n</think>\n\nx")),
        (f"{FINAL}x{NEXT}{ANALYSIS}a<|end|>", AssistantMessage("<think>\na\n</think>\n\nx", (), False)),
        (f"{FINAL}x{NEXT}{ANALYSIS}a", AssistantMessage("<think>\na\n</think>\n\nx", (), False)),
        (f"{ANALYSIS}hm", AssistantMessage("<think>\nhm", (), False)),
        (f"{ANALYSIS}hm<|end|>", AssistantMessage(THOUGHT, (), False)),
        (f"{ANALYSIS}hm{NEXT}{FINAL}It", AssistantMessage(f"{THOUGHT}It", (), False)),
        (f"{ANALYSIS}hm{NEXT}<|channel|>fin", AssistantMessage(THOUGHT, (), False)),
        (f"{ANALYSIS}{NEXT}{FINAL}x<|return|>{FINAL}y", say("x")),
        ("<|channel|>other<|message|>x<|return|>", say("x")),
        ("<|message|>x<|return|>", say("x")),
        ("It goes to=x<|return|>", say("It goes to=x")),
        (f"{FINAL}a<|channel|>b<|endoftext|>", AssistantMessage("a<|channel|>b<|endoftext|>", (), False)),
        ("", AssistantMessage("", (), False)),
    ],
)
def test_what_is_thought_and_said_is_told_apart(text, message):
    assert CHAT.parse(sampled(text)) == message


def test_a_message_that_was_cut_off_is_closed():
    whole = CHAT.render_assistant(f"{THOUGHT}I look.", [READ])
    message, end, call = (CHAT.tokenizer.id_of(text) for text in ("<|message|>", "<|end|>", "<|call|>"))
    closed = {CHAT.parse([*whole[:n], *CHAT.close(whole[:n])]).complete for n in range(len(whole))}
    assert closed == {True, False}, "a call that was begun is ended as a call"
    for length in range(len(whole)):
        cut = whole[:length]
        assert not CHAT.parse(cut).complete
        assert CHAT.close(cut) in ([], [end], [call], [message, end], [message, call])
        assert CHAT.close([*cut, *CHAT.close(cut)]) == []
    assert CHAT.close(whole) == CHAT.close([CHAT.end]) == []


def test_thinking_is_counted_and_left_out():
    thinks = CHAT.render_assistant(f"{THOUGHT}It is x.", [])
    length = CHAT.thinking_length(thinks)
    assert decode(CHAT, thinks[:length]) == f"{ANALYSIS}hm<|end|>"
    assert CHAT.without_thinking(thinks) == thinks[length:]
    assert CHAT.text(thinks[length:]) == "It is x." and CHAT.text(thinks) == "hm\nIt is x."
    cut = thinks[: length - 1]
    assert CHAT.thinking_length(cut) == len(cut) and CHAT.without_thinking(cut) == cut
    plain = CHAT.render_assistant("It is x.", [])
    assert CHAT.thinking_length(plain) == 0 and CHAT.without_thinking(plain) == plain
    called = CHAT.render_assistant(f"{THOUGHT}I look.", [READ])
    thought, said, asked = split_message(CHAT, called)
    assert thought == length and decode(CHAT, called[: thought + said]).endswith("<|start|>assistant to")
    assert thought + said + asked == len(called)


@pytest.mark.parametrize("size", range(1, 9))
def test_text_to_read_comes_in_pieces(size):
    ids = CHAT.render_assistant(f"{THOUGHT}I look at \u4e2d.", [READ])
    stream = IncrementalDetokenizer(CHAT.text)
    pieces = [stream.add(ids[at : at + size]) for at in range(0, len(ids), size)]
    assert "".join([*pieces, stream.finish()]) == CHAT.text(ids) == f"hm\nI look at \u4e2d.\n{ARGUMENTS}"


def test_a_summary_is_carried_without_headings_and_thinking():
    for content in (f"{THOUGHT}It is x.", "It is x."):
        summary = CHAT.render_assistant(content, [])
        carried = decode(CHAT, carry_message(CHAT, 1, summary, "Look."))
        assert "It is x.\nPlan:\nLook." in carried and "hm" not in carried and "final" not in carried
        assert not is_failed(CHAT, summary)
    assert is_failed(CHAT, CHAT.render_assistant(THOUGHT, []))
    assert is_failed(CHAT, CHAT.render_assistant("It is x.", [])[:-1])


def test_conversations_that_the_format_cannot_write_are_refused():
    with pytest.raises(ValueError, match=r"a message has 2 calls \(read, run.tests-2\), and this format has one"):
        CHAT.render_assistant("", [READ, RUN])
    with pytest.raises(ValueError, match="a system message comes after the first"):
        CHAT.render([Message("user", "x"), Message("system", "y")])
    twice = "<think>\n</think><think>x\n</think>\n\ny"
    with pytest.raises(ValueError, match="the answer after the thinking begins with <think>"):
        CHAT.render_assistant(twice, [])
    later = AssistantMessage(twice.replace("\n</think><", "\nz\n</think><", 1), (), True)
    CHAT.render([Message("user", "x"), later])
    with pytest.raises(ValueError, match="the answer after the thinking begins with <think>"):
        CHAT.render([Message("user", "x"), later, Message("user", "y")])


@pytest.mark.parametrize(
    ("here", "there", "reason"),
    [
        ("'<|start|>user<|message|>'", "'<|start|>user <|message|>'", "messages of users in another way"),
        ("'<|call|>'", "'<|end|>'", "calls or their answers in another way"),
        (" if message.thinking and ", " if false and ", "a conversation of 2 messages in another way"),
    ],
)
def test_templates_of_another_format_are_refused(tmp_path, here, there, reason):
    assert HARMONY.count(here) == 1
    with pytest.raises(UserError, match=f"does not write the harmony format of its tokenizer: .*{reason}"):
        load_chat_format(write_folder(tmp_path, tokenizer_json(HARMONY_TOKENS), HARMONY.replace(here, there)))


def test_the_headings_of_calls_and_answers_are_those_of_the_template(tmp_path):
    template = HARMONY.replace("commentary json<|", "commentary <|constrain|>json<|").replace(
        "content | tojson", "content"
    )
    chat = load_chat_format(write_folder(tmp_path, tokenizer_json(HARMONY_TOKENS), template))
    ids = chat.render_assistant("", [READ])
    assert decode(chat, ids).startswith(" to=functions.read<|channel|>commentary <|constrain|>json<|message|>{")
    [answer] = chat.bridge(ids, ['"x"'])
    assert decode(chat, answer).endswith('<|message|>"x"<|end|>') and chat.answer_text(answer) == '"x"'


def test_sft_trains_exactly_what_a_model_samples():
    messages = [
        {"role": "user", "content": "Go."},
        assistant_row(say(THOUGHT, READ), 0),
        {"role": "tool", "tool_call_id": "call_0", "content": "x"},
        assistant_row(say(f"{THOUGHT}It is x."), 1),
    ]
    ids, trained = conversation_trace(read_conversation({"messages": messages}), CHAT)
    runs, previous = [], False
    for i, is_trained in zip(ids.tolist(), trained.tolist(), strict=True):
        if is_trained and not previous:
            runs.append([])
        if is_trained:
            runs[-1].append(i)
        previous = is_trained
    assert [decode(CHAT, run) for run in runs] == [
        f"{ANALYSIS}hm{NEXT} to=functions.read<|channel|>commentary json<|message|>{ARGUMENTS}<|call|>",
        f"{ANALYSIS}hm{NEXT}{FINAL}It is x.<|return|>",
    ]
