"""Disk and processes behind Landlock: limits that the worker enforces by repeated checks."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from composer_jax.sandbox import LocalSandboxPool, SandboxFileError, SandboxLimits
from composer_jax.sandbox.inside import confinement, disk, processes
from tests.sandbox.fixtures import REPOSITORY, as_another_user


@pytest.fixture(scope="module")
def pool(landlock_pool):
    return landlock_pool


def test_processes_are_limited(host, pool, run_python):
    patient = "import os, time\nfor _ in range(10_000):\n    if os.fork() == 0: time.sleep(30); os._exit(0)"
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    threads = "import threading, time\nthreading.stack_size(65536)\n"
    threads += "for n in range(9999): threading.Thread(target=time.sleep, args=(30,), daemon=True).start()"
    for code in (patient, bomb, threads):
        result = run_python(code)
        assert result.outcome == "nonzero", result
        if code is not bomb:  # a bomb may end without a word
            words = f"there were more than {pool.limits.processes} processes and threads at once\n"
            # A program that is faster than two checks of the disk meets the kernel's limit for the user.
            assert result.stderr.endswith((words, "Resource temporarily unavailable\n", "can't start new thread\n"))
    few = "import os, time\nfor _ in range(3):\n    if os.fork() == 0: time.sleep(0.2); os._exit(0)\ntime.sleep(0.2)"
    assert run_python(few).outcome == "ok"


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("for n in range(40): open(str(n), 'wb').write(bytes(1 << 20))", "the workspace holds more than the 16 MiB"),
        ("import os\nfor n in range(2200): open(os.environ['TMPDIR'] + f'/{n}', 'w')",
         "the folder for temporary files holds more files"),
        ("import tempfile\nfor n in range(12): tempfile.NamedTemporaryFile(delete=False).write(bytes(1 << 20))",
         "the folder for temporary files holds more than the 8 MiB"),
        ("import os, time\nfor n in range(40): open(str(n), 'wb').write(bytes(1 << 20))\ntime.sleep(60)",
         "the workspace holds more than the 16 MiB"),
        ("import os\nos.mkdir('d')\nfor n in range(40): open(f'd/{n}', 'wb').write(bytes(1 << 20))\nos.chmod('d', 0)",
         "the workspace holds more than the 16 MiB"),
    ],
)  # fmt: skip
def test_disk_is_limited_by_repeated_checks(pool, code, says):
    async def go():
        async with await pool.acquire({}) as sandbox:
            result = await sandbox.run(["python", "-c", code])
            assert result.outcome == "nonzero" and result.exit_code != 0 and result.seconds < 8
            assert result.stderr.startswith("the sandbox's limit is passed: " + says), result
            # Whoever takes something away is not blamed for what is left.
            freed = await sandbox.run(["sh", "-c", "chmod 700 d; rm -rf 0 1 d/0; true"])
            assert freed.outcome == "ok", freed
            assert (await sandbox.run(["sh", "-c", 'rm -rf * "$TMPDIR"/*'])).outcome == "ok"
            assert (await sandbox.run(["sh", "-c", "echo x > y"])).outcome == "ok"

    asyncio.run(go())


def test_the_file_tools_have_the_limit_of_the_workspace(pool):
    async def go():
        async with await pool.acquire({}) as sandbox:
            for _ in range(5):
                await sandbox.write("same", bytes(7 << 20))  # again and again: it is no more than it was
            await sandbox.write("second", bytes(7 << 20))
            with pytest.raises(SandboxFileError, match="no space left in the workspace for third"):
                await sandbox.write("third", bytes(7 << 20))
            assert await sandbox.list() == ["same", "second"]
            await sandbox.delete("same")
            await sandbox.write("third", bytes(7 << 20))

    asyncio.run(go())


def test_folders_that_resist_are_removed(tmp_path):
    folder = tmp_path / "root"
    folder.mkdir()
    here = os.open(folder, os.O_RDONLY)
    for _ in range(1050):  # deeper than any recursion reaches
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.mkfifo("fifo", dir_fd=here)
    os.symlink("/", "link", dir_fd=here)
    os.close(here)
    closed = folder / "closed"
    closed.mkdir()
    (closed / "file").write_bytes(bytes(4096))
    closed.chmod(0)
    held = disk.disk_usage(str(folder))
    assert held.too_deep and held.entries < 1000 and held.size >= 4096
    disk.remove_contents(str(folder))
    assert list(folder.iterdir()) == []


CLOSING = """
import os, sys, tempfile
from composer_jax.sandbox.inside import confinement, disk
root = tempfile.mkdtemp()
os.makedirs(f"{root}/a/b/c")
open(f"{root}/a/b/c/file", "wb").write(bytes(8192))
judged = confinement.FolderQuota(root, "the workspace", 1 << 20)
left, event, closing = 0, "", False
def close():
    for folder in (f"{root}/a/b/c", f"{root}/a/b", f"{root}/a", root):
        try: os.chmod(folder, 0)
        except PermissionError: pass
def watch(happens, arguments):  # as a command would, that runs at the same time
    global left, closing
    if happens == event and left and not closing:
        closing = True
        close()
        left, closing = left - 1, False
sys.addaudithook(watch)
for event in ("open", "os.chmod", "os.scandir"):
    close()
    left = 2
    held = disk.disk_usage(root)
    print(left, held.entries, held.size >= 8192, held.closed)
