"""Trees without overlays: a workspace is then a copy, whatever files the tree holds."""

import asyncio
import tempfile
import warnings
from pathlib import Path

import pytest

from composer_jax.sandbox import LocalSandboxPool, SandboxLimits


@pytest.mark.parametrize("backend", ["auto", "landlock", "subprocess"])
def test_without_overlays_trees_are_copied(folder, backend):
    async def work():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of the backend that isolates nothing
            pool = LocalSandboxPool(SandboxLimits(), backend=backend, size=2, overlays=False)
        async with pool:
            tree = pool.tree(folder)
            async with await pool.acquire({"new.txt": "n"}, tree) as one:
                mounted = (await one.run(["grep", "-c", " overlay ", "/proc/self/mounts"])).stdout
                assert backend != "auto" or mounted == "0\n"
                await one.delete("package/code.py")
                await one.run(["mkfifo", "pipe"])  # not a file: left out of a copy
                async with await one.fork() as other:
                    await other.write("new.txt", "o")
                    assert await one.read("new.txt") == b"n"
                    assert "package/code.py" not in await other.list()
                await one.restore(tree)
                assert "package/code.py" in await one.list() and "new.txt" not in await one.list()
                assert (await one.run(["./run.sh"])).stdout == "ran\n"

    asyncio.run(work())


AWKWARD = """
import os
os.makedirs("closed/below"); os.mkdir("sparse")
open("closed/below/secret", "w").write("s"); open("shut", "w").write("t"); open("plain", "w").write("p")
os.symlink("nowhere", "link"); os.symlink("/usr", "out"); os.mkfifo("closed/pipe"); os.mkfifo("pipe")
open("sparse/file", "wb").truncate(30 << 20); open("sparse/end", "wb").write(b"x" * 5000)
with open("sparse/end", "r+b") as file: file.seek(20 << 20); file.write(b"y")
os.utime("plain", ns=(5, 6_000_000_007)); os.utime("link", (8, 9), follow_symlinks=False)
here = os.getcwd()
for _ in range(1100 if not os.environ.get("SHALLOW") else 100): os.mkdir("d"); os.chdir("d")
open("deepest", "w").write("d"); os.chdir(here)
os.chmod("plain", 0o751); os.chmod("shut", 0); os.chmod("closed/below", 0o400); os.utime("closed/below", (1, 2))
os.chmod("closed", 0); os.chmod("d", 0o711); os.utime("d", (3, 4))
"""
LOOK = """
import os
for name in ("plain", "shut", "closed", "d"): print(name, oct(os.lstat(name).st_mode))
print(*sorted(os.listdir(".")), os.readlink("link"), os.readlink("out"), os.lstat("link").st_mtime_ns)
print(os.stat("plain").st_mtime_ns, os.stat("d").st_mtime, os.stat("sparse/end").st_size)
print(sum(os.stat(f"sparse/{name}").st_blocks for name in ("file", "end")) < 100)
os.chmod("closed", 0o700); print(oct(os.stat("closed/below").st_mode), os.stat("closed/below").st_mtime)
os.chmod("shut", 0o600); os.chmod("closed/below", 0o700)
print(open("plain").read(), open("shut").read(), open("closed/below/secret").read(), os.listdir("closed"))
with open("sparse/end", "rb") as file: data = file.read()
print(data.count(b"x"), data.count(b"y"), data.count(b"\\0"))
while os.path.isdir("d"): os.chdir("d")
print(open("deepest").read())
"""
SHOWN = """plain 0o100751
shut 0o100000
closed 0o40000
d 0o40711
awkward.py closed d link look.py out plain shut sparse nowhere /usr 9000000000
6000000007 4.0 20971521
True
0o40400 2.0
p t s ['below']
5000 1 20966520
d
"""


@pytest.mark.parametrize("backend", ["auto", "landlock", "subprocess"])
def test_a_copied_workspace_is_whole_whatever_a_command_made_of_it(backend, monkeypatch):
    if backend == "subprocess" and Path("/dev/shm").is_dir():
        monkeypatch.setattr(tempfile, "tempdir", "/dev/shm")  # thousands of folders take long on a disk
    # Behind Landlock looks of the limits leave folders open to their owner, and refuse the deepest.
    shown = SHOWN.replace("0o40000", "0o40500").replace("0o40400", "0o40500") if backend == "landlock" else SHOWN
    words = ["env", "SHALLOW=1"] if backend == "landlock" else []

    async def work():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            pool = LocalSandboxPool(SandboxLimits(), backend=backend, size=3, overlays=False)
        async with pool, await pool.acquire({"awkward.py": AWKWARD, "look.py": LOOK}) as one:
            made = await one.run([*words, "python", "awkward.py"])
            assert made.outcome == "ok", made
            others = await asyncio.gather(*(one.fork() for _ in range(2)))  # at once: they copy the same layer
            for sandbox in (*others, one):
                looked = await sandbox.run(["python", "look.py"])
                assert (looked.stdout, looked.stderr) == (shown, "")
                await sandbox.close()

    asyncio.run(work())


def test_overlays_are_used_here(pool):
    """Otherwise most of this file tests something else."""

    async def work(pool):
        async with await pool.acquire({}) as sandbox:
            assert " overlay " in (await sandbox.run(["cat", "/proc/self/mounts"])).stdout

    asyncio.run(work(pool))
