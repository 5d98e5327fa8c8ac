"""The persistent shell: bash is the author's own, but it must not keep the worker or evade a limit."""

import asyncio
import textwrap
import time

import pytest

ENDED = "the shell has ended"


def say(pool, *commands: str, timeout_s: float = 3.0, files=None):
    """The results of commands in one shell, after which the sandbox works."""

    async def go():
        async with await pool.acquire(files or {}) as sandbox:
            results = [await sandbox.shell(command, timeout_s=timeout_s) for command in commands]
            assert (await sandbox.shell("echo works", timeout_s=5.0)).stdout.endswith("works\n")
            after = await sandbox.run(["echo", "alive"])
            assert (after.outcome, after.stdout) == ("ok", "alive\n"), after
            return results

    return asyncio.run(go())


FORGED = {
    "the_code": "echo '1 0' > /proc/$$/fd/21; exit 9",
    "no_number": "echo '1 zero' > /proc/$$/fd/21; (exit 9)",
    "another_command": "echo '7 0' > /proc/$$/fd/21; (exit 9)",
    "a_code_of_4000_digits": "printf '1 %04000d\\n' 9 > /proc/$$/fd/21",
    "a_code_of_60000_digits": "printf '1 %060000d\\n' 9 > /proc/$$/fd/21",
    "half_a_line": "printf '1 ' > /proc/$$/fd/21; (exit 9)",
    "no_line": "head -c 65536 /dev/zero > /proc/$$/fd/21; (exit 9)",
    "a_flood": "yes '1 x' > /proc/$$/fd/21",
}


@pytest.mark.parametrize("command", FORGED.values(), ids=FORGED)
def test_forging_the_end_of_a_command(host, pool, command):
    """Commands can find that descriptor in their shell; forging a code deceives only their author."""
    for fd in ("21", "1[0-9]"):
        every = command.replace("/proc/$$/fd/21", "$fd")
        script = f"for fd in /proc/$$/fd/{fd}; do {every}; done"
        [result] = say(pool, script, timeout_s=0.5)
        assert 0 <= result.exit_code < 256 and result.seconds < 3


def test_work_behind_a_forged_end_is_counted(host, pool):
    """The shell says that it is done, and then starts to eat memory: it is looked at, also while the host is busy."""
    hog = "import os, time; open(f'began{os.getpid()}', 'w'); x = bytearray(150 << 20); time.sleep(60)"
    forge = "for fd in /proc/$$/fd/*; do echo '1 0' > $fd; done 2>/dev/null; read -t 0.3 <> pipe; "

    async def go():
        async with await pool.acquire({"hog.py": hog}) as sandbox:
            await sandbox.run(["mkfifo", "pipe"])
            result = await sandbox.shell(f"{forge} python hog.py & python hog.py & python hog.py & wait")
            assert result.seconds < 0.3, "the lie was believed"
            deadline = time.monotonic() + 10
            while len(await sandbox.list()) < 4:  # all three began
                assert time.monotonic() < deadline
            while "hog.py" in (await sandbox.run(["sh", "-c", "cat /proc/[0-9]*/cmdline"])).stdout:
                assert time.monotonic() < deadline, "no check ran"

    asyncio.run(go())


HANGING = {
    "an_endless_loop": "while :; do :; done",
    "a_loop_that_starts_programs": "while :; do /bin/true; done",
    "a_loop_that_ignores_everything": "trap '' TERM INT HUP CHLD; while :; do sleep 0.01; done",
    "a_stopped_shell": "kill -STOP $$; sleep 9",
    "a_stopped_shell_that_is_woken": "(sleep 0.2; kill -CONT $$) & kill -STOP $$; sleep 9",
    "a_pipe_without_a_reader": "mkfifo p; echo x > p",
    "waiting": "sleep 60 & wait",
    "reading_the_next_command": "cat /proc/$$/fd/* > /dev/null",
    "a_loop_at_the_end": "trap 'while :; do :; done' EXIT; exit",
}


@pytest.mark.parametrize("command", HANGING.values(), ids=HANGING)
def test_a_command_that_never_ends(host, pool, command):
    started = time.monotonic()
    [result] = say(pool, command, timeout_s=0.3)
    assert result.outcome == "timeout" and time.monotonic() - started < 8


CLOSING = {
    "all_descriptors": 'for fd in {0..63}; do eval "exec $fd>&-"; done',
    "its_lines_to_the_worker": "exec 20<&- 21>&-; eval 'exec '{10..19}'>&-;'",
    "its_output": "exec >&- 2>&-",
    "its_output_with_a_job": "exec >&- 2>&-; sleep 60 &",
    "swapped": "exec 1>&0 2>&0 0</dev/zero",
    "no_more": "ulimit -n 3; cd /; :",
    "no_processes": "ulimit -u 0; sleep 1",
    "no_memory": "ulimit -v 1000; x=$(printf '%09000000d' 1)",
    "no_time": "ulimit -t 1; while :; do :; done",
    "no_program": "PATH=/nowhere; unset -f eval; eval() { exit 3; }; printf() { :; }; read() { :; }",
    "read_only_variables": "readonly COMPOSER_STATUS COMPOSER_COMMAND COMPOSER_TOKEN",
    "options": "set -euo pipefail -n; shopt -s extglob failglob",
}


