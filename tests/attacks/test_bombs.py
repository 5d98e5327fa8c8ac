"""Using up what the host has: processes, memory, disk, output, descriptors."""

import asyncio
import textwrap
import time

import pytest

from composer_jax.sandbox import SandboxFileError
from tests.attacks.conftest import LIMITS


def test_a_fork_bomb(host, pool, run_python):
    code = """
    import os, time
    n = 0
    try:
        while n < 10_000:
            if os.fork() == 0: time.sleep(30); os._exit(0)
            n += 1
    except OSError: print(n)
    """
    assert 0 < int(run_python(code).stdout) < pool.limits.processes


SPREADING = {
    "forks": "os.fork()",
    "sessions": "os.fork() or os.setsid()",
    "programs": "subprocess.Popen(['sh', '-c', 'sleep 9 & sleep 9 & sleep 9'])",
    "orphans": "os.fork() or os.fork() and os._exit(0)",
}


@pytest.mark.parametrize("call", SPREADING.values(), ids=SPREADING)
def test_a_fork_bomb_that_spreads(host, run_python, call):
    code = f"import os, subprocess\nwhile True:\n    try: {call}\n    except OSError: pass"
    result = run_python(code, timeout_s=0.5)
    assert result.outcome == "timeout" and result.seconds < 5


def test_a_bomb_of_threads(host, run_python):
    threads = "import threading, time\nfor n in range(9999): threading.Thread(target=time.sleep, args=(30,)).start()"
    result = run_python(threads, timeout_s=1)
    assert result.outcome != "ok" and "can't start new thread" in result.stderr


MEMORY = {
    "one_process": "x = [bytearray(1 << 20) for _ in range(100_000)]",
    "many_processes": "import os, time\nfor _ in range(4): os.fork()\nx = bytearray(200 << 20)\ntime.sleep(30)",
    "many_sharing": "import mmap, os, time\nfor _ in range(3): os.fork()\nx = mmap.mmap(-1, 200 << 20)\n"
    "for i in range(0, len(x), 4096): x[i] = 1\ntime.sleep(30)",
    "one_string": "x = 'x' * (1 << 40)",
    "recursion_in_data": "x = []\nwhile True: x = [x, x[:], bytearray(1 << 20)]",
    "in_a_child_that_left": "import os, time\nif os.fork():\n    time.sleep(30)\nos.setsid()\n"
    "for _ in range(3): os.fork()\nx = bytearray(200 << 20)\ntime.sleep(30)",
}


@pytest.mark.parametrize("code", MEMORY.values(), ids=MEMORY)
def test_memory(host, run_python, code):
    started = time.monotonic()
    assert run_python(code).outcome == "out_of_memory"
    assert time.monotonic() - started < 10


UNCOUNTED = {
    "memfd": "libc.memfd_create(b'x', 0)",
    "secret_memfd": "libc.syscall(447, 0)",
    "segment": "libc.shmget(0, 1 << 20, 0o1666)",
    "queue": "libc.msgget(0, 0o1666)",
    "semaphores": "libc.semget(0, 1, 0o1666)",
}


@pytest.mark.parametrize("call", UNCOUNTED.values(), ids=UNCOUNTED)
def test_memory_that_no_limit_counts(attempt, call):
    assert attempt(f"checked({call})") == "EPERM"


def test_locked_memory(attempt):
    assert attempt("checked(libc.mlockall(3)), checked(libc.mmap(0, 64 << 20, 3, 34, -1, 0))") in ("EPERM", "ENOMEM")


PLACES = {"/workspace": LIMITS.workspace_mb, "/tmp": LIMITS.tmp_mb, "/dev/shm": LIMITS.tmp_mb}


@pytest.mark.parametrize(("place", "most"), PLACES.items(), ids=PLACES)
def test_a_disk_filled_with_large_files(attempt, place, most):
    body = f"""
    total = 0
    try:
        for i in range(10_000):
            with open(f"{place}/bomb{{i}}", "wb", buffering=0) as file:
                for _ in range(4): total += file.write(bytes(1 << 20))
    except OSError as error:
        assert error.errno == errno.ENOSPC, error
        return total >> 20
    """
    assert 0 < int(attempt(body).removeprefix("DID ")) <= most


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", ["files", "folders", "links", "pipes", "names_of_one_file"])
def test_a_disk_filled_with_small_things(attempt, place, kind):
    make = {
        "files": "open(name, 'w').close()",
        "folders": "os.mkdir(name)",
        "links": "os.symlink('x' * 200, name)",
        "pipes": "os.mkfifo(name)",
        "names_of_one_file": "os.link('one', name)",
    }[kind]
    body = f"""
    os.chdir({place!r})
    open("one", "w").close()
    for number in range(10_000):
        name = f"{{number}}"
        try: {make}
        except OSError as error:
            assert error.errno == errno.ENOSPC, error
            return number
    """
    assert 100 < int(attempt(body).removeprefix("DID ")) <= 4096


def test_a_file_that_is_too_large(attempt):
    assert (
        attempt("with open('large', 'wb', 0) as file:\n    for _ in range(64): file.write(bytes(1 << 20))") == "EFBIG"
    )
    assert attempt("os.truncate(os.open('large', os.O_RDWR | os.O_CREAT), 1 << 40)") == "EFBIG"


