"""The calls of a sandbox: files, commands, outcomes."""

import asyncio
import re
import textwrap
import time

import pytest

from composer_jax.sandbox import LocalSandboxPool, RunResult, SandboxDied, SandboxFileError, SandboxLimits
from tests.sandbox.fixtures import LIMITS, contents


@pytest.fixture(scope="module", params=["bubblewrap", "landlock"])
def pool(request):
    """A pool of either isolation, which must give the same results."""
    pool = LocalSandboxPool(LIMITS, size=4, backend=request.param)
    yield pool
    pool.kill()


def in_sandbox(pool, files, body):
    """Run the coroutine function `body(sandbox)` with a fresh sandbox."""

    async def go():
        async with await pool.acquire(files) as sandbox:
            return await body(sandbox)

    return asyncio.run(go())


def command(pool, argv, files=None, **options) -> RunResult:
    return in_sandbox(pool, files or {}, lambda sandbox: sandbox.run(argv, **options))


def test_files(pool):
    async def body(sandbox):
        assert await sandbox.list() == ["a.txt", "deep/b.bin"]
        assert await sandbox.read("deep/b.bin") == b"\0\xff"
        await sandbox.write("x/y/z.py", b"1")
        await sandbox.write("/workspace/a.txt", "ä")  # the absolute spelling that agents use
        await sandbox.delete("deep/b.bin")
        snapshot = await contents(sandbox)
        assert snapshot == {"a.txt": "ä".encode(), "x/y/z.py": b"1"}
        await sandbox.write("later", b"2")
        await sandbox.restore(pool.tree())
        assert await sandbox.list() == []
        await sandbox.write_files(snapshot)
        assert await contents(sandbox) == snapshot
        with pytest.raises(SandboxFileError, match="surrogate"):
            await sandbox.write("a", "\ud800")

    in_sandbox(pool, {"a.txt": "a", "deep/b.bin": b"\0\xff"}, body)


REFUSED_PATHS = {
    "nothing.txt": "does not exist",
    "no/such/file": "does not exist",
    "folder": "is a folder",
    "": "is a folder",
    "/workspace": "is a folder",
    "a.txt/b": "not a folder",
    "../etc/passwd": "outside the workspace",
    "folder/../../x": "outside the workspace",
    "/etc/passwd": "outside the workspace",
    "a\0b": "not a file name",
    "\ud800": "not a file name",
    "n" * 300: "longer than a file name",
    "d/" * 100 + "x": "more than 64 folders",
}


def test_paths_that_are_refused(pool):
    async def body(sandbox):
        for path, says in REFUSED_PATHS.items():
            calls = [sandbox.read(path), sandbox.delete(path)]
            for call in calls if "exist" in says else [*calls, sandbox.write(path, b"x")]:
                with pytest.raises(SandboxFileError, match=says):
                    await call
        assert await sandbox.list() == ["a.txt", "folder/c"]

    in_sandbox(pool, {"a.txt": "a", "folder/c": "c"}, body)


def test_large_and_odd_content(pool):
    data = bytes(range(256)) * 40_000  # 10 MB

    async def body(sandbox):
        assert await sandbox.read("big") == data
        await sandbox.run(["python", "-c", "open(b'\\xff\\n', 'w').write('odd')"])
        name = next(name for name in await sandbox.list() if name != "big")
        assert (await contents(sandbox))[name] == await sandbox.read(name) == b"odd"
        with pytest.raises(SandboxFileError, match="no space left"):
            await sandbox.write("more", data)

    in_sandbox(pool, {"big": data}, body)


PROGRAM = """
import sys, os, atexit, threading, time
atexit.register(print, "atexit")
threading.Thread(target=lambda: (time.sleep(0.05), print("thread"))).start()
print(__name__, __file__, sys.argv, sys.path[0], os.getcwd(), sys.stdin.read(), "ü")
print("to stderr", file=sys.stderr)
exit(3)
"""


def test_script(pool):
    async def body(sandbox):
        result = await sandbox.run(["python", "src/go.py", "a b"], stdin=b"in")
        return result, (await sandbox.run(["pwd"])).stdout.strip()

    result, folder = in_sandbox(pool, {"src/go.py": PROGRAM}, body)
    assert folder == "/workspace" or pool.backend == "landlock"
    first = f"__main__ {folder}/src/go.py ['src/go.py', 'a b'] {folder}/src {folder} in ü\n"
    assert result.stdout == first + "thread\natexit\n"
    assert result.stderr == "to stderr\n"
    assert (result.outcome, result.exit_code, result.truncated_bytes) == ("nonzero", 3, 0)


