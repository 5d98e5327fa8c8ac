"""Execution of calls: strict arguments, order of effects, concurrent reads, an observation for every call."""

import asyncio
import dataclasses
import json
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from composer_jax.agent import tools
from composer_jax.agent.tools import TOOLS as ALL_TOOLS
from composer_jax.agent.tools import execute_call, execute_calls, select_tools
from composer_jax.agent.tools.execute import replace_surrogates
from composer_jax.agent.tools.schema import ToolError, check
from composer_jax.agent.tools.truncate import MAX_CHARACTERS
from composer_jax.agent.workspace import Workspace
from composer_jax.data.chat.messages import MalformedToolCall, ToolCall
from composer_jax.errors import UserError
from composer_jax.sandbox import SandboxDied
from composer_jax.tasks.retry import ATTEMPTS
from tests.agent.conftest import task_of
from tests.agent.tools.conftest import TOOLS, Conversation, make_repository
from tests.many import many

KEYWORDS = {
    "type", "properties", "required", "additionalProperties", "items", "enum", "minimum", "maximum", "minLength",
    "maxLength", "maxItems", "description",
}  # fmt: skip


def schemas(schema):
    yield schema
    for inner in [*schema.get("properties", {}).values(), *([schema["items"]] if "items" in schema else [])]:
        yield from schemas(inner)


def test_every_schema_is_json_that_is_checked_in_full():
    for tool in ALL_TOOLS.values():
        top = json.loads(json.dumps(tool.parameters))
        assert tool.description.endswith(".") and top["additionalProperties"] is False
        assert all(inner["description"] for inner in top["properties"].values())
        for schema in schemas(top):
            assert set(schema) <= KEYWORDS
            assert set(schema.get("required", ())) <= set(schema.get("properties", {}))


def test_tools_are_selected_by_name_and_by_set():
    assert list(select_tools(("repository/*",))) == [
        "read_file", "list_dir", "glob", "grep", "semantic_search", "edit_file", "apply_patch", "shell", "todo_write",
        "finish",
    ]  # fmt: skip
    assert select_tools(("repository/grep",))["grep"] is not select_tools(("grep",))["grep"]
    assert list(select_tools(("read", "repository/shell"))) == ["read", "shell"]
    for names, words in (
        (("read", "shell"), "the tool 'shell'; the tools are run_tests, grep"),
        (("grep", "repository/grep"), "two tools that are called 'grep'"),
        (("repository/read",), "the tool 'repository/read'"),
    ):
        with pytest.raises(UserError, match=words):
            select_tools(names)
    assert tools.is_finish(ToolCall("finish", {}), TOOLS) and not tools.is_finish(ToolCall("finish", {"x": 1}), TOOLS)


OWN_TOOLS = """
from composer_jax.agent.tools import Tool, object_schema


async def count_files(workspace, suffix):
    return f"{sum(path.endswith(suffix) for path in workspace.files)} files"


COUNT = Tool(
    "count_files",
    "Count the files with an ending.",
    object_schema(("suffix",), suffix={"type": "string", "description": "such as .py"}),
    count_files,
    read_only=True,
)
NOT_A_TOOL = 1
"""


def test_a_task_names_a_user_s_tool_by_import_path(tmp_path, monkeypatch):
    (tmp_path / "my_tools.py").write_text(OWN_TOOLS)
    monkeypatch.syspath_prepend(tmp_path)
    task = dataclasses.replace(task_of({"a.py": "", "b.txt": ""}), tools=("read", "my_tools:COUNT"))
    selected = select_tools(task.tools)
    assert list(selected) == ["read", "count_files"]
    calls = [ToolCall("count_files", {"suffix": ".py"}), ToolCall("count_files", {})]
    answers = asyncio.run(execute_calls(calls, selected, Workspace(task, None)))
    assert answers == ["1 files", "ERROR count_files needs suffix"]
    for name in ("my_tools:NOT_A_TOOL", "my_tools:NONE"):
        with pytest.raises(UserError, match=name):
            select_tools((name,))


