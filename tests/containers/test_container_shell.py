"""The shell of a container, which keeps what commands leave behind."""

import asyncio
import time

import pytest

from composer_jax.sandbox import Change, SandboxDied, SandboxFileError, SandboxLimits
from composer_jax.sandbox.container_pool import ContainerPool
from composer_jax.sandbox.container_shell import SHELL_ENDED
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
    ("command", "printed"),
    [
        ("printf 'no end'", "no end"),
        ("printf ''", ""),
        ("echo a\necho b", "a\nb\n"),
        ("cat << end\n'quoted' $((1 + 1))\nend", "'quoted' 2\n"),
        ("echo 'it'\\''s'", "it's\n"),
        ("for i in 1 2; do\n echo $i # ; done\ndone", "1\n2\n"),
        ("cat; echo nothing", "nothing\n"),
        ("echo caf\u00e9 \udcff", "caf\u00e9 \ufffd\n"),
    ],
)
def test_the_output_of_a_command_is_returned_unchanged(engine, command, printed):
    async def use(sandbox):
        return await sandbox.shell(command)

    assert in_container(engine, use).stdout == printed


@pytest.mark.parametrize("command", ["if", "echo 'open", "done", ")"])
def test_a_command_that_is_not_a_shell_is_an_error_and_the_shell_goes_on(engine, command):
    async def use(sandbox):
        await sandbox.shell("X=1")
        return await sandbox.shell(command), await sandbox.shell("echo $X")

    wrong, after = in_container(engine, use)
    assert wrong.outcome == "nonzero" and ("syntax error" in wrong.stderr or "unexpected EOF" in wrong.stderr)
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
    assert ended.stderr.endswith(SHELL_ENDED) and ended.exit_code == {"exit 3": 3, "exec true": 0}.get(
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
    assert late.stderr.endswith(SHELL_ENDED) and "1000" not in left.stdout


FLOOD = "dd if=/dev/zero bs=1000 | tr '\\0' x"


def test_an_endless_flood_ends_with_its_time_and_the_container_with_it(engine):
    async def use(sandbox):
        late = await sandbox.shell(FLOOD, timeout_s=1)
        await sandbox.shell(f"({FLOOD}) &")
        await asyncio.sleep(0.5)  # no request, while the job prints more than a pipe holds
        return late, await sandbox.shell("echo fine"), time.monotonic()

    late, beside, before_the_end = in_container(engine, use)
    assert late.outcome == "timeout" and len(late.stdout) < 70_000 and late.truncated_bytes > 1_000_000
    assert beside.outcome == "ok"
    assert time.monotonic() - before_the_end < 15


@pytest.mark.parametrize(
    "job",
    ["while :; do printf .; sleep 0.001; done", "while :; do echo line; sleep 0.001; done"],
    ids=["dots", "lines"],
)
def test_a_job_that_never_stops_talking_tears_no_answer_apart(engine, job):
    async def use(sandbox):
        await sandbox.shell(f"{{ {job}; }} &")
        return [await sandbox.shell(f"echo answer {number}", timeout_s=10) for number in range(10)]

    for number, result in enumerate(in_container(engine, use)):
        assert result.outcome == "ok" and f"answer {number}" in result.stdout


def test_what_a_job_says_right_after_a_command_is_not_lost(engine):
    async def use(sandbox):
        await sandbox.shell("n=0; while [ $n -lt 3000 ]; do n=$((n + 1)); echo $n; done > lines")
        started = await sandbox.shell("cat lines &")
        return started.stdout + (await sandbox.shell("wait")).stdout

    numbers = in_container(engine, use, SandboxLimits(timeout_s=20, memory_mb=64, processes=32, output_kb=256))
    assert sorted(map(int, numbers.split())) == list(range(1, 3001))


@pytest.mark.parametrize(
    "command", ["set -f", "set -x", "printf() { return 5; }; echo() { return 5; }", "exec > /dev/null"]
)
def test_settings_of_the_shell_do_not_hide_its_end(engine, command):
    async def use(sandbox):
        await sandbox.shell(command)
        return await sandbox.shell("sleep 100 & true", timeout_s=5), sandbox.jobs

    result, jobs = in_container(engine, use)
    assert result.outcome == "ok" and jobs >= 1 and "composer_end" not in result.stderr


@pytest.mark.parametrize("end", ["%s 0 4", "%s x y z"], ids=["an_end", "nonsense"])
def test_a_command_that_knows_the_word_deceives_itself_only(engine, end):
    # bash keeps what is still to come, our next lines, on descriptor 10 while it carries out an eval.
    find = "s=$(timeout 1 cat /proc/$$/fd/10); w=${s#*composer_end }; w=${w%%;*}"
    forge = f"{find}; printf '\\n{end}\\n' $w; printf '\\n%s \\n' $w >&2; sleep 2; echo late"

    async def use(sandbox):
        return [await sandbox.shell(command) for command in (forge, "echo fine", "echo fine")]

    forged, after, last = in_container(engine, use)
    if "x" in end:
        assert forged.outcome == "nonzero" and forged.stderr.endswith(SHELL_ENDED)
    else:
        assert forged.seconds < 2 and after.stdout == "late\nfine\n"
    assert (last.outcome, last.stdout) == ("ok", "fine\n")


def test_memory_of_a_command_that_ended_well_is_not_charged_to_the_next(engine):
    async def use(sandbox):
        await sandbox.shell("(x=$(dd if=/dev/zero bs=1000000 count=500 | tr '\\0' x)) || true")
        return await sandbox.shell("false")

    assert in_container(engine, use).outcome == "nonzero"


def test_jobs_stand_still_while_changes_are_read_and_then_go_on(engine):
    async def use(sandbox):
        job = (await sandbox.shell("sleep 100 & echo $!")).stdout.strip()
        async with sandbox.paused_jobs():
            meanwhile = await sandbox.read(f"/proc/{job}/stat")
        return meanwhile, await sandbox.read(f"/proc/{job}/stat")

    meanwhile, after = in_container(engine, use)
    assert b") T " in meanwhile and b") S " in after


def test_files_that_come_and_go_beside_a_command_do_not_cost_the_shell(engine):
    async def use(sandbox):
        come_and_go = "while :; do n=$((n + 1)); echo x > t$n; rm t$n; done"
        await sandbox.shell(f"for job in 1 2 3; do (mkdir $job; cd $job; exec sh -c '{come_and_go}') & done")
        for _ in range(5):
            await sandbox.changes()
        return await sandbox.shell("echo fine"), sandbox.jobs

    result, jobs = in_container(engine, use)
    assert result.stdout == "fine\n" and jobs >= 1


def test_what_run_leaves_beside_the_shell_is_a_job(engine):
    async def use(sandbox):
        await sandbox.shell("true")
        await sandbox.run(["sh", "-c", "(while :; do n=$((n + 1)); echo x > t$n; rm t$n; done) > /dev/null 2>&1 &"])
        for _ in range(5):
            await sandbox.changes()
        return sandbox.jobs

    assert in_container(engine, use) >= 1


def test_a_name_that_is_not_text_is_a_name(engine):
    async def use(sandbox):
        await sandbox.shell("echo x > $(printf 'bad\\377name')")
        return await sandbox.changes()

    assert in_container(engine, use) == {"bad\udcffname": Change("file", b"x\n")}


def test_a_container_whose_programs_lie_is_an_error_of_the_workspace(engine):
    lie = "echo x > kept; rm /bin/xargs; printf '#!/bin/sh\\necho zz\\n' > /bin/xargs; chmod 755 /bin/xargs"

    async def use(sandbox):
        await sandbox.shell(lie)
        with pytest.raises(SandboxFileError, match="do not work"):
            await sandbox.changes()

    in_container(engine, use)


def at_home(engine, profile, use):
    """Runs `use(sandbox)` with a container whose ~/.bashrc is this."""

    async def go():
        home = {"environment": {"HOME": "/tmp"}, "workspace": "/workspace"}
        limits = SandboxLimits(timeout_s=20, memory_mb=64)
        async with ContainerPool(engine.image, limits, engine=engine, **home) as pool:
            async with await pool.acquire({"rc": profile}) as sandbox:
                assert (await sandbox.run(["sh", "-c", "cat rc > /tmp/.bashrc"])).outcome == "ok"
                return await use(sandbox)

    return asyncio.run(go())


@pytest.mark.parametrize("profile", ["exit 0", "sleep 100"])
def test_a_profile_that_lets_no_shell_start_is_a_failure_of_the_infrastructure(engine, monkeypatch, profile):
    monkeypatch.setattr("composer_jax.sandbox.container.REPLY_S", 3.0)

    async def use(sandbox):
        with pytest.raises(SandboxDied, match=r"its ~/\.bashrc lets no shell start"):
            await sandbox.shell("echo hi")

    at_home(engine, profile, use)


def test_variables_of_the_image_and_of_its_profile_are_there(engine):
    async def use(sandbox):
        path = (await sandbox.run(["sh", "-c", "echo $PATH"])).stdout
        return path, (await sandbox.shell("echo $PATH; echo $FOUND")).stdout

    path, printed = at_home(engine, "cat > /dev/null; export FOUND=me; echo noise; echo noise >&2", use)
    assert printed == f"{path}me\n"


def test_too_much_memory_and_too_much_output(engine):
    async def use(sandbox):
        bomb = await sandbox.shell("x=$(dd if=/dev/zero bs=1000000 count=500 | tr '\\0' x)")
        flood = await sandbox.shell("dd if=/dev/zero bs=1000 count=1000 2>&- | tr '\\0' x; echo the end")
        return bomb, flood, (await sandbox.shell("echo fine")).stdout

    bomb, flood, after = in_container(engine, use, SandboxLimits(timeout_s=20, memory_mb=64, processes=32, output_kb=8))
    assert (bomb.outcome, bomb.exit_code) == ("out_of_memory", 137)
    assert flood.stdout.endswith("xx\nthe end\n") or flood.stdout.endswith("xthe end\n")
    assert len(flood.stdout) < 10_000 and flood.truncated_bytes > 900_000
    assert after == "fine\n"


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


def test_a_workspace_that_is_too_large_is_not_fetched(engine, tmp_path):
    async def use(sandbox):
        await sandbox.run(["dd", "if=/dev/zero", "of=large", "bs=1000000", "count=3"])
        with pytest.raises(SandboxFileError, match="holds more than 1 MiB"):
            await sandbox.export(tmp_path)

    in_container(engine, use, SandboxLimits(timeout_s=20, memory_mb=64, processes=32, workspace_mb=1))
