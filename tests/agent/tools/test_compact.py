"""The compact tools: strict arguments, short observations, and an observation for every call."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_jax.agent.tools import compact, execute_call
from composer_jax.agent.tools.compact import TOOLS
from composer_jax.agent.tools.truncate import COMPACT_CHARACTERS
from composer_jax.agent.workspace import Workspace
from composer_jax.data.chat.messages import MalformedToolCall, ToolCall
from composer_jax.demo import bugfix
from composer_jax.tasks.result_cache import ResultCache
from tests.agent.conftest import task_of

FILES = {
    "a.py": "def scale_rate(x):\n    return x * 3\n",
    "b.py": "from a import scale_rate\n\nprint(scale_rate(1))\nprint(scale_rate(1))\n",
    "notes.txt": "scale_rate\n",
    "empty.py": "",
}


MATCHES = """\
a.py:1 def scale_rate(x):
b.py:1 from a import scale_rate
b.py:3 print(scale_rate(1))
b.py:4 print(scale_rate(1))"""


def ask(name, workspace=None, pool=None, **arguments):
    workspace = workspace or Workspace(task_of(FILES), pool)
    return asyncio.run(execute_call(ToolCall(name, arguments), TOOLS, workspace))


def test_grep_counts_omitted_lines():
    workspace = Workspace(task_of({"a.py": "line\n" * 25}), None)
    answer = ask("grep", workspace, pattern="line").split("\n")
    assert len(answer) == compact.MAX_MATCHES + 1
    assert answer[-1] == "[15 more]"


def test_edit_changes_exactly_one_place():
    workspace = Workspace(task_of(FILES), None)
    assert ask("edit", workspace, path="a.py", old="x * 3", new="x * 4") == "ok"
    assert workspace.files["a.py"] == b"def scale_rate(x):\n    return x * 4\n"
    assert {p: d.decode() for p, d in workspace.files.items() if p != "a.py"} == {
        p: t for p, t in FILES.items() if p != "a.py"
    }
    assert ask("edit", workspace, path="a.py", old="\n    return x * 4", new="") == "ok", "deleting is editing"


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (ToolCall("read", {"path": "a.py"}), FILES["a.py"]),
        (ToolCall("read", {"path": "empty.py"}), ""),
        (ToolCall("grep", {"pattern": "scale_rate"}), MATCHES),
        (ToolCall("grep", {"pattern": "x * 3"}), "a.py:2 return x * 3"),  # a literal, not a pattern
        (ToolCall("grep", {"pattern": "nothing"}), "no match"),
        (ToolCall("read", {"path": "x.py"}), "ERROR no such file x.py"),
        (ToolCall("read", {"path": "../a.py"}), "ERROR no such file ../a.py"),
        (ToolCall("read", {"path": "/etc/passwd"}), "ERROR no such file /etc/passwd"),
        (ToolCall("read", {}), "ERROR read needs path"),
        (ToolCall("read", {"path": 3}), "ERROR path must be a string"),
        (ToolCall("read", {"path": "a.py", "line": "3"}), "ERROR read takes no line"),
        (ToolCall("grep", {"pattern": ""}), "ERROR pattern is empty"),
        (ToolCall("edit", {"path": "a.py", "old": "", "new": "x"}), "ERROR old is empty"),
        (ToolCall("edit", {"path": "a.py", "old": "x", "new": "x"}), "ERROR old and new are the same"),
        (ToolCall("edit", {"path": "a.py", "old": "zz", "new": "y"}), "ERROR old is not in a.py"),
        (ToolCall("edit", {"path": "b.py", "old": "print", "new": "y"}), "ERROR old is 2 times in b.py"),
        (ToolCall("edit", {"path": "c.py", "old": "a", "new": "b"}), "ERROR no such file c.py"),
        (ToolCall("edit", {"path": "a.py", "old": "x"}), "ERROR edit needs new"),
        (ToolCall("run_tests", {"fast": True}), "ERROR run_tests takes no fast"),
        (ToolCall("finish", {"reward": 1}), "ERROR finish takes no reward"),
        (ToolCall("shell", {}), "ERROR no tool shell"),
        (MalformedToolCall("read{", "the arguments are not JSON"), "ERROR the arguments are not JSON"),
    ],
)
def test_what_reads_or_is_mistaken_changes_nothing(call, expected):
    workspace = Workspace(task_of(FILES), None)
    assert asyncio.run(execute_call(call, TOOLS, workspace)) == expected
    assert {path: data.decode() for path, data in workspace.files.items()} == FILES


def test_a_tool_that_was_not_chosen_is_unknown():
    call = ToolCall("grep", {"pattern": "scale_rate"})
    answer = asyncio.run(execute_call(call, {"read": TOOLS["read"]}, Workspace(task_of(FILES), None)))
    assert answer == "ERROR no tool grep"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.sampled_from(list(FILES)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)


@given(
    st.sampled_from(["read", "grep", "edit", "finish", "nothing"]),
    st.dictionaries(st.sampled_from(["path", "pattern", "old", "new", "x"]), JSON),
)
def test_any_call_gets_a_short_answer(name, arguments):
    answer = asyncio.run(execute_call(ToolCall(name, arguments), TOOLS, Workspace(task_of(FILES), None)))
    assert isinstance(answer, str) and len(answer) <= COMPACT_CHARACTERS + 40


def test_long_observations_are_truncated_with_a_count():
    workspace = Workspace(task_of({"long.py": "x" * (COMPACT_CHARACTERS + 500)}), None)
    answer = ask("read", workspace, path="long.py")
    assert answer.startswith("x" * COMPACT_CHARACTERS + "\n")
    assert answer.endswith("[500 characters dropped]")
    assert "[7999 characters dropped]" in ask("read", workspace, path="y" * 9980)[COMPACT_CHARACTERS:]


def test_binary_files():
    workspace = Workspace(task_of(FILES), None)
    workspace.write("data.py", b"\xff\xfe x")
    assert ask("read", workspace, path="data.py") == "\ufffd\ufffd x"
    assert ask("edit", workspace, path="data.py", old="x", new="y") == "ERROR data.py is not text"


async def test_run_tests_runs_the_visible_tests(pool):
    task = bugfix.generate("train", 0, 0, bugs=1)
    (bug,) = task.metadata["bugs"]
    workspace = Workspace(task, pool)
    answer = [await execute_call(ToolCall("run_tests", {}), TOOLS, workspace)]
    edit = {name: bug[name] for name in ("path", "old", "new")}
    answer.append(await execute_call(ToolCall("edit", edit), TOOLS, workspace))
    answer.append(await execute_call(ToolCall("run_tests", {}), TOOLS, workspace))
    await workspace.close()
    assert answer[0].startswith(f"FAIL {bug['function']}(") and "\n" not in answer[0]
    assert answer[1] == "ok" and answer[2].startswith("PASS ")


@pytest.mark.parametrize(
    ("runner", "expected"),
    [
        ("raise ValueError('broken runner')", "ValueError: broken runner"),
        ("import os; os._exit(3)", "no output, exit 3"),
        ("print('x' * 9000)", f"{'x' * COMPACT_CHARACTERS}\n[{9000 - COMPACT_CHARACTERS} characters dropped]"),
    ],
)
async def test_a_broken_runner_is_reported(pool, runner, expected):
    workspace = Workspace(task_of({"run_tests.py": runner}), pool)
    assert await execute_call(ToolCall("run_tests", {}), TOOLS, workspace) == expected
    await workspace.close()


async def test_an_endless_test_is_reported(pool, monkeypatch):
    monkeypatch.setattr(compact, "TEST_TIMEOUT_S", 0.3)
    cache = ResultCache()
    for _ in range(2):
        workspace = Workspace(task_of({"run_tests.py": "while True: pass"}), pool, cache.of_episode("t", 0))
        assert await execute_call(ToolCall("run_tests", {}), TOOLS, workspace) == "FAIL timeout"
        await workspace.close()
    assert (cache.hits, cache.runs) == (0, 2), "a timeout is not remembered"