@pytest.mark.parametrize(
    ("schema", "value", "expected"),
    [
        ({"type": "integer"}, True, "x must be an integer"),
        ({"type": "integer"}, 1.0, "x must be an integer"),
        ({"type": "integer", "minimum": 1}, 0, "x must be at least 1"),
        ({"type": "integer", "maximum": 9}, 10, "x must be at most 9"),
        ({"type": "boolean"}, 1, "x must be true or false"),
        ({"type": "string"}, None, "x must be a string"),
        ({"type": "string", "minLength": 1}, "", "x is empty"),
        ({"type": "string", "maxLength": 1}, "ab", "x has 2 characters; at most 1 are taken"),
        ({"type": "string", "enum": ["a", "b"]}, "c", "x must be one of a, b"),
        ({"type": "string"}, "\udc80", "x holds half of a surrogate pair, which no file can hold"),
        ({"type": "array", "items": {"type": "string"}}, {}, "x must be a list"),
        ({"type": "array", "items": {"type": "string"}}, ["a", 1], "item 2 of x must be a string"),
        ({"type": "array", "maxItems": 1, "items": {"type": "string"}}, ["a", "b"], "x has 2 items; at most 1"),
        ({"type": "object", "properties": {}, "required": []}, [], "x must be an object"),
        ({"type": "object", "properties": {}, "required": []}, {"y": 1}, "x takes no y"),
        ({"type": "object", "properties": {"y": {"type": "string"}}, "required": ["y"]}, {}, "x needs y"),
    ],
)
def test_the_first_schema_violation_is_reported(schema, value, expected):
    with pytest.raises(ToolError) as error:
        check("x", schema, value)
    assert expected in str(error.value)


async def test_the_plan_is_kept_and_shown(chat):
    items = [{"content": "look", "status": "done"}, {"content": "mend", "status": "in_progress"}]
    assert await chat.ask("todo_write", items=items) == "[x] look\n[>] mend"
    assert [todo.content for todo in chat.workspace.todos] == ["look", "mend"]
    items[0]["status"] = "finished"
    answer = await chat.ask("todo_write", items=items)
    assert answer == "ERROR status must be one of pending, in_progress, done"
    assert (await chat.ask("todo_write", items=[{"content": "x"}])) == "ERROR item 1 of items needs status"
    assert len(chat.workspace.todos) == 2
    assert await chat.ask("todo_write", items=[]) == "the plan is empty" and chat.workspace.todos == ()


async def test_semantic_search_sees_changes(chat):
    answer = await chat.ask("semantic_search", query="convert an amount of money")
    assert answer.startswith("src/rates/table.py:12-14 RateTable.convertAmount\n        def convertAmount(")
    await chat.ask("edit_file", path="src/rates/table.py", old="convertAmount", new="zebra_crossing")
    await chat.ask("edit_file", path="n.md", new="A giraffe.\n")
    assert (await chat.ask("semantic_search", query="zebra giraffe")).count("\n") >= 3
    assert "convertAmount" not in await chat.ask("semantic_search", query="convertAmount")
    await chat.ask("edit_file", path="n.md", delete=True)
    assert "giraffe" not in await chat.ask("semantic_search", query="giraffe")
    await chat.ask("shell", command="rm -r src")
    assert "zebra" not in await chat.ask("semantic_search", query="zebra crossing")
    assert await chat.ask("semantic_search", query="x", path="src") == "ERROR there is no file or folder src"


async def test_calls_take_effect_in_their_order(chat):
    answers = await chat.ask_all(
        ("read_file", {"path": "n"}),
        ("edit_file", {"path": "n", "new": "1\n"}),
        ("read_file", {"path": "n"}),
        ("grep", {"pattern": "1", "path": "n"}),
        ("shell", {"command": "echo 2 > n"}),
        ("nothing", {}),
        ("read_file", {"path": "n"}),
    )
    assert [answer.split("\n")[0] for answer in answers] == [
        "ERROR there is no file n", "created n with 1 lines", "     1\t1", "n:1:1", "[exit 0]",
        "ERROR no tool nothing", "     1\t2",
    ]  # fmt: skip


def test_consecutive_read_only_calls_run_at_the_same_time():
    running, most = 0, 0

    async def slow(workspace):
        nonlocal running, most
        running += 1
        most = max(most, running)
        while most < 3 and time.monotonic() < deadline:
            await asyncio.sleep(0)
        running -= 1
        return "ok"

    tool = tools.Tool("slow", "Wait.", tools.tool.object_schema(), slow, str, True)
    deadline = time.monotonic() + 20
    calls = [ToolCall("slow", {}), MalformedToolCall("x", "no"), ToolCall("slow", {}), ToolCall("slow", {})]
    answer = asyncio.run(execute_calls(calls, {"slow": tool}, Workspace(task_of({}), None)))
    assert answer == ["ok", "ERROR no", "ok", "ok"] and most == 3


async def test_an_outage_in_concurrent_calls_is_raised_after_all_have_ended(dying_pool, repository):
    pool = dying_pool(range(99))
    workspace = Workspace(task_of({}, repository=repository), pool)
    calls = [ToolCall("grep", {"pattern": "x"}), ToolCall("read_file", {"path": "README.md"})]
    with pytest.raises(SandboxDied):
        await execute_calls(calls, TOOLS, workspace)
    assert len(asyncio.all_tasks()) == 1 and len(pool.sandboxes) == ATTEMPTS