event, left = "open", 1_000_000
print(disk.disk_usage(root).closed, judged.check())
left = 0
print(judged.check() == "", judged.now.entries)
os.chmod(f"{root}/a/b", 0), os.chmod(root, 0)
disk.remove_contents(root)
os.rmdir(root)
"""


def test_folders_that_are_closed_during_a_check_are_counted_or_exceed_the_limit():
    output = as_another_user(CLOSING).splitlines()
    assert output[:3] == ["0 4 True False"] * 3
    assert output[3:] == [
        "True the workspace holds folders that are closed whenever they are opened to be counted",
        "True 4",
    ]


def test_a_command_that_closes_its_folders_is_limited_and_does_not_end_its_sandbox(pool):
    code = """
    import os, time
    os.makedirs("a/b/c")
    end = time.monotonic() + 1.0
    for n in range(10): open(f"a/b/c/{n}", "wb").write(bytes(1 << 20))
    while time.monotonic() < end:
        for path, mode in (("a/b", 0), ("a", 0), ("a", 0o700), ("a/b", 0o700)): os.chmod(path, mode)
    os.chmod("a", 0); os.chmod(".", 0); os.chmod(os.environ["TMPDIR"], 0)
    """

    async def go():
        async with await pool.acquire({"close.py": textwrap.dedent(code)}) as sandbox:
            result = await sandbox.run(["python", "close.py"])
            assert result.outcome == "ok" or "closed whenever they are opened" in result.stderr, result
            assert (await sandbox.run(["sh", "-c", "chmod 700 a && rm -r a && echo x > $TMPDIR/y"])).outcome == "ok"
            assert await sandbox.list() == ["close.py"]

    asyncio.run(go())


def background(shell: subprocess.Popen, command: str) -> None:
    """What a shell starts as a job, once the job is done with it."""
    shell.stdin.write(f"{{ {command}; echo; exec sleep 60; }} &\n".encode())
    shell.stdin.flush()
    shell.stdout.readline()


def passes(judged: confinement.Quota) -> bool:
    """Whether it says so once it looks: the disk is looked at for a small share of the time only."""
    end = time.monotonic() + 10
    while not judged.is_exceeded() and time.monotonic() < end:
        time.sleep(0.001)
    return judged.is_exceeded()


IN_A_PROCESS_OF_ITS_OWN = """
import os, sys
sys.path.insert(0, {repository!r})
from tests.sandbox.test_landlock_quota import {name}
{name}(sys.argv[1])
"""


def judge_jobs(root: str) -> None:
    """The looks at a shell with jobs, by a process that has no other children."""
    workspace, tmp = f"{root}/workspace", f"{root}/tmp"
    os.mkdir(workspace)
    os.mkdir(tmp)
    judged = confinement.Quota(workspace, tmp, {"workspace_bytes": 1 << 20, "tmp_bytes": 1 << 20, "processes": 4})
    environment = {"PATH": os.environ["PATH"]}
    shell = subprocess.Popen(["bash"], cwd=workspace, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert not judged.is_exceeded() and judged.finish_command() == ""
    background(shell, "head -c 2M /dev/zero > big")
    assert passes(judged) and judged.is_exceeded()
    for _ in range(2):  # each command that ends meanwhile says so, and none forgives it
        assert judged.finish_command() == "the workspace holds more than the 1 MiB that may be added to it"
        assert judged.is_exceeded()
    os.truncate(f"{workspace}/big", 0)  # the job takes it back
    assert judged.finish_command() != "" and not judged.is_exceeded() and judged.finish_command() == ""
    background(shell, "head -c 2M /dev/zero > big")
    assert passes(judged)
    for job in set(processes.descendants(os.getpid())) - {shell.pid}:
        os.kill(job, signal.SIGKILL)
    while processes.running_descendants(os.getpid()) != [shell.pid]:
        time.sleep(0.001)
    assert judged.finish_command() != ""
    assert not judged.is_exceeded() and judged.folders[0].check() == ""  # a later command that cleans up is not stopped
    for _ in range(4):
        background(shell, "true")
    assert judged.is_exceeded() and judged.finish_command() == "there were more than 4 processes and threads at once"
    processes.kill_descendants(os.getpid())
    shell.wait()
    assert not judged.is_exceeded() and judged.finish_command() == ""


def test_the_disk_usage_of_background_jobs_is_checked_between_commands(tmp_path):
    code = IN_A_PROCESS_OF_ITS_OWN.format(repository=str(REPOSITORY), name=judge_jobs.__name__)
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=60)


def test_a_fork_bomb_stops_blocking_other_sandboxes_when_it_is_killed():
    async def go():
        async with LocalSandboxPool(SandboxLimits(processes=16), backend="landlock", size=3) as pool:
            sandboxes = [await pool.acquire({"n": str(number)}) for number in range(3)]
            bomb = await sandboxes[0].run(["sh", "-c", "b() { b | b & }; b; sleep 60"])
            assert bomb.outcome == "nonzero"
            work = "for i in 1 2 3 4 5; do (cat n) || exit 1; done"
            done = await asyncio.gather(*(sandbox.run(["sh", "-c", work]) for sandbox in sandboxes))
            assert [result.stdout for result in done] == [str(number) * 5 for number in range(3)], done

    asyncio.run(go())
