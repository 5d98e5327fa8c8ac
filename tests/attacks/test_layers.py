"""What others of the pool have: their trees, layers, packages and tests."""

import asyncio
from pathlib import Path

import pytest

from composer_jax.errors import UserError
from tests.sandbox.fixtures import contents

MARK = "mark-of-another-sandbox"


@pytest.fixture
def shown(tmp_path: Path) -> Path:
    """A folder that is shown read-only."""
    root = tmp_path / "shown"
    root.mkdir()
    (root / "hidden.py").write_text(f"MARK = '{MARK}'\n")
    (root / "test.sh").write_text("echo tested\n")
    return root


CHANGES = {
    "write": "open('{place}/hidden.py', 'a').write('x')",
    "new_file": "open('{place}/x', 'w')",
    "new_folder": "os.mkdir('{place}/x')",
    "delete": "os.unlink('{place}/hidden.py')",
    "rename": "os.rename('{place}/hidden.py', '{place}/x')",
    "replace": "open('/tmp/x', 'w').close(); os.rename('/tmp/x', '{place}/hidden.py')",
    "mode": "os.chmod('{place}/hidden.py', 0o777)",
    "times": "os.utime('{place}/hidden.py')",
    "owner": "os.chown('{place}/hidden.py', 1000, 1000)",
    "attribute": "os.setxattr('{place}/hidden.py', 'user.x', b'1')",
    "truncate": "os.truncate('{place}/hidden.py', 0)",
    "hard_link": "os.link('{place}/hidden.py', '/workspace/twin')",
    "hard_link_in_place": "os.link('{place}/hidden.py', '{place}/twin')",
    "by_a_descriptor": "fd = os.open('{place}/hidden.py', os.O_RDONLY); os.open(f'/proc/self/fd/{fd}', os.O_WRONLY)",
    "by_shared_memory": "mmap.mmap(os.open('{place}/hidden.py', os.O_RDONLY), 0, mmap.MAP_SHARED, mmap.PROT_WRITE)",
    "remove_the_folder": "os.rmdir('{place}')",
    "move_the_folder": "os.rename('{place}', '/tmp/x')",
    "remount": "check(libc.mount(None, b'{place}', None, 32 | 4096, None))",
    "unmount": "check(libc.umount2(b'{place}', 2))",
    "cover": "check(libc.mount(b'none', b'{place}', b'tmpfs', 0, None))",
}
START = """
import ctypes, errno, mmap, os
libc = ctypes.CDLL(None, use_errno=True)
def check(result):
    if result: raise OSError(ctypes.get_errno(), "refused")
"""


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("place", ["/opt/packages", "/tests"])
def test_changing_what_is_shown(host, pool, shown, place, change):
    body = change.replace("{place}", place)
    code = f"{START}try: {body}; print('DID')\nexcept OSError as error: print(errno.errorcode[error.errno])"

    async def go():
        tree = pool.tree(shown)
        async with await pool.acquire({}, packages=tree, tests=tree) as sandbox:
            output = (await sandbox.run(["python", "-c", code])).stdout.strip()
            assert output in ("EROFS", "EPERM", "EACCES", "EXDEV", "EBUSY"), output
            for where in ("/opt/packages", "/tests"):
                assert MARK in (await sandbox.run(["cat", f"{where}/hidden.py"])).stdout
        async with await pool.acquire({}, packages=tree, tests=tree) as later:
            listed = await later.run(["ls", place])
            assert listed.stdout == "hidden.py\ntest.sh\n"

    asyncio.run(go())
    assert (shown / "hidden.py").read_text() == f"MARK = '{MARK}'\n"


SEARCH = """
import os
found = []
tops = ["/", "/opt/composer/hidden", "/proc/1/root", "/proc/self/root/opt/composer", "/tests", "/logs", "/opt/packages"]
for top in tops:
    for folder, folders, files in os.walk(top):
        folders[:] = [f for f in folders if os.path.join(folder, f) not in ("/usr", "/opt/python", "/proc", "/dev")]
        for name in files:
            try: data = open(os.path.join(folder, name), "rb").read(100_000)
            except OSError: continue
            if b"-".join([b"mark", b"of", b"another", b"sandbox"]) in data: found.append(os.path.join(folder, name))
print(sorted(set(found)))
"""


def test_the_search_finds_what_is_there(host, pool, shown):
    async def go():
        async with await pool.acquire({"mine": MARK}, tests=pool.tree(shown)) as sandbox:
            assert (await sandbox.run(["python", "-c", SEARCH])).stdout == "['/tests/hidden.py', '/workspace/mine']\n"

    asyncio.run(go())


