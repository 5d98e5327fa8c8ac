"""The changes of a workspace: complete, reported once, and the same after apply() to another workspace."""

import asyncio
import os
import random
import shutil
import stat
import time
from pathlib import Path
from types import SimpleNamespace
from uuid import uuid4

import pytest

from composer_jax.errors import UserError
from composer_jax.sandbox import GONE, Change, LocalSandboxPool, SandboxFileError, SandboxLimits
from composer_jax.sandbox.inside.changes import Changes


@pytest.fixture(scope="module", params=["overlays", "copies", "subprocess"])
def any_pool(request):
    """One pool of each way to make workspaces."""
    if request.param == "subprocess":
        with pytest.warns(RuntimeWarning):
            pool = LocalSandboxPool(size=3, backend="subprocess")
    else:
        pool = LocalSandboxPool(size=3, overlays=request.param == "overlays")
    yield pool
    pool.kill()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small repository with what is easily got wrong."""
    root = tmp_path / "repository"
    for path, text in {
        "readme.md": "hello\n",
        "src/a.py": "A = 1\n",
        "src/b.py": "B = 2\n",
        "src/deep/c.py": "C = 3\n",
        "src/deep/d.py": "D = 4\n",
        "docs/e.md": "e\n",
    }.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    (root / "run.sh").write_text("echo run\n")
    (root / "run.sh").chmod(0o755)
    (root / "link").symlink_to("src/a.py")
    return root


def work(pool, folder, commands: list[str]) -> list[dict[str, Change]]:
    """The changes after each command."""

    async def go():
        async with await pool.acquire({}, pool.tree(folder)) as sandbox:
            reports = []
            for command in commands:
                result = await sandbox.run(["sh", "-c", command])
                assert result.outcome == "ok", result
                reports.append(await sandbox.changes())
            return reports

    return asyncio.run(go())


def test_every_kind_of_change_is_told(any_pool, folder):
    [changes] = work(
        any_pool,
        folder,
        [
            "echo A=2 > src/a.py; rm src/b.py; rm -r src/deep; mkdir -p new/empty; echo n > new/n.txt;"
            " chmod 755 new/n.txt; ln -s ../x new/l; chmod 644 run.sh; rm link; ln -s src/b.py link;"
            " rm -r docs; echo docs > docs;"
            " touch readme.md; mkfifo pipe"
        ],
    )
    assert changes == {
        "src/a.py": Change("file", b"A=2\n", 0o644),
        "src/b.py": GONE,
        "src/deep": GONE,
        "new": Change("folder", b"", 0o755),
        "new/empty": Change("folder", b"", 0o755),
        "new/n.txt": Change("file", b"n\n", 0o755),
        "new/l": Change("link", b"../x", 0o777),
        "run.sh": Change("file", b"echo run\n", 0o644),
        "link": Change("link", b"src/b.py", 0o777),
        "docs": Change("file", b"docs\n", 0o644),
    }


def test_what_was_undone_is_not_a_change(any_pool, folder):
    kept = f"/tmp/composer-{uuid4().hex}"  # the backend without isolation has the host's /tmp
    first, second, third = work(
        any_pool,
        folder,
        [
            f"cp -r src {kept}; rm -r src; echo x > x",
            f"cp -r {kept} src; rm x",
            f"rm src/a.py; cp {kept}/a.py src/a.py; rm -r src/deep {kept}; mkdir src/deep; echo C = 3 > src/deep/c.py",
        ],
    )
    assert set(first) == {"src", "x"} and first["src"] == GONE
    assert second == {}
    assert third == {"src/deep/d.py": GONE}


def test_a_folder_replaced_by_a_file_and_by_a_folder_again(any_pool, folder):
    first, second = work(any_pool, folder, ["rm -r src; echo file > src", "rm src; mkdir src; echo A = 1 > src/a.py"])
    assert first == {"src": Change("file", b"file\n", 0o644)}
    assert second == {"src/b.py": GONE, "src/deep": GONE}


def test_folders_that_were_closed_are_opened(any_pool, folder):
    [changes] = work(
        any_pool, folder, ["echo x > src/deep/x; chmod 0 src/deep; mkdir n; echo y > n/y; chmod 0 n n/y || true"]
    )
    assert changes["src/deep/x"].data == b"x\n"
    assert changes["n/y"].data == b"y\n"


def test_without_a_folder_everything_is_a_change(any_pool):
    async def go():
        async with await any_pool.acquire({"a/b.txt": "b", "c.txt": "c"}) as sandbox:
            return await sandbox.changes()

    changes = asyncio.run(go())
    assert {path: change.data for path, change in changes.items()} == {"a": b"", "a/b.txt": b"b", "c.txt": b"c"}


def listing(folder: Path) -> dict[str, tuple]:
    """Everything below a folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        mode = path.lstat().st_mode
        kind = stat.S_IFMT(mode)
        name = path.relative_to(folder).as_posix()
        if stat.S_ISLNK(mode):
            found[name] = (kind, os.readlink(path), 0)
        else:
            found[name] = (kind, path.read_bytes() if path.is_file() else b"", stat.S_IMODE(mode))
    return found