async def test_names_of_any_bytes_are_shown_as_text(tmp_path, pool):
    name = b"caf\xe9.txt".decode(errors="surrogateescape")
    (tmp_path / name).write_text("needle\n")
    workspace = Workspace(task_of({}, repository=tmp_path), pool)
    for call in (ToolCall("glob", {"pattern": "*"}), ToolCall("grep", {"pattern": "needle"})):
        answer = await execute_call(call, TOOLS, workspace)
        assert answer.startswith("caf") and answer.encode()
    await execute_call(ToolCall("shell", {"command": "mv caf* $(printf 'b\\377.txt')"}), TOOLS, workspace)
    assert len(workspace.changes) == 2
    await workspace.run(["true"], 5)
    await workspace.close()
    assert replace_surrogates("a\udce9b") == "a?b"


PATHS = st.sampled_from([
    "README.md", "src", "src/rates/table.py", "out/passwd", "passwd", "pipe", "../x", "/etc/passwd", "a/../../etc",
    "new.txt", "/workspace/README.md", "docs/ünïcödé name.txt", "", ".", "/", "\0", "\ud800", "x" * 5000, "image.bin",
    ".git/config",
])  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8) | PATHS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)
NEAR = {
    "string": st.text(max_size=12)
    | PATHS
    | st.sampled_from(["# Rates", "*** Begin Patch\n*** Delete File: x\n*** End Patch"]),
    "integer": st.integers(-2, 1200),
    "boolean": st.booleans(),
    "array": st.lists(
        st.fixed_dictionaries({"content": st.text(max_size=3), "status": st.sampled_from(["done", "x"])})
    ),
}
SAFE = [name for name in TOOLS if name not in ("grep", "shell")]  # these two have a sandbox to wait for


@st.composite
def some_calls(draw, names):
    name = draw(st.sampled_from([*names, "nothing"]))
    wanted = TOOLS[name].parameters["properties"] if name in TOOLS else {}
    near = {argument: NEAR[schema["type"]] | JSON for argument, schema in wanted.items()}
    arguments = draw(st.fixed_dictionaries({}, optional=near))
    if draw(st.integers(0, 9)) == 0:
        arguments[draw(st.text(max_size=4))] = draw(JSON)
    return ToolCall(name, arguments)


async def check_calls(repository, calls, pool=None):
    """No call raises, each gets a short answer, and one with an error changes nothing."""
    workspace = Workspace(task_of({}, repository=repository), pool)
    for call in calls:
        before, todos = dict(workspace.changes), workspace.todos
        answer = await execute_call(call, TOOLS, workspace)
        assert answer.encode() and len(answer) < MAX_CHARACTERS + 200 and "root:x:0" not in answer
        if answer.startswith("ERROR ") or (call.name in TOOLS and TOOLS[call.name].read_only):
            assert (workspace.changes, workspace.todos) == (before, todos)
    await workspace.close()


@settings(max_examples=150)
@given(calls=st.lists(some_calls(SAFE), max_size=6))
def test_any_calls_give_observations(repository, calls):
    asyncio.run(check_calls(repository, calls))


@pytest.mark.slow
@settings(max_examples=many(5000), suppress_health_check=[HealthCheck.too_slow])
@given(calls=st.lists(some_calls(SAFE), max_size=6))
def test_very_many_calls_give_observations(repository, calls):
    asyncio.run(check_calls(repository, calls))


@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow])
@given(calls=st.lists(some_calls(["grep", "edit_file", "list_dir"]), max_size=3))
def test_any_calls_that_run_commands_give_observations(repository, roomy_pool, calls):
    asyncio.run(check_calls(repository, calls, roomy_pool))


async def test_the_repository_itself_is_never_changed(tmp_path, roomy_pool):
    make_repository(tmp_path)

    def look():
        return {
            path: (path.lstat().st_mode, path.read_bytes() if path.is_file() and not path.is_symlink() else None)
            for path in sorted(tmp_path.rglob("*"))
        }

    before = look()
    chat = Conversation(tmp_path, roomy_pool)
    command = "rm -rf src; echo x > README.md; chmod 777 tool.sh; : > $(readlink passwd)"
    assert await chat.ask("shell", command=command)
    assert await chat.ask("edit_file", path="README.md", old="x", new="y")
    assert await chat.ask("edit_file", path="empty.txt", delete=True)
    assert chat.workspace.changes
    await chat.workspace.close()
    assert look() == before
