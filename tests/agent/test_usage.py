"""What an episode used."""

import pytest

from composer_jax.agent import tools
from composer_jax.agent.todos import Todo
from composer_jax.agent.transcript import Transcript
from composer_jax.agent.usage import asks_question, measure_usage, split_message
from composer_jax.data.chat.messages import ToolCall
from composer_jax.sandbox import GONE, Change
from tests.agent.conftest import task_of
from tests.data.formats import format_of

READ = ToolCall("read_file", {"path": "a.py"})
SHELL = ToolCall("shell", {"command": "cat a.py"})
TOOLS = tools.select_tools(("repository/*",))
TASK = task_of({"a.py": "a = 1\n"})
START = {"a.py": Change("file", b"a = 1\n")}


def usage_of(chat, messages, has_final_message=True, todos=(), changes=START, task=TASK):
    transcript = Transcript()
    transcript.append("prompt", [1, 2])
    for ids in messages:
        transcript.append("assistant", chat.generation_prompt, ids, [0.0] * len(ids), [0] * len(ids))
        for observation in chat.bridge(ids, ["answer"] * len(chat.parse(ids).calls)):
            transcript.append("tool", observation)
    return measure_usage(transcript, chat, TOOLS, has_final_message, todos, task, changes), transcript


@pytest.mark.parametrize("name", ["compact", "qwen", "kimi", "chatml", "headers", "thinks", "opens"])
def test_a_message_is_split_where_its_calls_begin(name):
    chat = format_of(name)
    silent, called = chat.render_assistant("It is x.", []), chat.render_assistant("It is x.", [READ, READ])
    thinking, text, calls = split_message(chat, called)
    assert split_message(chat, silent)[2] == 0 < calls
    assert thinking + text + calls == len(called)
    assert not chat.parse(called[: thinking + text]).calls
    assert chat.parse(called[: thinking + text + 1]).calls
    assert chat.text(called[thinking : thinking + text]).strip().startswith("It is x.")
    assert split_message(chat, []) == (0, 0, 0)


@pytest.mark.parametrize("name", ["thinks", "opens", "chatml"])
def test_thinking_is_what_is_between_its_markers(name):
    chat = format_of(name)
    ids = chat.render_assistant("<think>\nhm hm\n</think>\n\nIt is x.", [READ])
    thinking, text, calls = split_message(chat, ids)
    assert chat.tokenizer.decode(ids[:thinking]).rstrip().endswith("hm hm\n</think>")
    assert "hm" not in chat.tokenizer.decode(ids[thinking:]) and text and calls
    unfinished = ids[: thinking // 2]
    assert split_message(chat, unfinished) == (len(unfinished), 0, 0)


@pytest.mark.parametrize("name", ["compact", "thinks"])
def test_every_sampled_token_is_counted_once(name):
    chat = format_of(name)
    messages = [chat.render_assistant("Look.", [READ]), chat.render_assistant("All is well.", [])]
    usage, transcript = usage_of(chat, messages)
    assert usage.thinking_tokens + usage.call_tokens + usage.final_tokens == transcript.total_sampled
    assert usage.output_tokens == len(chat.bridge(messages[0], ["answer"])[0])
    final = split_message(chat, messages[1])
    assert usage.final_tokens == final[1] > 0
    assert usage.thinking_tokens == sum(split_message(chat, messages[0])[:2]) + final[0]
    # A message that a limit ended is not the last word of the model.
    cut, _ = usage_of(chat, messages, has_final_message=False)
    assert cut.final_tokens == 0 and cut.thinking_tokens == usage.thinking_tokens + usage.final_tokens


def test_calls_by_tool_malformed_calls_and_duplicates(tok):
    chat = format_of("compact")
    finish = ToolCall("finish", {})
    tests = ToolCall("shell", {"command": "pytest"})
    wrong = [ToolCall("open", {}), ToolCall("read_file", {"file": "a.py"}), ToolCall("shell", {"command": 3})]
    broken = [chat.tokenizer.call, *chat.tokenizer.encode('read_file{"path":'), chat.end]
    usage, _ = usage_of(chat, [chat.render_assistant("", [READ, *wrong, SHELL, tests]), broken, [*broken]])
    assert usage.calls == {"read_file": 1, "shell": 2}
    assert (usage.malformed_calls, usage.shell_duplicates, usage.total_calls) == (5, 1, 8)
    assert usage_of(chat, [chat.render_assistant("", [finish])])[0].calls == {"finish": 1}


def test_changes_and_plan():
    chat = format_of("compact")
    changes = {
        "a.py": Change("file", b"# hm\na = 2\n"),
        "b.py": Change("file", b"b = 1\n"),
        "gone.py": GONE,
        "new": Change("folder", mode=0o755),
        "new/__pycache__/a.pyc": Change("file", b"x"),
        ".git/index": Change("file", b"x"),
    }
    todos = (Todo("a", "done"), Todo("b", "pending"), Todo("c", "in_progress"))
    usage, _ = usage_of(chat, [chat.render_assistant("", [])], todos=todos, changes=changes)
    assert (usage.changed_files, usage.added_lines, usage.comment_lines) == (3, 3, 1)
    assert (usage.todos, usage.unfinished_todos) == (3, 2)
    assert usage_of(chat, [chat.render_assistant("", [])])[0].changed_files == 0


@pytest.mark.parametrize(
    ("text", "is_question"),
    [
        ("Shall I mend a.py?", True),
        ("Which one?\nLet me know.", True),
        ('He asked "why?"', True),
        ("It is done.", False),
        ("I removed `a?b` and\n```\nwhat? \n```\n", False),
        ("See http://x/?q=1", False),
        ("", False),
    ],
)
def test_questions(text, is_question):
    assert asks_question(text) is is_question
    chat = format_of("compact")
    usage, _ = usage_of(chat, [chat.render_assistant("Why?", [READ]), chat.render_assistant(text, [])])
    assert usage.asked_question is is_question