DUMP = """
import base64, json, os, stat
found = {}
for top, folders, files in os.walk("."):
    for name in folders + files:
        path = os.path.relpath(os.path.join(top, name), ".")
        mode = os.lstat(path).st_mode
        if stat.S_ISLNK(mode): found[path] = (stat.S_IFMT(mode), os.readlink(path), 0)
        else: found[path] = (stat.S_IFMT(mode), open(path).read() if stat.S_ISREG(mode) else "", stat.S_IMODE(mode))
print(json.dumps(found, sort_keys=True))
"""


def a_command(rng: random.Random) -> str:
    """Something random done to random paths; much of it fails, which is fine."""
    names = [
        "src",
        "src/a.py",
        "src/deep",
        "src/deep/c.py",
        "docs",
        "docs/e.md",
        "new",
        "new/deep",
        "link",
        "readme.md",
    ]
    a, b = rng.choice(names), rng.choice(names)
    return rng.choice(
        [f"rm -rf {a}", f"mkdir -p {a}", f"echo {rng.randint(0, 3)} > {a}", f"mv {a} {b}", f"cp -rT {a} {b}"]
        + [f"ln -sfn {b} {a}", f"chmod 755 {a}", f"echo A = 1 > {a}", f"rm -rf {a}; mkdir -p {a}/x; echo y > {a}/x/y"]
    )


@pytest.mark.parametrize("seed", range(4))
def test_changes_laid_on_another_workspace_make_it_equal(any_pool, folder, seed):
    """After random commands and snapshots, the reported changes equal a comparison of all files."""
    rng = random.Random(seed)

    async def go():
        tree = any_pool.tree(folder)
        async with await any_pool.acquire({}, tree) as sandbox, await any_pool.acquire({}, tree) as other:
            for _ in range(6):
                script = "; ".join(a_command(rng) for _ in range(3))
                await sandbox.run(["sh", "-c", f"({script}) 2>/dev/null; true"])
                if rng.random() < 0.5:
                    await sandbox.changes()
                if rng.random() < 0.4:
                    await sandbox.snapshot()
            changes = await sandbox.changes()
            await other.apply(changes)
            want = (await sandbox.run(["python", "-c", DUMP])).stdout
            assert (await other.run(["python", "-c", DUMP])).stdout == want, changes
            assert await other.changes() == changes

    asyncio.run(go())


