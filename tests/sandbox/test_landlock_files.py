"""Files behind Landlock: attacks on files of the host and of other sandboxes, and changes of modes and times.

Each attack must fail without an effect on the host (fixture `host`). test_sandbox.py holds what landlock shares with
bubblewrap.
"""

import asyncio
import subprocess
import sys
import textwrap

import pytest

from composer_jax.sandbox import SandboxFileError
from tests.sandbox.fixtures import REPOSITORY, contents
from tests.sandbox.landlock_fixtures import ATTEMPT


@pytest.fixture(scope="module")
def pool(landlock_pool):
    return landlock_pool


def test_read_files_of_the_host(host, attack):
    attack(f"""
    os.symlink({str(host.file)!r}, "link")
    os.symlink("/", "root")
    paths = [{str(host.file)!r}, "link", "root" + {str(host.file)!r}, "/etc/passwd", "/etc/shadow", "/etc/hostname"]
    paths += [f"/proc/{{pid}}/root{host.file}" for pid in ("self", 1, os.getppid())] + ["/dev/mem", "/dev/kmsg"]
    paths += ["../../../../.." + {str(host.file)!r}, "/proc/self/cwd/../../../../.." + {str(host.file)!r}]
    for path in paths:
        attempt(path, lambda: open(path).read(9))
        attempt(path, lambda: subprocess.run(["cat", path], check=True, capture_output=True))
    import pwd
    try: print("DID", pwd.getpwuid(0))
    except KeyError: pass
    """)


def test_list_folders_of_the_host(host, attack):
    attack(f"""
    for path in ("/", "/etc", "/home", "/root", "/tmp", "/var", "/run", "/dev", "/dev/shm", "/proc", "/sys", "/opt",
                 "..", "../..", {str(host.file.parent)!r}, {str(REPOSITORY)!r}):
        attempt(path, lambda: os.listdir(path))
    """)


def test_write_outside(host, attack):
    attack(f"""
    for path in ({str(host.file)!r}, "/x", "/tmp/x", "/var/tmp/x", "/dev/shm/x", "/usr/x", os.__file__, sys.executable,
                 "../x", "../../x", "/dev/x", "/proc/sys/kernel/hostname", "/proc/self/oom_score_adj", "/etc/x"):
        for flags in (os.O_WRONLY, os.O_RDWR | os.O_CREAT, os.O_RDONLY | os.O_TRUNC, os.O_CREAT, 3, 3 | os.O_TRUNC):
            if flags != os.O_CREAT or not os.path.exists(path):
                attempt((path, flags), lambda: os.open(path, flags, 0o600))
        for call in (lambda: os.truncate(path, 0), lambda: os.unlink(path), lambda: os.rename(path, "stolen"),
                     lambda: os.rename("program.py", path), lambda: os.mkdir(path + "d"), lambda: os.mkfifo(path + "f"),
                     lambda: os.symlink("a", path + "l"), lambda: os.link("program.py", path + "h"),
                     lambda: os.open(os.path.dirname(path) or ".", os.O_TMPFILE | os.O_RDWR)):
            attempt(path, call)
    attempt("device", lambda: os.mknod("disk", 0o60666, os.makedev(254, 0)))
    attempt("device", lambda: os.mknod("null", 0o20666, os.makedev(1, 3)))
    """)


def test_hard_and_symbolic_links_out(host, pool, attack):
    attack(f"""
    for source in ({str(host.file)!r}, os.__file__, "/usr/bin/env", "/dev/null", "/proc/self/exe"):
        attempt(source, lambda: os.link(source, "linked"))
        attempt(source, lambda: os.link(source, os.environ["TMPDIR"] + "/linked"))
    """)

    async def go():
        async with await pool.acquire({"a": "b"}) as sandbox:
            links = {"file": str(host.file), "folder": str(host.file.parent), "up": "../.."}
            code = f"import os\nfor name, to in {links!r}.items(): os.symlink(to, name)"
            assert (await sandbox.run(["python", "-c", code])).outcome == "ok"
            for path in ("file", f"folder/{host.file.name}", "up/bin/python"):
                for call in (sandbox.read(path), sandbox.write(path, b"x")):
                    with pytest.raises(SandboxFileError, match="symbolic link"):
                        await call
            assert await contents(sandbox) == {"a": b"b"}

    asyncio.run(go())


def test_files_of_another_sandbox(host, pool):
    """Both have the same uid, and the attacker knows the paths."""

    async def go():
        async with await pool.acquire({"secret": "mine"}) as victim, await pool.acquire({}) as attacker:
            where = (await victim.run(["sh", "-c", "echo mine > $TMPDIR/own; pwd; echo $TMPDIR"])).stdout.split()
            code = f"""
            for folder, name in zip({where!r}, ("secret", "own")):
                path = folder + "/" + name
                before = os.stat(path)
                for call in (lambda: open(path).read(), lambda: open(path, "w"), lambda: os.listdir(folder),
                             lambda: os.unlink(path), lambda: os.rename(path, "stolen"), lambda: os.link(path, "l"),
                             lambda: os.chmod(path, 0o777), lambda: os.chmod(folder, 0), lambda: os.utime(path, (1, 1)),
                             lambda: os.chown(path, os.getuid(), -1), lambda: os.setxattr(path, "user.a", b"b"),
                             lambda: os.mkdir(folder + "/d"), lambda: os.open(path, 3), lambda: os.truncate(path, 0)):
                    attempt(path, call)
                assert os.stat(path) == before
            """
            result = await attacker.run(["python", "-c", ATTEMPT + textwrap.dedent(code)])
            assert (result.outcome, result.stdout) == ("ok", ""), result
            assert await victim.read("secret") == b"mine"
            assert (await victim.run(["sh", "-c", "cat $TMPDIR/own"])).stdout == "mine\n"

    asyncio.run(go())


