"""The shell of a container, which keeps what commands leave behind."""

import asyncio

import pytest

from composer_jax.sandbox import Change, Limits, SandboxDied
from composer_jax.sandbox.container_shell import ENDED
from tests.containers.test_container import in_container


def test_folder_variables_functions_and_status_stay(engine):
    async def use(sandbox):
        for command in ("cd old; X='a  b'; f() { echo f of $1; }", "false"):
            await sandbox.shell(command)
        return await sandbox.shell('echo $?; pwd; echo "$X"; f 1; cat; echo late >&2; (exit 7)')

    result = in_container(engine, use)
    assert result.stdout == "1\n/workspace/old\na  b\nf of 1\n"
    assert (result.outcome, result.exit_code, result.stderr) == ("nonzero", 7, "late\n")


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("printf 'no end'", "no end"),
        ("printf ''", ""),
        ("echo a\necho b", "a\nb\n"),
        ("cat << end\n'quoted' $((1 + 1))\nend", "'quoted' 2\n"),
        ("echo 'it'\\''s'", "it's\n"),
        ("for i in 1 2; do\n echo $i # ; done\ndone", "1\n2\n"),
        ("head -c 1 /dev/stdin | wc -c", "0\n"),
        ("echo caf\u00e9 \udcff", "caf\u00e9 \ufffd\n"),
    ],
)
def test_what_a_command_says_is_what_comes_back(engine, command, said):
    async def use(sandbox):
        return await sandbox.shell(command.replace("head -c 1 /dev/stdin", "cat"))

    assert in_container(engine, use).stdout.replace(" ", "") == said.replace(" ", "")


@pytest.mark.parametrize("command", ["if", "echo 'open", "done", ")"])
def test_a_command_that_is_no_shell_is_an_error_and_the_shell_goes_on(engine, command):
    async def use(sandbox):
        await sandbox.shell("X=1")
        return await sandbox.shell(command), await sandbox.shell("echo $X")

    wrong, after = in_container(engine, use)
    assert wrong.outcome == "nonzero" and "syntax error" in wrong.stderr or "unexpected EOF" in wrong.stderr
    assert (after.outcome, after.stdout) == ("ok", "1\n")


def test_jobs_go_on_between_commands_and_their_output_comes_later(engine):
    async def use(sandbox):
        started = await sandbox.shell("(while ! [ -e go ]; do sleep 0.05; done; echo done by a job) &")
        jobs = sandbox.jobs
        beside = await sandbox.run(["touch", "go"])
        later = await sandbox.shell("wait; echo waited")
        async with asyncio.timeout(10):
            while sandbox.jobs:  # what has ended may still be seen for a moment
                await sandbox.shell(":")
        return started, jobs, beside, later

    started, jobs, beside, later = in_container(engine, use)
    assert (started.outcome, started.stdout, beside.outcome) == ("ok", "", "ok") and jobs >= 1
    assert later.stdout == "done by a job\nwaited\n"


@pytest.mark.parametrize("command", ["exit 3", "kill -9 $$", "exec true", "set -e; false"])
def test_a_shell_that_ends_says_so_and_the_next_command_has_a_new_one(engine, command):
    async def use(sandbox):
        await sandbox.shell("X=1; cd old")
        return await sandbox.shell(command), await sandbox.shell("echo [$X]; pwd")

    ended, after = in_container(engine, use)
    assert ended.stderr.endswith(ENDED) and ended.exit_code == {"exit 3": 3, "exec true": 0}.get(
        command, ended.exit_code
    )
    assert (after.outcome, after.stdout) == ("ok", "[]\n/workspace\n")


def test_a_command_that_takes_too_long_is_killed_with_all_jobs(engine):
    async def use(sandbox):
        await sandbox.shell("setsid sleep 1000 &")
        late = await sandbox.shell("echo begun; sleep 1000", timeout_s=1)
        left = await sandbox.shell("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
        return late, left

    late, left = in_container(engine, use)
    assert (late.outcome, late.exit_code, late.stdout) == ("timeout", 124, "begun\n")
    assert late.stderr.endswith(ENDED) and "1000" not in left.stdout


def test_too_much_memory_and_too_much_output(engine):
    async def use(sandbox):
        bomb = await sandbox.shell("x=$(dd if=/dev/zero bs=1000000 count=500 | tr '\\0' x)")
        flood = await sandbox.shell("dd if=/dev/zero bs=1000 count=1000 2>&- | tr '\\0' x; echo the end")
        return bomb, flood, (await sandbox.shell("echo fine")).stdout

    bomb, flood, after = in_container(engine, use, Limits(timeout_s=20, memory_mb=64, processes=32, output_kb=8))
    assert (bomb.outcome, bomb.exit_code) == ("out_of_memory", 137)
    assert flood.stdout.endswith("xx\nthe end\n") or flood.stdout.endswith("xthe end\n")
    assert len(flood.stdout) < 10_000 and flood.truncated_bytes > 900_000
    assert after == "fine\n"


def test_what_the_shell_changed_is_told(engine):
    async def use(sandbox):
        await sandbox.shell("echo new > kept; mkdir deep; echo x > deep/er; rm doomed")
        return await sandbox.changes()

    changes = in_container(engine, use)
    assert changes.keys() == {"kept", "deep", "deep/er", "doomed"} and changes["kept"] == Change("file", b"new\n")


def test_a_cancelled_command_ends_the_container(engine):
    async def use(sandbox):
        running = asyncio.ensure_future(sandbox.shell("echo begun; sleep 1000"))
        await asyncio.sleep(1)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        with pytest.raises(SandboxDied):
            await sandbox.shell("true")

    in_container(engine, use)


def test_the_workspace_can_be_fetched(engine, tmp_path):
    async def use(sandbox):
        await sandbox.shell(
            "ln -s /etc away; ln -s kept near; mkdir -p a/b; chmod 0 a/b; echo x > run; chmod 755 run; echo y > a/c"
        )
        await sandbox.export(tmp_path)

    in_container(engine, use, files={"more/file": "y"})
    assert (tmp_path / "kept").read_text() == "old\n" and (tmp_path / "more/file").read_text() == "y"
    assert (tmp_path / "away").readlink().as_posix() == "/etc" and (tmp_path / "near").read_text() == "old\n"
    assert (tmp_path / "a/c").read_text() == "y\n" and (tmp_path / "run").stat().st_mode & 0o777 == 0o755
