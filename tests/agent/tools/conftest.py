"""Fixtures of the repository tools' tests: a small real repository and calls of tools on it."""

import asyncio
import contextlib
import os
import subprocess

import pytest

from composer_jax.agent.tools import execute_call, execute_calls, select_tools
from composer_jax.agent.workspace import Workspace
from composer_jax.data.chat.messages import ToolCall
from composer_jax.sandbox import LocalSandboxPool, SandboxLimits
from tests.agent.conftest import DyingPool, task_of

TOOLS = select_tools(("repository/*",))

TABLE_PY = '''"""Rates and scales."""

import os


class RateTable:
    """Holds the exchange rates."""

    def __init__(self, rates):
        self.rates = rates

    def convertAmount(self, amount, currency):
        """Money in another currency."""
        return amount * self.rates[currency]


def parse_header(line):
    name, _, value = line.partition(":")
    return name.strip(), value.strip()
'''


def make_repository(folder):
    """A git repository with packages and every kind of troublesome file."""
    files = {
        "README.md": "# Rates\n\nHow to convert money.\n",
        "src/rates/__init__.py": "",
        "src/rates/table.py": TABLE_PY,
        "src/rates/deep/er/leaf.py": "LEAF = 1\n",
        "src/web/server.py": "from rates.table import parse_header\n\n\ndef serve():\n    return parse_header('')\n",
        "tests/test_table.py": "def test_one():\n    assert True\n",
        "docs/windows.txt": "one\r\ntwo\r\nthree\r\n",
        "docs/ünïcödé name.txt": "grüße\n",
        "docs/no_end.txt": "first\nlast",
        "broken.py": "def f(:\n    pass\n",
        "empty.txt": "",
        ".hidden": "secret\n",
    }
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(text.encode())
    (folder / "image.bin").write_bytes(b"\x89PNG\0\0\xff" * 50)
    (folder / "latin.txt").write_bytes(b"caf\xe9\n")
    (folder / "out").symlink_to("/etc")
    (folder / "passwd").symlink_to("/etc/passwd")
    (folder / "docs/table").symlink_to("../src/rates/table.py")
    (folder / "tool.sh").write_text("#!/bin/sh\necho tool\n")
    (folder / "tool.sh").chmod(0o755)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c", "-C", str(folder)]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "first"]):
        subprocess.run([*git, *command], check=True, env={"PATH": os.environ["PATH"], "HOME": str(folder)})
    os.mkfifo(folder / "pipe")


@pytest.fixture(scope="session")
def repository(tmp_path_factory):
    folder = tmp_path_factory.mktemp("repository")
    make_repository(folder)
    return folder


@pytest.fixture(scope="session")
def roomy_pool():
    pool = LocalSandboxPool(SandboxLimits(timeout_s=10), size=8)
    yield pool
    pool.kill()


class Conversation:
    """A workspace on the repository; each call of `ask` is one message of the model."""

    def __init__(self, repository, pool, cache=None, **options):
        self.pool = DyingPool(pool, set())
        results = cache and cache.of_episode("t", 0)
        self.workspace = Workspace(task_of({}, repository=repository), self.pool, results, **options)

    @property
    def sandbox(self):
        """The sandbox that was acquired last."""
        return self.pool.sandboxes[-1]

    async def ask(self, tool, **arguments):
        return await execute_call(ToolCall(tool, arguments), TOOLS, self.workspace)

    async def ask_all(self, *calls):
        return await execute_calls([ToolCall(name, arguments) for name, arguments in calls], TOOLS, self.workspace)


async def converse(*arguments, **options):
    chat = Conversation(*arguments, **options)
    try:
        yield chat
    finally:
        await chat.workspace.close()


@pytest.fixture
def chat(repository, roomy_pool):
    """A Conversation on the untouched repository, which coroutine tests get."""
    return converse(repository, roomy_pool)


@pytest.fixture
def ask(repository, roomy_pool):
    """The observation of one call on the untouched repository."""

    async def go(tool, arguments):
        async with contextlib.aclosing(converse(repository, roomy_pool)) as chats:
            return await (await anext(chats)).ask(tool, **arguments)

    return lambda tool, **arguments: asyncio.run(go(tool, arguments))
