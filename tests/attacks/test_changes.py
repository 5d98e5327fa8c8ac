"""Attacks on the report of a workspace's changes, and on applying it elsewhere."""

import asyncio
import os
import textwrap
from pathlib import Path

import pytest

from composer_jax.sandbox import Change, LocalSandboxPool, SandboxFileError, SandboxLimits


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What the workspace is made of."""
    root = tmp_path / "repository"
    (root / "src").mkdir(parents=True)
    (root / "src" / "a.py").write_text("A = 1\n")
    (root / "src" / "b.py").write_text("B = 1\n")
    (root / "top.py").write_text("TOP = 1\n")
    return root


@pytest.fixture(scope="module", params=["overlays", "copies"])
def any_pool(request):
    """Both ways to make a workspace."""
    pool = LocalSandboxPool(SandboxLimits(workspace_mb=16), size=2, overlays=request.param == "overlays")
    yield pool
    pool.kill()


def after(pool, folder, code: str) -> tuple[str, dict[str, Change]]:
    """What a Python program printed, and the changes it made."""

    async def go():
        async with await pool.acquire({}, pool.tree(folder)) as sandbox:
            result = await sandbox.run(["python", "-c", f"import os, stat\n{textwrap.dedent(code)}"])
            assert (result.outcome, result.stderr) == ("ok", ""), result
            return result.stdout, await sandbox.changes()

    return asyncio.run(go())


ATTRIBUTES = ("opaque", "whiteout", "redirect", "metacopy", "origin", "impure", "upper", "protattr", "overlay.opaque")
VALUES = {"opaque": b"y", "redirect": b"/etc", "origin": b"\0\xfb" + bytes(30)}


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_an_attribute_of_the_overlay_set_by_hand(host, any_pool, folder, name):
    """Refused or without effect: neither hides what is there nor invents what is not."""
    code = f"""
    os.makedirs("src/new"); open("src/new/file", "w").write("new")
    open("src/a.py", "w").write("A = 2\\n")
    for path in (".", "src", "src/a.py", "src/new", "src/new/file", "top.py"):
        for prefix in ("user.overlay.", "trusted.overlay.", "user.overlay.overlay."):
            try: os.setxattr(path, prefix + {name!r}, {VALUES.get(name, b"y")!r}, follow_symlinks=False)
            except OSError as error: assert error.errno in (1, 22, 95, 34, 61), error
    open("src/late", "w").write("late")
    print(sorted(os.listdir("src")), open("src/a.py").read(), open("top.py").read())
    """
    output, changes = after(any_pool, folder, code)
    assert output == "['a.py', 'b.py', 'late', 'new'] A = 2\n TOP = 1\n\n"
    assert {path: change.data for path, change in changes.items()} == {
        "src/a.py": b"A = 2\n", "src/new": b"", "src/new/file": b"new", "src/late": b"late",
    }  # fmt: skip


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_such_attributes_in_the_folder_itself(host, any_pool, folder, name):
    try:
        for path in (folder, folder / "src", folder / "src" / "a.py"):
            os.setxattr(path, f"user.overlay.{name}", VALUES.get(name, b"y"))
    except OSError:
        pytest.skip("the file system of the tests has no such attributes")
    output, changes = after(
        any_pool, folder, "open('src/b.py', 'a').write('B = 2\\n'); print(sorted(os.listdir('src')))"
    )
    assert set(changes) == {"src/b.py"} and output == "['a.py', 'b.py']\n"


DEVICES = {
    "the_sign_of_a_deleted_file": "os.mknod('src/a.py', stat.S_IFCHR | 0o666, 0)",
    "the_sign_beside": "os.mknod('src/x', stat.S_IFCHR | 0o666, 0)",
    "a_block_device": "os.mknod('src/x', stat.S_IFBLK | 0o666, os.makedev(8, 0))",
    "a_zero": "os.mknod('src/x', stat.S_IFCHR | 0o666, os.makedev(1, 5))",
}


@pytest.mark.parametrize("call", DEVICES.values(), ids=DEVICES)
def test_device_files(host, any_pool, folder, call):
    code = f"os.unlink('src/a.py')\ntry: {call}\nexcept PermissionError: pass\nopen('src/c.py', 'w').write('C')"
    _, changes = after(any_pool, folder, code)
    assert {path: change.kind for path, change in changes.items()} == {"src/a.py": "gone", "src/c.py": "file"}


NAMES = {
    "newline": b"a\nb", "not_utf8": b"\xff\xfe", "quote": b'"],["x', "controls": bytes(range(1, 32)), "spaces": b" ",
    "long": b"x" * 255, "backslash": b"..\\..\\x", "dots": b"...", "workspace": b"workspace", "dash": b"-rf",
    "surrogate_in_utf8": b"\xed\xa0\x80", "temporary": b".composer-0123456789abcdef",
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_a_name(host, any_pool, folder, name):
    """Told exactly, and laid on another workspace exactly there."""

    async def go():
        tree = any_pool.tree(folder)
        async with await any_pool.acquire({}, tree) as sandbox, await any_pool.acquire({}, tree) as other:
            code = f"import os; os.mkdir({name!r}); open({name + b'/' + name!r}, 'w').write('x')"
            assert (await sandbox.run(["python", "-c", code])).outcome == "ok"
            changes = await sandbox.changes()
            assert {os.fsencode(path): change.data for path, change in changes.items()} == {
                name: b"",
                name + b"/" + name: b"x",
            }
            await other.apply(changes)
            listed = await other.run(["python", "-c", f"import os; print(os.listdir({name!r}) == [{name!r}])"])
            assert listed.stdout == "True\n" and await other.changes() == changes

    asyncio.run(go())


LINKS = {"the_secret": "{secret}", "the_worker": "/proc/1/environ", "the_root": "/", "itself": "leak", "nothing": ""}


@pytest.mark.parametrize("to", [to for to in LINKS.values() if to], ids=[name for name, to in LINKS.items() if to])
@pytest.mark.parametrize("place", ["leak", "src", "src/a.py"])
def test_a_link_in_the_place_of(host, any_pool, folder, to, place):
    to = to.format(secret=host.file)
    code = f"import shutil\nif os.path.isdir({place!r}): shutil.rmtree({place!r})\n"
    code += f"if os.path.exists({place!r}): os.unlink({place!r})\nos.symlink({to!r}, {place!r})"
    _, changes = after(any_pool, folder, code)
    assert changes == {place: Change("link", to.encode(), 0o777)}


def test_a_hard_link_to_a_file_of_the_folder_is_a_copy(host, any_pool, folder):
    _, changes = after(any_pool, folder, "os.link('src/a.py', 'twin'); open('twin', 'a').write('A = 2\\n')")
    assert changes["twin"].data == b"A = 1\nA = 2\n"
    assert (folder / "src" / "a.py").read_text() == "A = 1\n"


def test_times_set_back_hide_nothing(host, any_pool, folder):
    code = """
    before = os.stat("src/a.py")
    open("src/a.py", "r+").write("A = 9")
    os.utime("src/a.py", ns=(before.st_atime_ns, before.st_mtime_ns))
    """

    async def go():
        async with await any_pool.acquire({}, any_pool.tree(folder)) as sandbox:
            for _ in range(2):
                assert (await sandbox.run(["python", "-c", "import os\n" + textwrap.dedent(code)])).outcome == "ok"
                assert (await sandbox.changes())["src/a.py"].data == b"A = 9\n"
                assert (await sandbox.run(["sh", "-c", "printf 'A = 1\\n' > src/a.py"])).outcome == "ok"
                assert await sandbox.changes() == {}

    asyncio.run(go())


def test_thousands_of_changes(host, any_pool, folder):
    code = "for i in range(3000): open(f'n{i}', 'w').write(str(i))"
    _, changes = after(any_pool, folder, code)
    assert len(changes) == 3000 and changes["n2999"].data == b"2999"


def test_names_that_are_more_than_an_answer_can_hold(host, any_pool, folder):
    """Also together with those that have to be taken back: the worker refuses, the host need not."""
    code = """
    import os
    os.mkdir("deep"); os.chdir("deep")
    for _ in range(20): os.mkdir(b"\\xff" * 250); os.chdir(b"\\xff" * 250)
    for i in range(390): open(f"{i}", "w")
    """

    async def go():
        async with await any_pool.acquire({}, any_pool.tree(folder)) as sandbox:
            assert (await sandbox.run(["python", "-c", textwrap.dedent(code)])).outcome == "ok"
            assert len(await sandbox.changes()) == 411
            assert (await sandbox.run(["mv", "deep", "moved"])).outcome == "ok"
            with pytest.raises(SandboxFileError, match="names of all changes are longer"):
                await sandbox.changes()
            await sandbox.run(["rm", "-r", "moved"])
            assert await sandbox.changes() == {}

    asyncio.run(go())
