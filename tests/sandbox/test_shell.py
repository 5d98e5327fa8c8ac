"""The persistent shell: what stays, what goes, and what it cannot be made to do."""

import asyncio
import warnings

import pytest

from composer_jax.sandbox import LocalSandboxPool, SandboxLimits
from tests.sandbox.fixtures import LIMITS

ENDED = "the shell has ended"


def say(pool, *commands: str, timeout_s: float = 10.0, files=None):
    """The results of commands in one shell, and the number of jobs after the last."""

    async def go():
        async with await pool.acquire(files or {}) as sandbox:
            results = [await sandbox.shell(command, timeout_s=timeout_s) for command in commands]
            return results, sandbox.jobs

    return asyncio.run(go())


def until_ended(pid: str) -> list[str]:
    """A command that waits until the process is gone, or is a zombie, which its parent can then reap."""
    return ["sh", "-c", f"while grep -q '^State:[[:space:]]*[^XZ[:space:]]' /proc/{pid.strip()}/status; do :; done"]


def test_folder_variables_functions_and_status_stay(pool):
    results, jobs = say(
        pool, "mkdir d; cd d; X=1; export Y=2; f() { echo f $X; }; false", "echo $? $X; pwd; f; sh -c 'echo $Y'"
    )
    assert (results[0].outcome, results[0].exit_code) == ("nonzero", 1)
    assert (results[1].outcome, results[1].stdout) == ("ok", "1 1\n/workspace/d\nf 1\n2\n")
    assert jobs == 0


def test_output_and_codes_are_those_of_the_command(pool):
    results, _ = say(pool, "echo out; echo err >&2; (exit 7)", "nonsense-command", "for", "echo after", "")
    assert (results[0].stdout, results[0].stderr, results[0].exit_code) == ("out\n", "err\n", 7)
    assert results[1].exit_code == 127 and "nonsense-command: command not found" in results[1].stderr
    assert results[2].exit_code == 2 and "syntax error" in results[2].stderr
    assert results[3].stdout == "after\n"
    assert (results[4].outcome, results[4].stdout) == ("ok", "")


def test_background_jobs_outlive_their_command_and_other_commands(pool, trace):
    async def go():
        async with await pool.acquire({}) as sandbox:
            await sandbox.shell(f"(sleep 0.3; echo late) & sleep {trace.text} & echo started")
            assert sandbox.jobs >= 2
            await sandbox.run(["python", "-c", "print(1)"])  # which kills only what it started itself
            await trace.wait_until_sleeping()
            await asyncio.sleep(0.5)
            result = await sandbox.shell("kill %2; wait; echo gone")
            assert (result.stdout, sandbox.jobs) == ("late\ngone\n", 0)
        trace.wait_until_gone()

    asyncio.run(go())


def test_jobs_end_with_the_sandbox(pool, trace):
    async def go():
        async with await pool.acquire({}) as sandbox:
            await sandbox.shell(f"setsid nohup sleep {trace.text} >/dev/null 2>&1 &")
            await trace.wait_until_sleeping()

    asyncio.run(go())
    trace.wait_until_gone()


def test_a_command_that_takes_too_long_is_killed_and_the_shell_goes_on(pool, trace):
    async def go():
        async with await pool.acquire({}) as sandbox:
            await sandbox.shell("cd /tmp; X=kept; sleep 60 &")
            result = await sandbox.shell(f"echo before; sleep {trace.text} | cat", timeout_s=0.3)
            assert (result.outcome, result.exit_code, result.stdout) == ("timeout", 124, "before\n")
            trace.wait_until_gone()
            result = await sandbox.shell("echo $X $PWD")
            assert (result.stdout, sandbox.jobs) == ("kept /tmp\n", 1)

    asyncio.run(go())


@pytest.mark.parametrize(
    "command", ["while :; do :; done", "kill -STOP $$; echo on", "read -r x < /proc/self/fd/0; sleep 9"]
)
def test_a_shell_that_hangs_itself_is_replaced(pool, command):
    results, jobs = say(pool, "X=1", command, "echo ${X-new}; pwd", timeout_s=0.5)
    assert results[1].outcome == "timeout"
    if "sleep" not in command:  # there the shell itself was well
        assert ENDED in results[1].stderr
        assert results[2].stdout == "new\n/workspace\n"
    assert jobs == 0


@pytest.mark.parametrize(
    ("command", "code"), [("exit 3", 3), ("exec sh -c 'exit 4'", 4), ("set -e; false", 1), ("kill -9 $$", 137)]
)
def test_a_shell_that_ends_says_so_and_the_next_command_has_a_new_one(pool, command, code):
    results, jobs = say(pool, "sleep 60 & X=1", f"echo last; {command}", "echo ${X-new}")
    assert (results[1].exit_code, results[1].stdout) == (code, "last\n")
    assert ENDED in results[1].stderr
    assert (results[2].stdout, results[2].stderr, jobs) == ("new\n", "", 0)


@pytest.mark.parametrize("ending", ["sleep 9; exit 3", "(sleep 9) & wait; exit 3", "set -e; sleep 9"])
def test_a_shell_that_ends_because_its_command_was_stopped(pool, ending):
    for _ in range(3):  # which of the two comes first is a race
        results, jobs = say(pool, f"X=1; echo before; {ending}", "echo ${X-new}", timeout_s=0.3)
        assert (results[0].outcome, results[0].stdout) == ("timeout", "before\n")
        assert (results[1].outcome, jobs) == ("ok", 0)