@pytest.mark.parametrize("where", ["workspace", "tree", "packages", "tests", "snapshot", "tmp", "shm", "logs"])
def test_what_another_sandbox_has(host, pool, shown, where):
    """Searched for from a warm sandbox, one made before and one made afterwards."""

    async def go():
        tree = pool.tree(shown)
        async with await pool.acquire({}) as before:
            options = {"packages": {"packages": tree}, "tests": {"tests": tree}, "logs": {"tests": tree}}
            below = tree if where == "tree" else None
            async with await pool.acquire(
                {"mine": MARK if where in ("workspace", "snapshot") else ""}, below, **options.get(where, {})
            ) as other:
                folder = {"tmp": "/tmp", "shm": "/dev/shm", "logs": "/logs/verifier"}.get(where)
                if folder:
                    assert (await other.run(["sh", "-c", f"echo {MARK} > {folder}/x"])).outcome == "ok"
                kept = await other.snapshot() if where == "snapshot" else None
                async with await pool.acquire({"a": "b"}, pool.tree()) as afterwards:
                    for sandbox in (before, afterwards):
                        assert (await sandbox.run(["python", "-c", SEARCH])).stdout == "[]\n"
                        assert MARK not in (await sandbox.shell("cat /proc/[0-9]*/mountinfo")).stdout
                del kept

    asyncio.run(go())


HIDDEN = {
    "list": "os.listdir('/opt/composer/hidden')",
    "layers": "os.listdir('/opt/composer/hidden/layers')",
    "trees": "os.listdir('/opt/composer/hidden/trees')",
    "up_from_the_workspace": "os.listdir('/workspace/../opt/composer/hidden/layers')",
    "by_the_worker": "os.listdir('/proc/1/root/opt/composer/hidden/layers')",
    "by_the_folder_of_the_worker": "os.listdir('/proc/1/cwd')",
    "by_its_descriptors": "os.listdir('/proc/1/fd')",
    "by_its_map": "os.listdir('/proc/1/map_files')",
}


@pytest.mark.parametrize("body", HIDDEN.values(), ids=HIDDEN)
def test_looking_below_the_cover(attempt, body):
    assert attempt(body) in ("DID []", "ENOENT", "EACCES", "EPERM")


def test_a_sandbox_and_its_fork_do_not_see_each_other(host, pool):
    async def go():
        async with await pool.acquire({"common": "before"}) as one:
            async with await one.fork() as other:
                await one.write("one", MARK)
                await other.write("common", MARK)
                assert (await one.run(["cat", "common"])).stdout == "before"
                assert (await other.run(["sh", "-c", "cat one || echo none"])).stdout == "none\n"
                for sandbox, own in ((one, "one"), (other, "common")):
                    found = await sandbox.run(["python", "-c", SEARCH])
                    assert found.stdout == f"['/workspace/{own}']\n"

    asyncio.run(go())


def test_deleted_files_of_a_tree_and_of_a_snapshot_stay_gone(host, pool, shown):
    """A layer hides what is below it, also when a command sets the overlay's attributes by hand."""
    code = """
import os
for name in ("hidden.py", "mine"):
    for sign in ("user.overlay.opaque", "user.overlay.whiteout", "user.overlay.redirect"):
        try: os.setxattr(".", sign, b"n"); os.removexattr(".", sign)
        except OSError: pass
    assert not os.path.exists(name)
"""

    async def go():
        async with await pool.acquire({"mine": MARK}, pool.tree(shown)) as sandbox:
            await sandbox.snapshot()
            assert (await sandbox.run(["rm", "mine", "hidden.py"])).outcome == "ok"
            async with await sandbox.fork() as fork:
                for each in (sandbox, fork):
                    assert (await each.run(["python", "-c", code])).outcome == "ok"
                    assert (await each.run(["python", "-c", SEARCH])).stdout == "[]\n"

    asyncio.run(go())


def test_a_snapshot_does_not_change_under_those_who_stand_on_it(host, pool):
    async def go():
        async with await pool.acquire({"file": "before"}) as one:
            snapshot = await one.snapshot()
            async with await pool.acquire({}, snapshot) as other:
                await one.run(["sh", "-c", "echo after >> file; chmod 0 file; ln file twin"])
                await other.run(["sh", "-c", "echo other > file"])
                async with await pool.acquire({}, snapshot) as late:
                    assert await contents(late) == {"file": b"before"}

    asyncio.run(go())


def test_the_network_of_a_pool_without_one(pool):
    with pytest.raises(UserError, match="network=True"):
        asyncio.run(pool.acquire({}, network=True))
