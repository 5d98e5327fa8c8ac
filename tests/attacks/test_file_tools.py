"""Leading the file tools astray: the worker may read and write more than a command may."""

import asyncio
import os
import textwrap
import time

import pytest

from composer_jax.sandbox import GONE, Change, SandboxFileError
from tests.sandbox.fixtures import contents

TARGETS = ["/usr/lib/os-release", "/opt/composer/inside/worker.py", "/proc/1/environ", "/tmp/own"]
LINKS = {
    "absolute": ("link", "{target}", "link"),
    "relative": ("link", "..{target}", "link"),
    "by_a_folder": ("link", "{folder}", "link/{name}"),
    "up": ("link", "..", "link{target}"),
    "up_twice": ("real/link", "../..", "real/link{target}"),
    "to_itself": ("link", "link", "link"),
    "below_itself": ("link", "link", "link/x"),
    "to_the_root_of_the_worker": ("link", "/proc/1/root", "link{target}"),
    "to_an_open_descriptor": ("link", "/proc/self/fd/3", "link"),
    "that_stays_inside": ("link", "real", "link/file"),  # simpler to trust when it is refused, too
}


@pytest.mark.parametrize(("name", "to", "path"), LINKS.values(), ids=LINKS)
def test_a_symbolic_link(host, pool, name, to, path):
    async def follow(sandbox, target):
        where = {"target": target, "folder": os.path.dirname(target), "name": os.path.basename(target)}
        code = f"import os\nopen('/tmp/own', 'w').write('x')\nos.symlink({to.format(**where)!r}, {name!r})"
        assert (await sandbox.run(["python", "-c", code])).outcome == "ok"
        led = path.format(**where)
        calls = [lambda: sandbox.read(led), lambda: sandbox.write(led, b"overwritten")]
        if led != name:  # what is at the very end is replaced, not followed
            calls.append(lambda: sandbox.delete(led))
            for change in (Change("file", b"overwritten"), GONE, Change("folder")):
                calls.append(lambda change=change: sandbox.apply({led: change}))
        for call in calls:
            with pytest.raises(SandboxFileError, match="symbolic link"):
                await call()
        assert await sandbox.list() == ["real/file"]
        assert await contents(sandbox) == {"real/file": b"content"}
        assert (await sandbox.run(["cat", "/tmp/own"])).stdout == "x"
        await sandbox.delete(name)  # the link itself may go
        await sandbox.write_files({name: "a file now"})
        assert (await sandbox.run(["cat", name, "/tmp/own"])).stdout == "a file nowx"
        await sandbox.delete(name)

    async def go():
        async with await pool.acquire({"real/file": "content"}) as sandbox:
            for target in TARGETS:
                await follow(sandbox, target)

    asyncio.run(go())


PATHS = {
    "absolute": "/etc/passwd", "up": "../etc/passwd", "up_from_below": "a/../../etc/passwd", "other_root": "//etc/x",
    "beside_the_workspace": "/workspaces/x", "up_from_the_workspace": "/workspace/../etc/passwd", "zero": "a\0b",
    "surrogate": "a\ud800b", "nothing": "", "the_workspace": "/workspace", "here": "./.", "deep": "a/" * 100 + "x",
    "long": "x" * 300, "long_in_all": "x/" * 60 + "y" * 5000,
}  # fmt: skip


def test_a_path_that_points_elsewhere(host, pool):
    async def go():
        async with await pool.acquire({"a/b": "b"}) as sandbox:
            for path in PATHS.values():
                calls = [sandbox.read(path), sandbox.write(path, b"x"), sandbox.delete(path)]
                calls += [sandbox.write_files({path: b"x"}), sandbox.apply({path: Change("file", b"x")})]
                for call in calls:
                    with pytest.raises(SandboxFileError):
                        await call
                assert [name for name in await sandbox.list() if not name.startswith("x/")] == ["a/b"]

    asyncio.run(go())


SPECIAL = {
    "pipe": "os.mkfifo('odd')",
    "socket": "socket.socket(socket.AF_UNIX).bind('odd')",
    "pipe_with_a_writer": "os.mkfifo('odd'); fd = os.open('odd', os.O_RDWR); os.write(fd, b'x'); time.sleep(60)",
}


@pytest.mark.parametrize("code", SPECIAL.values(), ids=SPECIAL)
def test_a_file_that_would_keep_the_worker_waiting(host, pool, code):
    async def go():
        async with await pool.acquire({"make.py": f"import os, socket, time\n{code}"}) as sandbox:
            await sandbox.shell("python make.py & until test -e odd; do :; done; python -c pass")
            with pytest.raises(SandboxFileError, match="not a regular file"):
                await sandbox.read("odd")
            with pytest.raises(SandboxFileError, match="not a regular file"):
                await sandbox.write("odd", b"x")
            assert await sandbox.list() == ["make.py"] and set(await sandbox.changes()) == {"make.py"}
            await sandbox.apply({"odd": Change("file", b"a file now")})
            assert await sandbox.read("odd") == b"a file now"

    asyncio.run(go())