def test_a_name_that_is_too_long(attempt):
    assert attempt("open('x' * 256, 'w')") == "ENAMETOOLONG"
    assert attempt("open('x/' * 2100, 'w')") == "ENAMETOOLONG"


HUGE = {
    "sparse_files": "for i in range(100):\n    with open(f's{i}', 'wb') as f: f.truncate(8 << 20)",
    "one_file_with_many_names": "import os\nwith open('0', 'wb') as f: f.truncate(8 << 20)\n"
    "for i in range(1, 100): os.link('0', f'{i}')",
}


@pytest.mark.parametrize("code", HUGE.values(), ids=HUGE)
def test_an_answer_larger_than_the_workspace(host, pool, code):
    async def go():
        async with await pool.acquire({}) as sandbox:
            assert (await sandbox.run(["python", "-c", code])).outcome == "ok"
            with pytest.raises(SandboxFileError, match="more than"):
                await sandbox.changes()
            await sandbox.restore(pool.tree())
            assert await sandbox.list() == []

    asyncio.run(go())


DEEP = """
import os
for _ in range({count}):
    os.mkdir({name!r}); os.chdir({name!r})
"""
OPERATIONS = {
    "list": lambda sandbox: sandbox.list(),
    "changes": lambda sandbox: sandbox.changes(),
}


@pytest.mark.parametrize(("count", "name"), [(1500, "d"), (70, "d" * 250)], ids=["many_folders", "long_names"])
@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_folders_nested_too_deep(host, pool, operation, count, name):
    async def go():
        async with await pool.acquire({}) as sandbox:
            assert (await sandbox.run(["python", "-c", DEEP.format(count=count, name=name)])).outcome == "ok"
            with pytest.raises(SandboxFileError, match="nested more than 64 deep"):
                await operation(sandbox)
            snapshot = await sandbox.snapshot()
            await sandbox.restore(pool.tree())
            assert await operation(sandbox) in ([], {})
            await sandbox.restore(snapshot)
            assert (await sandbox.run(["ls"])).stdout == f"{name}\n"

    asyncio.run(go())


def test_endless_names(host, pool):
    names = """
    import os
    n, below = 0, "/" + "d" * 250 + "/" + "e" * 250
    try:
        while True:
            os.makedirs(f"{n:0250}" + below)
            open(f"{n:0250}{below}/" + "f" * 250, "w")
            n += 1
    except OSError: print(n)
    """

    async def go():
        async with await pool.acquire({}) as sandbox:
            created = await sandbox.run(["python", "-c", textwrap.dedent(names)])
            assert int(created.stdout) > 500
            assert len(await sandbox.list()) == int(created.stdout)

    asyncio.run(go())


FLOODS = {
    "stdout": "import os\nwhile True: os.write(1, bytes(65536))",
    "stderr": "import os\nwhile True: os.write(2, bytes(65536))",
    "children": "import os\nfor _ in range(8):\n    if os.fork() == 0: break\nwhile True: os.write(2, bytes(65536))",
    "one_line": "import sys\nwhile True: sys.stdout.write('x')",
    "a_program": "import os\nos.execvp('yes', ['yes'])",
}


@pytest.mark.parametrize("code", FLOODS.values(), ids=FLOODS)
def test_a_flood_of_output(host, pool, run_python, code):
    result = run_python(code)
    assert result.outcome == "output_limit" and result.seconds < 10
    assert len(result.stdout) + len(result.stderr) < 3 * pool.limits.output_kb * 1024


OPENED = {
    "files": "os.open('/dev/null', os.O_RDONLY)",
    "pipes": "os.pipe()",
    "sockets": "socket.socket()",
    "terminals": "os.openpty()",
    "processes": "os.pidfd_open(os.getpid())",
    "events": "os.eventfd(0)",
}


@pytest.mark.parametrize("opened", OPENED.values(), ids=OPENED)
def test_all_descriptors(attempt, opened):
    body = f"""
    x = []
    try:
        for _ in range(10_000): x.append({opened})
    except OSError as error:
        assert error.errno == errno.EMFILE, error
        return len(x)
    """
    assert 20 < int(attempt(body).removeprefix("DID ")) <= LIMITS.open_files


@pytest.mark.parametrize("name", ["AS", "CPU", "NPROC", "FSIZE", "NOFILE", "CORE"])
def test_raising_a_limit(attempt, name):
    infinity = "resource.RLIM_INFINITY"
    body = f"try: return resource.setrlimit(resource.RLIMIT_{name}, ({infinity}, {infinity}))\n"
    body += "except ValueError as error: raise OSError(errno.EPERM, 'not allowed to raise maximum limit')"
    assert attempt(body) == "EPERM"


@pytest.mark.parametrize("name", ["AS", "CPU", "NPROC", "FSIZE", "NOFILE", "CORE"])
def test_the_limits_of_another_program(attempt, name):
    """A program that is started by exec has them, too."""
    option = {"AS": "v", "CPU": "t", "NPROC": "u", "FSIZE": "f", "NOFILE": "n", "CORE": "c"}[name]
    command = f"ulimit -{option} unlimited || ulimit -H{option}"
    output = attempt(f"subprocess.run(['bash', '-c', {command!r}], capture_output=True).stdout.decode().strip()")
    assert output.removeprefix("DID ").isdigit(), output