def test_modes_and_times_of_its_own_files_can_be_changed_in_every_way(pool):
    """The supervisor makes the changes; commands see no difference from the kernel."""
    code = """
    import ctypes, os, pathlib, platform, shutil, stat, struct, time
    libc = ctypes.CDLL(None, use_errno=True)
    os.mkdir("folder"); path = pathlib.Path("folder/file"); path.write_text("x"); fd = os.open(path, os.O_RDONLY)
    here = os.open("folder", os.O_RDONLY)
    mode = lambda: stat.S_IMODE(os.stat(path).st_mode)
    os.chmod(path, 0o751); assert mode() == 0o751
    os.chmod(path.absolute(), 0o4711); assert mode() == 0o4711
    os.fchmod(fd, 0o600); assert mode() == 0o600
    os.chmod("file", 0o640, dir_fd=here); assert mode() == 0o640
    os.chmod(f"/proc/self/fd/{fd}", 0o644); assert mode() == 0o644
    assert libc.syscall(452, here, b"file", 0o700, 0) == 0 or ctypes.get_errno() == 38
    os.utime(path, (1, 2)); assert os.stat(path).st_mtime == 2
    os.utime(path, ns=(5, 6_000_000_007)); assert os.stat(path).st_mtime_ns == 6_000_000_007
    os.utime(fd, (3, 4)); assert os.stat(path).st_atime == 3
    os.utime(path); assert abs(os.stat(path).st_mtime - time.time()) < 60
    os.utime("file", (7, 8), dir_fd=here); assert os.stat(path).st_mtime == 8
    os.symlink("file", "folder/link"); os.utime("folder/link", (9, 9), follow_symlinks=False)
    assert os.stat(path).st_mtime == 8 and os.lstat("folder/link").st_mtime == 9
    omit = struct.pack("=4q", 0, (1 << 30) - 2, 0, (1 << 30) - 1)
    number = {"x86_64": 280, "aarch64": 88}[platform.machine()]
    assert libc.syscall(number, -100, b"folder/file", omit, 0) == 0
    assert os.stat(path).st_atime == 7 and os.stat(path).st_mtime > 9
    if platform.machine() == "x86_64":
        assert libc.syscall(132, b"folder/file", struct.pack("=2q", 10, 11)) == 0 and os.stat(path).st_mtime == 11
        assert libc.syscall(235, b"folder/file", struct.pack("=4q", 12, 0, 13, 5)) == 0
        assert os.stat(path).st_mtime_ns == 13_000_005_000
        assert libc.syscall(261, here, b"file", struct.pack("=4q", 14, 0, 15, 0)) == 0 and os.stat(path).st_mtime == 15
    for bad, error in ((lambda: os.chmod("missing", 0o600), FileNotFoundError), (lambda: os.fchmod(999, 0), OSError),
                       (lambda: os.chmod("x" * 5000, 0), OSError),
                       (lambda: os.chmod("folder/file/x", 0), NotADirectoryError)):
        try: bad(); print("DID")
        except error: pass
    assert libc.chmod(ctypes.c_void_p(8), 0o600) == -1
    shutil.copy2(path, "copy"); assert os.stat("copy").st_mtime == os.stat(path).st_mtime
    print("all")
    """

    async def go():
        async with await pool.acquire({"modes.py": textwrap.dedent(code)}) as sandbox:
            result = await sandbox.run(["python", "modes.py"])
            assert (result.stdout, result.outcome) == ("all\n", "ok"), result
            script = (
                "printf '#!/bin/sh\\necho ran' > go && chmod +x go && ./go && tar cf all.tar go copy && tar xf all.tar"
            )
            result = await sandbox.run(["sh", "-c", script])
            assert (result.stdout, result.stderr, result.outcome) == ("ran\n", "", "ok")

    asyncio.run(go())


def test_times_out_of_range_are_judged_as_by_the_kernel(pool, tmp_path):
    code = """
    import ctypes, itertools, os, platform, struct
    libc = ctypes.CDLL(None, use_errno=True)
    now, omit, most = (1 << 30) - 1, (1 << 30) - 2, (1 << 63) - 1
    calls = {"x86_64": ((280, -100), (235,), (261, -100)), "aarch64": ((88, -100),)}[platform.machine()]
    open("file", "w").close()
    for call in calls:
        for seconds, part in itertools.product((0, 7, most, -1, -most - 1),
                                               (0, 999_999, 10**6, 10**9 - 1, 10**9, omit, now, 1 << 62, most, -1)):
            os.utime("file", (3, 3))
            done = libc.syscall(*call, b"file", struct.pack("=4q", 0, 0, seconds, part), 0)
            kept = int(os.stat("file").st_mtime) if part != now else "now"
            print(call, seconds, part, done, ctypes.get_errno() if done else 0, kept)
    """
    (tmp_path / "times.py").write_text(textwrap.dedent(code))
    judged = subprocess.run([sys.executable, "times.py"], cwd=tmp_path, capture_output=True, text=True, check=True)

    async def go():
        async with await pool.acquire({"times.py": textwrap.dedent(code)}) as sandbox:
            return await sandbox.run(["python", "times.py"])

    result = asyncio.run(go())
    assert result.stdout == judged.stdout and " 22 " in result.stdout, result