def test_folders_that_are_closed(host, pool):
    code = """
    import os
    os.mkdir("closed"); open("closed/file", "w").write("x"); os.chmod("closed/file", 0); os.chmod("closed", 0)
    os.chmod("/workspace", 0)
    """

    async def go():
        async with await pool.acquire({}) as sandbox:
            assert (await sandbox.run(["python", "-c", textwrap.dedent(code)])).outcome == "ok"
            assert await sandbox.read("closed/file") == b"x"
            await sandbox.restore(await sandbox.snapshot())
            assert await contents(sandbox) == {"closed/file": b"x"}

    asyncio.run(go())


def test_removing_folders_that_are_nested_without_end(host, pool):
    code = "import os\nfor _ in range(1500): os.mkdir('d'); os.chdir('d')"

    async def go():
        async with await pool.acquire({}) as sandbox:
            assert (await sandbox.run(["python", "-c", code])).outcome == "ok"
            for change in (GONE, Change("file", b"x")):
                with pytest.raises(SandboxFileError, match="nested more than 64 deep"):
                    await sandbox.apply({"d": change})

    asyncio.run(go())


# What is swapped while the host works on it: in /tmp/outside is what must be neither read nor written.
SWAPS = {
    "a_folder_for_a_link": """
        os.rename("d", "kept"); os.symlink("/tmp/outside", "d")
        os.unlink("d"); os.rename("kept", "d")
    """,
    "a_folder_for_the_worker": """
        os.rename("d", "kept"); os.symlink("/proc/1", "d")
        os.unlink("d"); os.rename("kept", "d")
    """,
    "a_file_for_a_link": """
        os.symlink("/tmp/outside/environ", "l"); os.rename("l", "d/environ")
        open("f", "w").write("inside"); os.rename("f", "d/environ")
    """,
    "a_file_for_a_pipe": """
        os.mkfifo("p"); fd = os.open("p", os.O_RDWR); os.rename("p", "d/environ")
        os.close(fd); open("f", "w").write("inside"); os.rename("f", "d/environ")
    """,
    "a_file_for_a_folder": """
        os.rename("d/environ", "f"); os.mkdir("d/environ")
        os.rmdir("d/environ"); os.rename("f", "d/environ")
    """,
    "a_folder_for_a_closed_one": """
        os.chmod("d", 0); os.chmod("d", 0o755)
        os.chmod("d/environ", 0); os.chmod("d/environ", 0o644)
    """,
    "a_file_for_a_larger_one": """
        for n in range(8): os.truncate(os.open(f"d/{n}", os.O_RDWR | os.O_CREAT), 8 << 20)
        for n in range(8): os.truncate(f"d/{n}", 0); os.unlink(f"d/{n}")
    """,
}
SWAPPER = """
import os, resource
os.makedirs("/tmp/outside", exist_ok=True)
open("/tmp/outside/environ", "w").write("outside")
open("/tmp/ready", "w")
count = 0
while True:
    try:
{body}
    except OSError:  # the host was faster
        if not os.path.lexists("d"): os.makedirs("d", exist_ok=True)
    count += 1
    if count % 20 == 0: open("/tmp/count", "w").write(str(count))
    for fd in range(3, 60):
        try: os.close(fd)
        except OSError: pass
"""
INSIDE = (b"inside", b"written")
OPERATIONS = {
    "read": lambda sandbox: sandbox.read("d/environ"),
    "write": lambda sandbox: sandbox.write("d/environ", b"written"),
    "delete": lambda sandbox: sandbox.delete("d/environ"),
    "list": lambda sandbox: sandbox.list(),
    "write_files": lambda sandbox: sandbox.write_files({"d/environ": b"written"}),
    "changes": lambda sandbox: sandbox.changes(),
    "apply": lambda sandbox: sandbox.apply(
        {"d": Change("folder", b"", 0o755), "d/environ": Change("file", b"written"), "d/old": GONE}
    ),
}
ROUNDS = 60
PATIENCE_S = 10.0  # with rounds that all fell on the same moment of the swapping


def texts_of(result) -> set[bytes]:
    """Every content in what an operation returned."""
    if isinstance(result, dict):
        return {getattr(value, "data", value) for path, value in result.items() if path.endswith("environ")}
    return {result} if isinstance(result, bytes) else set()


@pytest.mark.parametrize("body", SWAPS.values(), ids=SWAPS)
@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_swapping(host, pool, body, operation):
    """Whatever is swapped and when: only what is in the workspace is read or written, and the worker outlives it."""
    swapper = SWAPPER.format(body=textwrap.indent(textwrap.dedent(body).strip(), " " * 8))

    async def go():
        async with await pool.acquire({"swap.py": swapper, "d/environ": "inside"}) as sandbox:
            await sandbox.shell("python swap.py & until test -e /tmp/ready; do :; done")
            served, rounds, end = 0, 0, time.monotonic() + PATIENCE_S
            while rounds < ROUNDS or (not served and time.monotonic() < end):
                rounds += 1
                try:
                    found = await operation(sandbox)
                except SandboxFileError:
                    continue
                served += 1
                for data in texts_of(found):
                    assert data in INSIDE or not data.strip(b"\0") or data == b"/tmp/outside/environ", data
            swapped = await sandbox.shell("until test -e /tmp/count; do :; done; kill %1; wait")
            assert swapped.outcome == "ok", swapped
            after = await sandbox.run(["sh", "-c", "cat /tmp/outside/environ; ls /tmp/outside"])
            assert after.stdout == "outsideenviron\n", after
            assert served

    asyncio.run(go())
