"""Templates that rewrite what was said: thinking that is dropped later, or that the generation prompt begins."""

import pytest

from composer_jax.agent.summary import carry_message
from composer_jax.data.chat.chat_format import Message
from composer_jax.data.chat.load_chat_format import load_chat_format
from composer_jax.data.chat.messages import AssistantMessage, ToolCall
from tests.data.formats import decode, format_of
from tests.data.model_folders import HEADER_TOKENS, HEADERS, tokenizer_json, write_folder

READ = ToolCall("read", {"path": "a.py"})
ASK = Message("user", "Go.")
PLAIN = AssistantMessage("It is x.", (), True)
THOUGHTFUL = AssistantMessage("<think>\nhm\n</think>\n\nIt is x.", (), True)


def test_a_given_conversation_keeps_and_drops_thinking_as_the_template_says():
    chat = format_of("thinks")
    kept, dropped = "<think>\nhm\n</think>\n\nIt is x.<|im_end|>", "assistant\nIt is x.<|im_end|>"
    assert decode(chat, chat.render([ASK, THOUGHTFUL])).endswith(kept)
    later = decode(chat, chat.render([ASK, THOUGHTFUL, ASK, THOUGHTFUL]))
    assert later.count("<think>") == 1 and later.endswith(kept) and dropped in later
    tools = [ASK, AssistantMessage(THOUGHTFUL.content, (READ,), True), Message("tool", "x"), THOUGHTFUL]
    assert decode(chat, chat.render(tools)).count("<think>") == 2, "an answer of a tool begins no new turn"


@pytest.mark.parametrize("name", ["thinks", "opens"])
def test_frames_of_new_messages_come_after_any_history(name):
    chat, plain = format_of(name), format_of({"thinks": "qwen", "opens": "chatml"}[name])
    assert decode(chat, chat.user(["More."])) == decode(plain, plain.user(["More."]))
    sampled = chat.tokenizer.encode("hm") + chat.render_assistant("x", [READ, READ])
    frames = [decode(chat, piece) for piece in chat.bridge(sampled, ["1", "2"])]
    bridge = plain.bridge(plain.render_assistant("x", [READ, READ]), ["1", "2"])
    assert frames == [decode(plain, piece) for piece in bridge]
    assert [chat.answer_text(piece) for piece in chat.bridge(sampled, ["1", "2"])] == ["1", "2"]
    assert decode(chat, chat.close(sampled)) == "\n" and chat.close([]) == [chat.end, *chat.close(sampled)]


def test_what_the_model_samples_where_the_template_has_a_place_for_thinking():
    chat = format_of("thinks")
    assert decode(chat, chat.render_assistant(THOUGHTFUL.content, [])) == f"{THOUGHTFUL.content}<|im_end|>"
    silent = chat.render_assistant("It is x.", [READ])
    assert decode(chat, silent).startswith("<think>\n\n</think>\n\nIt is x.\n<tool_call>")
    assert chat.parse(silent) == AssistantMessage("It is x.", (READ,), True), "an empty place is not content"
    assert chat.parse(chat.render_assistant(THOUGHTFUL.content, [READ])).content == THOUGHTFUL.content
    think = {chat.tokenizer.id_of("<think>"), chat.tokenizer.id_of("</think>")}
    assert think <= set(chat.render_assistant(THOUGHTFUL.content, []))
    assert not think & set(chat.render([Message("system", THOUGHTFUL.content), Message("user", THOUGHTFUL.content)]))
    assert not think & set(chat.bridge(silent, [THOUGHTFUL.content])[0])


def test_what_the_model_samples_where_the_generation_prompt_begins_the_thinking():
    chat = format_of("opens")
    assert decode(chat, chat.generation_prompt) == "<|im_start|>assistant\n<think>\n"
    ids = chat.render_assistant(THOUGHTFUL.content, [READ])
    assert decode(chat, ids).startswith("hm\n</think>\n\nIt is x.\n<tool_call>\n{")
    message = chat.parse(ids)
    assert message == AssistantMessage(THOUGHTFUL.content, (READ,), True)
    assert chat.render_assistant(message.content, message.calls) == ids
    assert chat.parse(chat.tokenizer.encode('I write <tool_call>\n{"name": "read", ')).calls == (), "it still thinks"
    assert "think" not in decode(chat, chat.render([ASK, THOUGHTFUL])), "a history has no thinking there"
    silent = chat.render_assistant("It is x.", [])
    assert decode(chat, silent) == "\n</think>\n\nIt is x.<|im_end|>", "the thinking that was begun is ended"
    assert chat.parse(silent) == PLAIN


def test_what_the_model_samples_where_the_generation_prompt_ends_the_thinking():
    chat = format_of("closed")
    assert decode(chat, chat.generation_prompt).endswith("<think>\n\n</think>\n\n")
    ids = chat.render_assistant("It is x.", [READ])
    assert decode(chat, ids).startswith("It is x.\n<tool_call>"), "nothing ends the thinking again"
    assert chat.parse(ids) == AssistantMessage("It is x.", (READ,), True)
    assert chat.thinking_length(ids) == 0
    with pytest.raises(ValueError, match="the generation prompt of .* ends the thinking; leave the thinking out"):
        chat.render_assistant(THOUGHTFUL.content, [])


@pytest.mark.parametrize("name", ["thinks", "opens", "keys", "closed"])
@pytest.mark.parametrize("calls", [(READ,), (READ, READ)], ids=len)
def test_a_message_of_calls_only_has_no_content(name, calls):
    chat = format_of(name)
    assert chat.parse(chat.render_assistant("", calls)) == AssistantMessage("", calls, True)


