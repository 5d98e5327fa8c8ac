"""The shell tool: output, persistent state, background jobs, and the files that it changes."""

import re

from composer_jax.agent.tools.truncate import MAX_CHARACTERS
from composer_jax.sandbox import LocalSandboxPool, SandboxLimits
from tests.agent.tools.conftest import Conversation


async def test_output_exit_status_and_state(chat):
    assert await chat.ask("shell", command="cd src/rates && export X=1; V=2") == "[exit 0]"
    assert await chat.ask("shell", command="pwd; echo $X$V; false") == "/workspace/src/rates\n12\n[exit 1]"
    assert await chat.ask("shell", command="echo out; echo err >&2") == "out\n[stderr]\nerr\n[exit 0]"
    answer = await chat.ask("shell", command="sleep 60", timeout=1)
    assert answer.endswith("\n[stopped: not done after 1 s, or out of CPU time]")
    answer = await chat.ask("shell", command="seq 100000")
    assert len(answer) < MAX_CHARACTERS + 100 and "line breaks dropped]" in answer and answer.startswith("1\n2\n")


def test_mistakes(ask):
    assert ask("shell", command="") == "ERROR command is empty"
    assert ask("shell", command="echo \0").startswith("ERROR command has a zero byte")
    assert ask("shell", command="x", timeout=0) == "ERROR timeout must be at least 1"
    assert ask("shell", command="x", timeout=True) == "ERROR timeout must be an integer"
    assert ask("shell", command="x", timeout=10**9) == "ERROR timeout must be at most 600"
    assert ask("shell", command=["ls"]) == "ERROR command must be a string"


async def test_files_are_sent_to_the_shell_and_fetched_back(chat):
    await chat.ask("edit_file", path="a.txt", new="one\n")
    await chat.ask(
        "shell", command="cat a.txt > b.txt; rm README.md; rm -r docs; mkdir d; ln -s a.txt l; chmod +x a.txt"
    )
    kinds = {path: change.kind for path, change in chat.workspace.changes.items()}
    assert kinds == {
        "a.txt": "file", "b.txt": "file", "README.md": "gone", "docs": "gone", "d": "folder", "l": "link",
    }  # fmt: skip
    assert chat.workspace.changes["a.txt"].mode & 0o100
    assert await chat.ask("read_file", path="b.txt") == "     1\tone\n[b.txt has 1 lines]"
    assert await chat.ask("list_dir", path="docs") == "ERROR there is no folder docs"
    assert await chat.ask("edit_file", path="docs/windows.txt", new="new\n") == "created docs/windows.txt with 1 lines"
    assert await chat.ask("list_dir", path="docs") == "windows.txt"
    assert await chat.ask("shell", command="ls docs; cat docs/windows.txt") == "windows.txt\nnew\n[exit 0]"


async def test_a_background_job_reports_the_path_of_its_output(chat):
    answer = await chat.ask("shell", command="echo 'it''s' \"done\"; exit 4", background=True)
    assert re.fullmatch(r"job 1 started, process \d+; its output goes to /tmp/job-1.log", answer)
    answer = await chat.ask("shell", command="for (", background=True)
    assert answer.startswith("job 2 started")
    assert (await chat.ask("shell", command="wait; cat /tmp/job-2.log")).endswith("[exit 2]\n[exit 0]")
    assert (await chat.ask("shell", command="cat /tmp/job-1.log")).endswith("[exit 4]\n[exit 0]")


async def test_the_next_call_sees_files_written_by_a_job(chat):
    await chat.ask(
        "shell",
        command="mkfifo /tmp/go; (read x < /tmp/go; echo late > late.txt; mkfifo /tmp/on; read y < /tmp/on) &",
    )
    assert (await chat.ask("read_file", path="late.txt")).startswith("ERROR there is no file")
    await chat.ask("shell", command="echo > /tmp/go; while ! [ -p /tmp/on ]; do sleep 0.01; done")
    assert (await chat.ask("read_file", path="late.txt")).startswith("     1\tlate")
    sandbox = chat.sandbox
    assert sandbox.jobs
    await sandbox.run(["sh", "-c", "echo later > late.txt"])  # as the job might, with no tool called
    assert (await chat.ask("read_file", path="late.txt")).startswith("     1\tlater")


async def test_a_new_shell_is_announced(chat):
    await chat.ask("shell", command="cd src; echo x > made.txt")
    chat.sandbox.end("a test ended it")
    answer = await chat.ask("shell", command="pwd; cat src/made.txt")
    assert answer == (
        "[the shell was lost and a new one started: its folder, variables, jobs and /tmp are as at first]\n"
        "/workspace\nx\n[exit 0]"
    )
    assert await chat.ask("shell", command="pwd") == "/workspace\n[exit 0]"
    chat.sandbox.end("a test ended it")
    assert (await chat.ask("grep", pattern="^x$")).startswith("src/made.txt:1:x")
    assert (await chat.ask("shell", command="pwd")).startswith("[the shell was lost")


async def test_changes_that_are_too_large_are_undone_with_an_error(repository):
    pool = LocalSandboxPool(SandboxLimits(timeout_s=10, workspace_mb=4, file_mb=100), size=2)
    chat = Conversation(repository, pool)
    await chat.ask("shell", command="echo kept > kept.txt")
    answer = await chat.ask("shell", command="rm kept.txt; truncate -s 50M sparse")
    assert answer.startswith("ERROR what was changed in the workspace is more than") and answer.endswith(
        "before the command"
    )
    assert "\nkept\n[stderr]\nls: " in await chat.ask("shell", command="cat kept.txt; ls sparse")
    assert (await chat.ask("read_file", path="kept.txt")).startswith("     1\tkept")
    await chat.workspace.close()
    pool.kill()


async def test_a_special_file_in_the_way_does_not_stop_the_next_command(chat):
    await chat.ask("shell", command="mkfifo a; mkfifo b; mkdir c; mkfifo c/d")
    for path in ("a", "b/x", "c/d"):
        assert (await chat.ask("edit_file", path=path, new="text\n")).startswith("created")
    assert (await chat.ask("shell", command="cat a b/x c/d")).endswith("text\ntext\ntext\n[exit 0]")
