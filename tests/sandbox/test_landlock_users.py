"""Users behind Landlock: root, an ordinary user, and what a sandbox leaves on disk."""

import asyncio
import os
import tempfile

from composer_jax.sandbox import LocalSandboxPool
from tests.sandbox.fixtures import LIMITS, as_another_user


def test_files_of_a_sandbox_are_removed_with_it_and_with_its_pool(tmp_path, monkeypatch):
    for folder in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        folder.chmod(0o755)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))

    async def go():
        async with LocalSandboxPool(LIMITS, size=1, backend="landlock") as pool:
            (scratch,) = tmp_path.glob("composer-sandboxes-*")
            sandbox = await pool.acquire({"a": "b"})
            deep = "import os\nfor _ in range(1200): os.mkdir('d'); os.chdir('d')\nos.chmod('.', 0)"
            assert "deeper than 1000 characters" in (await sandbox.run(["python", "-c", deep])).stderr
            await sandbox.close()
            number = sandbox.name
            async with asyncio.timeout(10):
                while (scratch / number).exists():
                    await asyncio.sleep(0.01)
            sandbox = await pool.acquire({"c": "d"})
        assert list(tmp_path.iterdir()) == []

    asyncio.run(go())


AS_ORDINARY_USER = """
import asyncio, os, pathlib, signal, sys, tempfile
from composer_jax.sandbox import LocalSandboxPool
assert os.getuid() == int(sys.argv[1]) and os.geteuid() != 0
folder = tempfile.mkdtemp()
secret = folder + "/secret"
open(secret, "w").write("x")
os.utime(secret, (5, 5))
before = os.stat(secret)
def state(): return open(secret).read(), os.stat(secret).st_mode, os.stat(secret).st_mtime, sorted(os.listdir(folder))
kept = state()
ATTACKS = [f"open({secret!r})", f"open({secret!r}, 'a')", f"os.open({secret!r}, 3)", f"os.truncate({secret!r}, 0)",
  f"os.chmod({secret!r}, 0)", f"os.chmod({folder!r}, 0o777)", f"os.utime({secret!r})", f"os.unlink({secret!r})",
  f"os.symlink({secret!r}, 'l'); os.chmod('l', 0)", f"os.link({secret!r}, 'h')", f"os.rename({secret!r}, 'h')",
  f"os.chown({secret!r}, os.getuid(), os.getgid())", f"os.setxattr({secret!r}, 'user.a', b'b')",
  "os.fchmod(os.open(os.__file__, os.O_RDONLY), 0)", "os.utime(os.open(os.__file__, os.O_RDONLY), (1, 1))",
  f"os.kill({os.getpid()}, 9)", f"os.kill({os.getpid()}, 0)", "os.kill(os.getppid(), 9)", "os.setuid(0)",
  f"open('/proc/{os.getpid()}/environ')", f"open('/proc/{os.getpid()}/mem', 'r+b')", "os.listdir('/proc')",
  f"os.listdir({folder!r})", f"os.mkdir({folder!r} + '/d')", f"os.sched_setaffinity({os.getpid()}, [0])",
  f"os.setpriority(os.PRIO_PROCESS, {os.getpid()}, 19)", f"os.setpriority(os.PRIO_USER, {os.getuid()}, 19)"]
async def main():
    files = {"a.py": "print(6 * 7)"}
    async with LocalSandboxPool(size=3, backend="landlock") as pool, await pool.acquire(files) as sandbox:
        assert (await sandbox.run(["python", "a.py"])).stdout == "42\\n"
        for attack in ATTACKS:
            result = await sandbox.run(["python", "-c", "import os; " + attack])
            assert result.outcome == "nonzero" and "Error" in result.stderr, (attack, result)
            assert state() == kept, attack
        await sandbox.run(["python", "-c", "import os; os.kill(-1, 9)"])
        own = "touch a && chmod 751 a && stat -c %a a && touch -d @9 a && stat -c %Y a && cd && touch b && chmod 6 b"
        assert (await sandbox.run(["sh", "-c", own])).stdout == "751\\n9\\n"
        bomb = "import os, time\\nwhile True:\\n    if os.fork() == 0: time.sleep(5)"
        assert (await sandbox.run(["python", "-c", bomb])).outcome == "nonzero"
        async with await sandbox.fork() as other:
            assert (await other.run(["python", "a.py"])).stdout == "42\\n"
    assert state() == kept
    print("as", os.getuid(), [name for name in os.listdir(tempfile.gettempdir()) if name.startswith("composer-")])
asyncio.run(main())
"""


def test_as_an_ordinary_user_whose_files_and_processes_have_the_same_uid():
    uid = os.getuid() or 60_999
    output = as_another_user(AS_ORDINARY_USER)
    assert output == f"as {uid} []\n" if os.getuid() == 0 else output.startswith(f"as {uid} ")