@pytest.mark.parametrize("name", ["thinks", "opens", "keys"])
def test_thinking_is_read_back_as_it_was_written(name):
    chat = format_of(name)
    for thought, said, calls in (
        ("hm", "", (READ,)),
        ("  hm\n\nhm ", "It.\n\nx", ()),
        ("<tool_call>", "x", (READ, READ)),
    ):
        message = AssistantMessage(f"<think>\n{thought}\n</think>\n\n{said}", calls, True)
        assert chat.parse(chat.render_assistant(message.content, calls)) == message
    cut = chat.render_assistant(THOUGHTFUL.content, [])[:3]
    assert chat.parse(cut).content.startswith("<think>\n") and not chat.parse(cut).complete


def test_thinking_that_a_template_would_cut_is_refused():
    with pytest.raises(ValueError, match="changes the content"):
        format_of("thinks").render_assistant("<think>\nhm <think> hm\n</think>\n\nIt.", [])
    kept = AssistantMessage("<think>\nhm <think> hm\n</think>\n\nIt.", (), True)
    chat = format_of("keys")  # whose template has a field for the thinking
    assert chat.parse(chat.render_assistant(kept.content, [])) == kept


@pytest.mark.parametrize("name", ["thinks", "opens", "chatml"])
def test_a_summary_is_carried_without_what_was_thought(name):
    chat = format_of(name)
    thoughtful = chat.render_assistant("<think>\nhm, hm\n</think>\n\nIt is x.", [])
    assert chat.text(chat.without_thinking(thoughtful)).strip() == "It is x."
    carried = decode(chat, carry_message(chat, 1, thoughtful, "Look."))
    assert "hm" not in carried and "Summary 1:\n" in carried and "It is x.\nPlan:\nLook." in carried
    plain = chat.render_assistant("It is x.", [])
    assert chat.text(chat.without_thinking(plain)).strip() == "It is x."
    unfinished = chat.tokenizer.encode("<think>\nhm")
    assert chat.without_thinking(unfinished) == unfinished and chat.without_thinking([]) == []


def test_the_system_message_of_a_template_belongs_to_the_beginning_alone(tmp_path):
    chat = load_chat_format(write_folder(tmp_path, tokenizer_json(HEADER_TOKENS), HEADERS))
    begin = "<|begin|><|head|>system<|/head|>\n\nToday: "
    assert decode(chat, chat.render([ASK])).startswith(begin)
    sampled = chat.render_assistant("  so \n", [READ])
    assert decode(chat, sampled).startswith("so \n\n<tool_call>"), "this template trims"
    others = [chat.generation_prompt, chat.user(["x"]), *chat.bridge(sampled, ["x"]), sampled]
    assert not any("Today" in decode(chat, ids) for ids in others)
    assert decode(chat, chat.generation_prompt) == "<|head|>assistant<|/head|>\n\n"
    assert chat.close(sampled) == [] and decode(chat, chat.close([])) == "<|eot|>"


@pytest.mark.parametrize("name", ["qwen", "thinks", "chatml", "opens", "headers"])
def test_a_history_of_an_episode_is_what_was_sampled(name):
    """Turn by turn, no id of a message depends on what comes later."""
    chat = format_of(name)
    sampled = chat.render_assistant(THOUGHTFUL.content, [])
    ids = [*chat.render([ASK]), *chat.generation_prompt, *sampled, *chat.close(sampled), *chat.user(["More."])]
    assert ids[-len(chat.user(["More."])) :] == chat.user(["More."])
    whole = chat.render([ASK, THOUGHTFUL, Message("user", "More.")])
    rewrites = name in ("thinks", "opens")
    assert (whole == ids) != rewrites
    if rewrites:
        assert "hm" not in decode(chat, whole) and "hm" in decode(chat, ids)


def test_white_space_around_thinking_is_stripped_as_the_template_strips_it():
    chat = format_of("thinks")
    plain, guarded = ("<think>\n\n" + text + "\n</think>\n\nok" for text in ("if x", "if x <"))
    ids = [decode(chat, chat.render([ASK, AssistantMessage(content, (), True)])) for content in (plain, guarded)]
    assert ids[1] == ids[0].replace("if x", "if x <"), "what could begin a control token changes no white space"


def test_a_call_is_not_ended_by_a_thinking_marker_that_is_spelled():
    chat = format_of("thinks")
    call = decode(chat, chat.render_assistant("", [READ])).partition("<tool_call>")[2]
    marks = [chat.tokenizer.id_of(text) for text in ("<think>", "<tool_call>", "</think>")]
    spelled = chat.tokenizer.encode("\n</think> and ")
    body = chat.tokenizer.encode(call.partition("</tool_call>")[0])
    ids = [marks[0], *spelled, marks[1], *body, chat.tokenizer.id_of("</tool_call>"), marks[2], chat.end]
    assert chat.parse(ids).calls == ()


@pytest.mark.parametrize("name", ["thinks", "keys"])
def test_thinking_without_an_end_is_not_ended_silently(name):
    with pytest.raises(ValueError, match="changes the content '<think>.nhm'"):
        format_of(name).render_assistant("<think>\nhm", [])


def test_a_call_that_a_template_would_cut_is_refused():
    with pytest.raises(ValueError, match="changes the calls .*</think>"):
        format_of("opens").render_assistant("x", [ToolCall("read", {"path": "</think>"})])