def test_a_shell_killed_between_commands_says_its_last_words_with_the_next(pool, trace):
    async def go():
        async with await pool.acquire({}) as sandbox:
            last = f"cd /tmp; sleep {trace.text} & (sleep 0.2; echo last; kill -9 $$) & echo $$"
            pid = (await sandbox.shell(last)).stdout
            assert (await sandbox.run(until_ended(pid))).outcome == "ok"
            result = await sandbox.shell("pwd")
            assert (result.outcome, result.stdout, sandbox.jobs) == ("ok", "last\n/workspace\n", 0)
            assert ENDED in result.stderr
            trace.wait_until_gone()

    asyncio.run(go())


def test_limits_hold_in_the_shell(pool):
    results, _ = say(
        pool,
        "python -c 'x = bytearray(10**9)'",
        "head -c 20M /dev/zero > big; echo $?",
        "ulimit -v; ulimit -c; ulimit -n",
        "yes",
        "echo on",
    )
    assert results[0].outcome == "out_of_memory"
    assert results[1].stdout.strip() != "0"
    assert results[2].stdout == f"{LIMITS.memory_mb * 1024}\n0\n{LIMITS.open_files}\n"
    assert (results[3].outcome, results[3].exit_code) == ("output_limit", 153)
    assert results[3].truncated_bytes > 0
    assert results[4].stdout == "on\n"


def test_a_fork_bomb_in_the_shell(pool, trace):
    results, _ = say(pool, f"b() {{ b | b & }}; b; sleep {trace.text}", "echo alive", timeout_s=1.0)
    assert results[0].outcome in ("timeout", "nonzero")
    assert results[1].stdout.endswith("alive\n")
    trace.wait_until_gone()


def test_background_jobs_that_eat_memory_are_killed_between_commands(pool):
    hog = "import time; x = [bytearray(10**6) for _ in range(150)]; print('full', flush=True); time.sleep(60)"

    async def go():
        async with await pool.acquire({"hog.py": hog}) as sandbox:
            await sandbox.shell("python hog.py & python hog.py &")
            for _ in range(100):
                await asyncio.sleep(0.1)
                result = await sandbox.shell(":")
                if sandbox.jobs == 0:
                    break
            assert "background jobs were killed" in result.stderr

    asyncio.run(go())


def test_a_chatty_job_neither_blocks_nor_counts_against_later_commands():
    async def go():
        async with LocalSandboxPool(SandboxLimits(output_kb=4, output_stop_mb=1), size=1) as pool:
            async with await pool.acquire({}) as sandbox:
                await sandbox.shell("(head -c 3M /dev/zero | tr '\\0' x; echo done > finished) &")
                for _ in range(100):
                    await asyncio.sleep(0.05)
                    if "finished" in await sandbox.list():
                        break
                result = await sandbox.shell("echo now")
                assert result.outcome == "ok" and result.stdout.endswith("now\n")
                assert result.truncated_bytes > 2_900_000

    asyncio.run(go())


def test_descriptors_are_free_and_a_forged_code_affects_only_its_command(pool):
    results, _ = say(
        pool,
        "exec 3>three 4>four; echo x >&3; echo y >&4",
        "cat three four",
        "for fd in /proc/self/fd/*; do echo '5 0' > $fd; done 2>/dev/null; ls /proc/$$/fd > /dev/null; false",
        "echo '5 7' > /proc/$$/fd/21; (exit 9)",
        "echo fine",
        timeout_s=1.0,
    )
    assert results[1].stdout == "x\ny\n"
    assert results[4].stdout.endswith("fine\n")


def test_long_and_odd_commands(pool):
    long = "echo '" + "x" * 300_000 + "' | wc -c"
    results, _ = say(pool, long, "echo 'a\nb'\necho \"ü\"", "cat << EOF\nhere\nEOF", "a\0b")
    assert results[0].stdout == "300001\n"
    assert results[1].stdout == "a\nb\nü\n"
    assert results[2].stdout == "here\n"
    assert results[3].exit_code == 126


def test_a_snapshot_starts_a_new_shell(pool):
    async def go():
        async with await pool.acquire({}) as sandbox:
            await sandbox.shell("X=1; echo kept > file; sleep 60 &")
            await sandbox.snapshot()
            assert sandbox.jobs == 0
            assert (await sandbox.shell("echo ${X-new}; cat file")).stdout == "new\nkept\n"

    asyncio.run(go())


def test_without_isolation_it_is_the_same_shell(trace):
    async def go():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pool = LocalSandboxPool(size=1, backend="subprocess")
        async with pool, await pool.acquire({}) as sandbox:
            await sandbox.shell(f"X=1; sleep {trace.text} &")
            assert (await sandbox.shell("sleep 60 | cat", timeout_s=0.3)).outcome == "timeout"
            assert ((await sandbox.shell("echo $X")).stdout, sandbox.jobs) == ("1\n", 1)
        trace.wait_until_gone()

    asyncio.run(go())