@pytest.mark.parametrize("command", CLOSING.values(), ids=CLOSING)
def test_a_shell_that_breaks_itself(host, pool, command):
    async def go():
        async with await pool.acquire({}) as sandbox:
            for each in (command, "echo next"):
                assert (await sandbox.shell(each, timeout_s=2.0)).seconds < 4
            assert (await sandbox.run(["echo", "alive"])).stdout == "alive\n"
            await sandbox.shell("exit", timeout_s=0.5)
            await sandbox.shell("kill -9 $$", timeout_s=0.5)
            await sandbox.restore(await sandbox.snapshot())
            assert (await sandbox.shell("echo new")).stdout == "new\n"

    asyncio.run(go())


BACKGROUND = {
    "a_fork_bomb": "b() { b | b & }; b",
    "a_fork_bomb_of_orphans": "b() { (b &); }; b &",
    "who_leaves_the_dead_lying_about": "python zombies.py &",
    "a_chain": "python chain.py &",
    "who_stops_the_others": "(while :; do kill -STOP -1; done) & ",
}
JOBS = {
    "zombies.py": "import os, time\nfor n in range(10_000):\n    try:\n        if os.fork() == 0: os._exit(0)\n"
    "    except OSError: time.sleep(60)\n    time.sleep(0.02)",
    "chain.py": "import os\nwhile True:\n    try:\n        if os.fork(): os._exit(0)\n    except OSError: pass",
}


@pytest.mark.parametrize("command", BACKGROUND.values(), ids=BACKGROUND)
def test_a_job_that_keeps_the_killer_of_commands_busy(host, pool, command):
    """Other commands end in time all the same, and so does the sandbox."""

    async def go():
        async with await pool.acquire(JOBS) as sandbox:
            await sandbox.shell(command, timeout_s=1.0)
            for _ in range(3):
                result = await sandbox.run(["sh", "-c", "sleep 0.05; echo done"], timeout_s=1.0)
                assert result.seconds < 3
            assert (await sandbox.shell("sleep 60", timeout_s=0.2)).seconds < 3
            await sandbox.restore(pool.tree())
            assert (await sandbox.shell("echo quiet; ls /proc | grep -c '^[0-9]'")).stdout.startswith("quiet\n")

    asyncio.run(go())


def test_a_job_keeps_the_children_that_it_has_while_a_command_ends(host, pool):
    """They are its own: only what the command left is killed."""
    server = """
    import os, time
    while not os.path.exists("go"): time.sleep(0.001)
    if os.fork() == 0:
        open("child", "w")
        while not os.path.exists("end"): time.sleep(0.001)
        open("lived", "w")
        os._exit(0)
    os.wait()
    """

    async def go():
        async with await pool.acquire({"server.py": textwrap.dedent(server)}) as sandbox:
            await sandbox.shell("python server.py &")
            script = "touch go; until test -e child; do :; done; setsid sleep 60 & setsid sleep 60 &"
            assert (await sandbox.run(["sh", "-c", script])).outcome == "ok"
            assert (await sandbox.shell("touch end; wait; echo lived*")).stdout == "lived\n"
            assert sandbox.jobs == 0

    asyncio.run(go())


def test_a_job_with_no_streams_costs_no_time(host, pool):
    """End of file on its output must not wake the worker again and again."""

    async def go():
        async with await pool.acquire({}) as sandbox:
            await sandbox.shell("exec >&- 2>&-; sleep 60 &")
            look = ["python", "-c", "print(*open('/proc/1/stat').read().rpartition(')')[2].split()[11:13])"]
            before = (await sandbox.run(look)).stdout
            await asyncio.sleep(0.5)
            after = (await sandbox.run(look)).stdout
            ticks = sum(map(int, after.split())) - sum(map(int, before.split()))
            assert ticks < 20, "hundredths of a second, of fifty"

    asyncio.run(go())


def test_filling_its_pipes_between_two_requests(host, pool):
    async def go():
        async with await pool.acquire({}) as sandbox:
            await sandbox.shell("yes & yes >&2 &")
            result = await sandbox.shell("echo now", timeout_s=2.0)
            assert result.outcome in ("ok", "output_limit") and result.seconds < 5
            assert len(result.stdout) < 3 * pool.limits.output_kb * 1024
            for _ in range(10):  # the flood may reach the limit of the command that is to end it
                result = await sandbox.shell("kill %1 %2; wait; echo quiet")
                if result.outcome == "ok":
                    break
            assert result.stdout.endswith("quiet\n")

    asyncio.run(go())


TEXTS = {
    "zero": "echo \0", "half_a_pair": "echo \ud800",
    "bytes": "echo \udcff | od -An -tx1", "end_of_text": "echo \x04\x03\x1a",
    "a_forged_frame": "2\necho x\n", "a_long_line": "echo " + "x" * 200_000,
    "an_open_quote": "echo '", "an_open_heredoc": "cat << E",
    "an_open_brace": "{ echo x", "a_closed_brace": "}; echo x", "a_comment": "echo x # y", "a_backslash": "echo x \\",
}  # fmt: skip


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_a_text_that_breaks_out_of_the_loop(host, pool, text):
    results = say(pool, "X=kept", text, "echo $X")
    assert results[2].stdout == "kept\n"


def test_a_name_that_is_not_text(host, pool):
    [result] = say(pool, "echo x > \udcff; python -c 'import os; print(os.listdir(b\".\"))'")
    assert result.stdout == "[b'\\xff']\n"