# Each program is run by the fork server and by a real interpreter; the results must be the same.
PROGRAMS = {
    "traceback": (["program.py"], "def f():\n    1 / 0\n\ntry:\n    f()\n"
                  "except Exception as e:\n    raise KeyError('x') from e\n"),
    "syntax": (["program.py"], "def f(:\n"),
    "tab": (["program.py"], "if 1:\n\tx=1\n        y=2\n"),
    "missing": (["nothing.py"], ""),
    "exit text": (["program.py"], "import sys\nprint('out')\nsys.exit('sorry')"),
    "exit none": (["program.py"], "import sys\nsys.exit()"),
    "exit big": (["program.py"], "import sys\nsys.exit(256 + 7)"),
    "exit group": (["program.py"], "raise ExceptionGroup('many', [ValueError(1), TypeError(2)])"),
    "hook": (["program.py"], "import sys\nsys.excepthook = lambda *a: print('hooked', a[0])\n1/0"),
    "code": (["-c", "import sys; print(sys.argv, repr(sys.path[0])); x", "a"], ""),
    "module": (["-m", "program", "a"], "import sys\nprint(sys.argv, sys.path[0], __spec__.name)"),
    "no module": (["-m", "nowhere"], ""),
    "package": (["-m", "package"], ""),
    "unittest": (["-m", "unittest", "-q", "package.test_it"], ""),
    "shadow": (["program.py"], "import textwrap, json\nprint(textwrap.x, json.dumps(1))"),
    "main": (["program.py"], "import pickle\nclass A: pass\nprint(pickle.loads(pickle.dumps(A())).__class__)"),
    "multiprocessing": (
        ["program.py"],
        "import multiprocessing as m\nif __name__ == '__main__':\n"
        "    for kind in ('fork', 'spawn'):\n        with m.get_context(kind).Pool(2) as p: print(p.map(abs, [-1, 2]))",
    ),
    "flags": (["program.py"], "import sys\nprint([f for f in dir(sys.flags) if f[0] != '_' and 'site' not in f"
              " and getattr(sys.flags, f) not in (0, False)], sys.executable, {1, 2, 'a', 'b'})"),
    "closed": (["program.py"], "import sys\nprint('x')\nsys.stdout.close()"),
    "full": (["program.py"], "import os, sys\nos.dup2(os.open('/dev/full', os.O_WRONLY), 1)\nprint('x')"),
    "atexit": (["program.py"], "import atexit\natexit.register(lambda: 1/0)\nimport sys\nsys.stdout = None"),
    "names": (["program.py"], "print(sorted(globals()))"),
    "stdin": (["-"], ""),
    "interrupt": (["program.py"], "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)"),
}  # fmt: skip
SHADOW = {"textwrap.py": "x = 'from the workspace'"}
PACKAGE = {
    "package/__init__.py": "",
    "package/__main__.py": "print('package', __package__)",
    "package/test_it.py": "import unittest\nclass T(unittest.TestCase):\n    def test_it(self): self.fail('so')\n",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_like_a_real_interpreter(pool, name):
    arguments, source = PROGRAMS[name]

    async def body(sandbox):
        served = await sandbox.run(["python", *arguments], stdin=b"print('typed')")
        real = await sandbox.run(["sh", "-c", 'exec python "$@"', "sh", *arguments], stdin=b"print('typed')")
        return served, real

    files = {"program.py": source, **PACKAGE, **(SHADOW if name == "shadow" else {})}
    served, real = in_sandbox(pool, files, body)

    def comparable(result):
        stderr = result.stderr.replace("/opt/bin/python:", "python:").replace("/opt/python/bin/", "")
        stderr = re.sub(r"/tmp/\S*/bin/python:", "python:", stderr)
        stderr = re.sub(r"0x[0-9a-f]+", "0x", stderr)
        stderr = "\n".join(line for line in stderr.splitlines() if not line.startswith("Ran "))
        return result.outcome, result.exit_code, result.stdout, stderr

    assert comparable(served) == comparable(real)


def test_other_commands(pool):
    assert command(pool, ["sh", "-c", "cat; echo err >&2; exit 7"], stdin=b"x" * 200_000).exit_code == 7
    assert command(pool, ["nothing-of-that-name"]).exit_code == 127
    assert command(pool, ["../changes" if pool.backend == "landlock" else "/workspace"]).exit_code == 126
    for argv in ([], ["a\0b"], ["python", "-c", "print('\ud800')"]):
        assert command(pool, argv).outcome == "nonzero"
    assert command(pool, ["sh", "-c", "kill -TERM $$"]).exit_code == 128 + 15
    assert command(pool, ["true"], stdin=b"x" * 1_000_000).outcome == "ok", "input that is not read"


def test_timeout(pool):
    for argv, printed in (
        (["sh", "-c", "echo early; sleep 60"], "early\n"),
        (["python", "-c", "while True: pass"], ""),
    ):
        result = command(pool, argv, timeout_s=0.3)
        assert (result.outcome, result.exit_code, result.stdout) == ("timeout", 124, printed)
        assert 0.3 <= result.seconds < 2


def test_cpu_limit_is_a_timeout():
    async def run(pool, code):
        async with await pool.acquire({}) as sandbox:
            return await sandbox.run(["python", "-c", code], timeout_s=30)

    async def go():
        patient = "import signal\nsignal.signal(24, signal.SIG_IGN)\n"
        async with LocalSandboxPool(SandboxLimits(cpu_s=1), size=2) as pool:
            return await asyncio.gather(*(run(pool, start + "while True: pass") for start in ("", patient)))

    assert [(result.outcome, result.exit_code) for result in asyncio.run(go())] == [("timeout", 124)] * 2


@pytest.mark.parametrize(
    "argv",
    [
        ["python", "-c", "x = bytearray(1 << 30)"],
        ["python", "-c", "x = []\nwhile True: x.append(bytearray(1 << 20))"],
        ["sh", "-c", "python -c 'x = bytearray(1 << 30)'"],
        ["python", "-c", "import os, time\nfor _ in range(3): os.fork()\nx = bytearray(100 << 20)\ntime.sleep(9)"],
        ["python", "-c", "import os, mmap, time\nfor _ in range(3):\n    os.fork()\nm = mmap.mmap(-1, 100 << 20)\n"
         "m.write(bytes(100 << 20))\ntime.sleep(9)"],
    ],
)  # fmt: skip
def test_out_of_memory(pool, argv):
    result = command(pool, argv)
    assert (result.outcome, result.exit_code) == ("out_of_memory", 137)


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        ("import os, time\nx = b'x' * (100 << 20)\nfor _ in range(3): os.fork()\ntime.sleep(0.4)", ("ok", 0, "")),
        ("try: bytearray(1 << 40)\nexcept MemoryError: print('caught')", ("ok", 0, "caught\n")),
        ("import os; os.kill(os.getpid(), 9)", ("nonzero", 137, "")),
    ],
    ids=["shared memory counts once", "caught", "killed by itself"],
)
def test_what_is_not_out_of_memory(pool, code, outcome):
    result = command(pool, ["python", "-c", code])
    assert (result.outcome, result.exit_code, result.stdout) == outcome