def test_little_is_told_again(pool, folder, monkeypatch):
    """The second report holds what changed since the first, not everything."""

    async def go():
        async with await pool.acquire({}, pool.tree(folder)) as sandbox:
            await sandbox.write("big.bin", b"x" * 1_000_000)
            await asyncio.sleep(0.1)  # longer than a tick of the file system, within which files are reported again
            await sandbox.changes()
            replies = []
            original = sandbox._call  # replies are private, and their size is what this test is about

            async def recorded(*args, **options):
                replies.append(await original(*args, **options))
                return replies[-1]

            monkeypatch.setattr(sandbox, "_call", recorded)
            await sandbox.write("small.txt", "y")
            both = await sandbox.changes()
            assert set(both) == {"big.bin", "small.txt"} and len(both["big.bin"].data) == 1_000_000
            assert [path for path, *_ in replies[-1][0]["changes"]] == ["small.txt"]

    asyncio.run(go())


def test_a_change_within_a_tick_of_the_file_systems_clock_is_told(folder, tmp_path):
    """The clock of files may be behind that of the processor, by more on a busy machine."""
    shutil.copytree(folder, tmp_path / "workspace", symlinks=True)
    file = tmp_path / "workspace" / "src" / "a.py"
    root, base = (os.open(path, os.O_RDONLY) for path in (tmp_path / "workspace", folder))
    made = Changes(root, base, None, 1 << 20, is_copy=True)
    before = (folder / "src" / "a.py").stat()
    for text, report in [("A = 9\n", [["src/a.py", "file", 0o644, 6]]), ("A = 1\n", [])] * 40:
        file.write_text(text)
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert [list(entry) for entry in made.report()[0]["changes"]] == report
    os.close(root)
    os.close(base)


def test_a_clock_set_back_hides_no_change(folder, tmp_path, monkeypatch):
    """A clock that is corrected gives a later change an earlier time than the copy has."""
    shutil.copytree(folder, tmp_path / "workspace", symlinks=True)
    time.sleep(0.02)
    root, base = (os.open(path, os.O_RDONLY) for path in (tmp_path / "workspace", folder))
    made = Changes(root, base, None, 1 << 20, is_copy=True)
    file = tmp_path / "workspace" / "src" / "a.py"
    (tmp_path / "workspace" / "src" / "a.py").write_text("A = 9\n")
    os.utime(file, ns=((folder / "src" / "a.py").stat().st_atime_ns, (folder / "src" / "a.py").stat().st_mtime_ns))
    original = os.stat

    def an_hour_earlier(path, **options):
        status = original(path, **options)
        values = {"st_ctime_ns": status.st_ctime_ns - 3_600_000_000_000}
        names = ("st_mode", "st_ino", "st_dev", "st_size", "st_mtime_ns")
        return SimpleNamespace(**{name: getattr(status, name) for name in names}, **values)

    monkeypatch.setattr("composer_jax.sandbox.inside.changes.os.stat", an_hour_earlier)
    assert made.report()[0]["changes"] == [("src/a.py", "file", 0o644, 6)]


def test_a_restored_workspace_with_times_set_back_tells_its_changes(any_pool, folder):
    async def go():
        async with await any_pool.acquire({}, any_pool.tree(folder)) as sandbox:
            code = "touch -r src/a.py t; printf 'A = 9\\n' > src/a.py; touch -r t src/a.py; rm t"
            assert (await sandbox.run(["sh", "-c", code])).outcome == "ok"
            snapshot = await sandbox.snapshot()
            await sandbox.restore(snapshot)
            assert await sandbox.changes() == {"src/a.py": Change("file", b"A = 9\n", 0o644)}

    asyncio.run(go())


def test_a_restored_workspace_tells_only_the_changes_of_its_tree(any_pool, folder):
    async def go():
        tree = any_pool.tree(folder)
        async with await any_pool.acquire({}, tree) as sandbox:
            await sandbox.write("src/a.py", b"A = 9\n")
            snapshot = await sandbox.snapshot()
            await sandbox.write("later.txt", b"x")
            assert sorted(await sandbox.changes()) == ["later.txt", "src/a.py"]
            await sandbox.restore(snapshot)
            assert await sandbox.changes() == {"src/a.py": Change("file", b"A = 9\n", 0o644)}
            await sandbox.restore(tree)
            assert await sandbox.changes() == {}

    asyncio.run(go())


