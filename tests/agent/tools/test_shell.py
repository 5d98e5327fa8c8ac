"""The shell as a tool: what it says, what stays, what runs beside it, and what is seen of it."""

import asyncio
import re

from composer_jax.agent.tools.truncate import MAX_CHARACTERS
from composer_jax.sandbox import LocalSandboxPool, SandboxLimits
from tests.agent.tools.conftest import Asked


def test_output_ending_and_state(talk):
    async def conversation(asked):
        assert await asked.ask("shell", command="cd src/rates && export X=1; V=2") == "[exit 0]"
        assert await asked.ask("shell", command="pwd; echo $X$V; false") == "/workspace/src/rates\n12\n[exit 1]"
        assert await asked.ask("shell", command="echo out; echo err >&2") == "out\n[stderr]\nerr\n[exit 0]"
        said = await asked.ask("shell", command="sleep 60", timeout=1)
        assert said.endswith("\n[stopped: not done after 1 s, or out of CPU time]")
        said = await asked.ask("shell", command="seq 100000")
        assert len(said) < MAX_CHARACTERS + 100 and "line breaks dropped]" in said and said.startswith("1\n2\n")

    talk(conversation)


def test_mistakes(ask):
    assert ask("shell", command="") == "ERROR command is empty"
    assert ask("shell", command="echo \0").startswith("ERROR command has a zero byte")
    assert ask("shell", command="x", timeout=0) == "ERROR timeout must be at least 1"
    assert ask("shell", command="x", timeout=True) == "ERROR timeout must be an integer"
    assert ask("shell", command="x", timeout=10**9) == "ERROR timeout must be at most 600"
    assert ask("shell", command=["ls"]) == "ERROR command must be a string"


def test_files_go_there_and_back(talk):
    async def conversation(asked):
        await asked.ask("edit_file", path="a.txt", new="one\n")
        await asked.ask(
            "shell", command="cat a.txt > b.txt; rm README.md; rm -r docs; mkdir d; ln -s a.txt l; chmod +x a.txt"
        )
        kinds = {path: change.kind for path, change in asked.workspace.changes.items()}
        assert kinds == {
            "a.txt": "file", "b.txt": "file", "README.md": "gone", "docs": "gone", "d": "folder", "l": "link",
        }  # fmt: skip
        assert asked.workspace.changes["a.txt"].mode & 0o100
        assert await asked.ask("read_file", path="b.txt") == "     1\tone\n[b.txt has 1 lines]"
        assert await asked.ask("list_dir", path="docs") == "ERROR there is no folder docs"
        assert (
            await asked.ask("edit_file", path="docs/windows.txt", new="new\n")
            == "created docs/windows.txt with 1 lines"
        )
        assert await asked.ask("list_dir", path="docs") == "windows.txt"
        assert await asked.ask("shell", command="ls docs; cat docs/windows.txt") == "windows.txt\nnew\n[exit 0]"

    talk(conversation)


def test_a_background_job_says_where_its_output_goes(talk):
    async def conversation(asked):
        said = await asked.ask("shell", command="echo 'it''s' \"done\"; exit 4", background=True)
        assert re.fullmatch(r"job 1 started, process \d+; its output goes to /tmp/job-1.log", said)
        said = await asked.ask("shell", command="for (", background=True)
        assert said.startswith("job 2 started")
        assert (await asked.ask("shell", command="wait; cat /tmp/job-2.log")).endswith("[exit 2]\n[exit 0]")
        assert (await asked.ask("shell", command="cat /tmp/job-1.log")).endswith("[exit 4]\n[exit 0]")

    talk(conversation)


def test_a_job_that_reads_a_pipe_says_its_end(talk):
    async def conversation(asked):
        await asked.ask("shell", command="mkfifo go")
        await asked.ask("shell", command="read x < go; echo $x 'in' \"job\"; exit 4", background=True)
        said = await asked.ask("shell", command="echo word > go; wait; cat /tmp/job-1.log")
        assert said == "word in job\n[exit 4]\n[exit 0]"

    talk(conversation)


def test_what_a_job_writes_is_seen_by_the_next_call(talk):
    async def conversation(asked):
        await asked.ask(
            "shell",
            command="mkfifo /tmp/go; (read x < /tmp/go; echo late > late.txt; mkfifo /tmp/on; read y < /tmp/on) &",
        )
        assert (await asked.ask("read_file", path="late.txt")).startswith("ERROR there is no file")
        await asked.ask("shell", command="echo > /tmp/go; while ! [ -p /tmp/on ]; do sleep 0.01; done")
        assert (await asked.ask("read_file", path="late.txt")).startswith("     1\tlate")
        sandbox = asked.workspace._sandbox
        assert sandbox.jobs
        await sandbox.run(["sh", "-c", "echo later > late.txt"])  # as the job might, with no tool called
        assert (await asked.ask("read_file", path="late.txt")).startswith("     1\tlater")

    talk(conversation)


def test_a_new_shell_is_told_of(talk):
    async def conversation(asked):
        await asked.ask("shell", command="cd src; echo x > made.txt")
        asked.workspace._sandbox.end("a test ended it")
        said = await asked.ask("shell", command="pwd; cat src/made.txt")
        assert said == (
            "[the shell was lost and a new one started: its folder, variables, jobs and /tmp are as at first]\n"
            "/workspace\nx\n[exit 0]"
        )
        assert await asked.ask("shell", command="pwd") == "/workspace\n[exit 0]"
        asked.workspace._sandbox.end("a test ended it")
        assert (await asked.ask("grep", pattern="^x$")).startswith("src/made.txt:1:x")
        assert (await asked.ask("shell", command="pwd")).startswith("[the shell was lost")

    talk(conversation)


def test_what_cannot_be_kept_is_undone_and_said(repository):
    async def go():
        pool = LocalSandboxPool(SandboxLimits(timeout_s=10, workspace_mb=4, file_mb=100), size=2)
        asked = Asked(repository, pool)
        await asked.ask("shell", command="echo kept > kept.txt")
        said = await asked.ask("shell", command="rm kept.txt; truncate -s 50M sparse")
        assert said.startswith("ERROR what was changed in the workspace is more than") and said.endswith(
            "before the command"
        )
        assert "\nkept\n[stderr]\nls: " in await asked.ask("shell", command="cat kept.txt; ls sparse")
        assert (await asked.ask("read_file", path="kept.txt")).startswith("     1\tkept")
        await asked.workspace.close()
        pool.kill()

    asyncio.run(go())


def test_something_in_the_way_does_not_stop_the_next_command(talk):
    async def conversation(asked):
        await asked.ask("shell", command="mkfifo a; mkfifo b; mkdir c; mkfifo c/d")
        for path in ("a", "b/x", "c/d"):
            assert (await asked.ask("edit_file", path=path, new="text\n")).startswith("created")
        assert (await asked.ask("shell", command="cat a b/x c/d")).endswith("text\ntext\ntext\n[exit 0]")

    talk(conversation)