def test_long_output_keeps_head_and_tail(pool):
    result = command(pool, ["python", "-c", "print('head' + 'x' * 1_000_000 + 'tail')"])
    half = pool.limits.output_kb * 512
    assert result.outcome == "ok"
    assert result.truncated_bytes == 1_000_009 - 2 * half
    assert result.stdout.startswith("headxxx") and result.stdout.endswith("xxxtail\n")
    assert f"[... {result.truncated_bytes} bytes left out ...]" in result.stdout


def test_output_limit(pool):
    result = command(pool, ["python", "-c", "print('head')\nwhile True: print('x' * 1000)"])
    assert (result.outcome, result.exit_code) == ("output_limit", 153)
    assert result.stdout.startswith("head") and len(result.stdout) < 2 * pool.limits.output_kb * 1024
    assert result.truncated_bytes > 1_000_000


def test_a_command_is_over_when_its_first_process_is(pool):
    started = time.monotonic()
    result = command(pool, ["sh", "-c", "sleep 60 & echo started"])
    assert (result.outcome, result.stdout) == ("ok", "started\n")
    assert time.monotonic() - started < 5


def test_commands_see_what_files_wrote_and_each_other(pool):
    async def body(sandbox):
        await sandbox.write("m.py", b"value = 1")
        first = await sandbox.run(["python", "-c", "import m; print(m.value)"])
        await sandbox.write("m.py", b"value = 2")  # same size, same second: no stale cache may survive
        second = await sandbox.run(["python", "-c", "import m; print(m.value); open('out', 'w').write('x')"])
        return first.stdout, second.stdout, await sandbox.list()

    assert in_sandbox(pool, {}, body) == ("1\n", "2\n", ["m.py", "out"])


def test_calls_that_overlap_are_carried_out_in_order(pool):
    async def body(sandbox):
        async def append(i):
            code = f"open('log', 'a').write('{i} '); import time; time.sleep(0.02)"
            await sandbox.run(["python", "-c", code])

        await asyncio.gather(*(append(i) for i in range(5)))
        return await sandbox.read("log")

    assert in_sandbox(pool, {}, body) == b"0 1 2 3 4 "


def test_a_cancelled_call_ends_the_sandbox(pool):
    async def go():
        sandbox = await pool.acquire({})
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await sandbox.run(["sleep", "60"])
        with pytest.raises(SandboxDied, match="cancelled"):
            await sandbox.read("x")
        await sandbox.close()

    asyncio.run(go())


def test_the_environment_is_the_same_everywhere(pool):
    code = "import os, sys\nprint(sorted(os.environ.items()), hash('x'), sys.version)"
    first, second = (command(pool, ["python", "-c", code]).stdout for _ in range(2))
    if pool.backend == "landlock":  # but for the number of the sandbox in the path of its /tmp
        first, second = (re.sub(r"/\d+/tmp'", "/tmp'", text) for text in (first, second))
    assert first == second
    assert "PYTHONHASHSEED" in first


def test_loopback_works_inside_unless_it_would_be_the_hosts(pool):
    code = """
    import socket, threading
    server = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(server.getsockname())
    connection, _ = server.accept()
    client.sendall(b"hello")
    print(connection.recv(9))
    """
    result = command(pool, ["python", "-c", textwrap.dedent(code)])
    if pool.backend == "landlock":
        assert result.outcome == "nonzero" and "PermissionError" in result.stderr
    else:
        assert result.stdout == "b'hello'\n"