def test_more_changes_than_a_reply_can_hold_are_refused(folder):
    async def go():
        async with LocalSandboxPool(SandboxLimits(workspace_mb=2, file_mb=8), size=1) as pool:
            async with await pool.acquire({}) as sandbox:
                await sandbox.run(["sh", "-c", "truncate -s 5M sparse"])
                with pytest.raises(SandboxFileError, match="more than 2097152 bytes"):
                    await sandbox.changes()
                await sandbox.delete("sparse")
                assert await sandbox.changes() == {}

    asyncio.run(go())


def test_a_link_is_never_followed_out(pool, folder, host):
    """Neither in the report of changes nor when they are applied elsewhere."""

    async def go():
        async with await pool.acquire({}, pool.tree(folder)) as sandbox:
            await sandbox.run(["sh", "-c", f"rm -r src; ln -s / src; ln -s {host.file} leak"])
            changes = await sandbox.changes()
            assert {path: change.kind for path, change in changes.items()} == {"src": "link", "leak": "link"}
            with pytest.raises(SandboxFileError, match="symbolic link"):
                await sandbox.apply({"src/tmp/x": Change("file", b"x")})
            for path in ("../x", "/etc/x", "a/../../x"):
                with pytest.raises(SandboxFileError, match="outside"):
                    await sandbox.apply({path: Change("file", b"x")})

    asyncio.run(go())


def test_packages_can_be_imported_and_not_changed(any_pool, tmp_path):
    package = tmp_path / "site" / "thepackage"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("NAME = 'the package'\n")

    async def go():
        packages = any_pool.tree(tmp_path / "site")
        async with await any_pool.acquire(
            {"p.py": "import thepackage; print(thepackage.NAME)"}, packages=packages
        ) as sandbox:
            for argv in (["python", "p.py"], ["python", "-B", "p.py"], ["sh", "-c", "exec python p.py"]):
                assert (await sandbox.run(argv)).stdout == "the package\n"
            if any_pool.backend == "bubblewrap":
                result = await sandbox.run(["sh", "-c", "echo x > /opt/packages/thepackage/__init__.py"])
                assert "Read-only file system" in result.stderr
                twin = await sandbox.fork()
                assert (await twin.run(["python", "p.py"])).stdout == "the package\n"
                await twin.close()

    asyncio.run(go())


def test_tests_are_shown_only_where_they_are_asked_for(pool, tmp_path):
    (tmp_path / "test.sh").write_text("cat /tests/hidden; cd /app; pwd -P; echo 1 > /logs/verifier/reward.txt\n")
    (tmp_path / "hidden").write_text("the tests\n")

    async def go():
        tests = pool.tree(tmp_path)
        async with await pool.acquire({}, tests=tests) as grader, await pool.acquire({}) as agent:
            result = await grader.run(["bash", "/tests/test.sh"])
            assert (result.stdout, result.stderr) == ("the tests\n/workspace\n", "")
            assert (await grader.run(["cat", "/logs/verifier/reward.txt"])).stdout == "1\n"
            assert (await grader.run(["sh", "-c", "echo x > /tests/hidden"])).outcome == "nonzero"
            assert (await agent.run(["ls", "/tests", "/logs"])).stdout == "/logs:\n\n/tests:\n"

    asyncio.run(go())


def test_trees_that_cannot_be_shown_are_named(pool, folder):
    async def go():
        async with await pool.acquire({}, pool.tree(folder)) as sandbox:
            snapshot = await sandbox.snapshot()
            for shown in ({"packages": snapshot}, {"tests": snapshot}, {"tests": pool.tree()}, {"solution": snapshot}):
                (name,) = shown
                with pytest.raises(UserError, match=f"the tree of {name} is mounted from a folder"):
                    await pool.acquire({}, **shown)
        with pytest.raises(UserError, match="network=True"):
            await pool.acquire({}, network=True)

    asyncio.run(go())
