"""Sandboxes in containers."""

import asyncio
import os
import subprocess
import sys

import pytest

from composer_jax.errors import UserError
from composer_jax.sandbox import GONE, Change, SandboxDied, SandboxFileError, SandboxLimits
from composer_jax.sandbox.container_pool import ContainerPool
from composer_jax.sandbox.engine import OWNER, ContainerEngine, find_engine


def in_container(engine, use, limits=None, **more):
    """Runs `use(sandbox)` with a fresh container."""

    async def go():
        limits_ = limits or SandboxLimits(timeout_s=20, memory_mb=64, processes=32)
        async with ContainerPool(engine.image, limits_, engine=engine, workspace="/workspace") as pool:
            tree = pool.tree(more.pop("tree", None))
            tests = pool.tree(more.pop("tests", None))
            async with await pool.acquire(more.pop("files", {}), tree, tests=tests, **more) as sandbox:
                return await use(sandbox)

    return asyncio.run(go())


def test_commands_say_how_they_ended(engine):
    async def use(sandbox):
        return [
            await sandbox.run(["sh", "-c", "cat; echo two >&2; exit 3"], stdin=b"one"),
            await sandbox.run(["true"]),
            await sandbox.run([]),
        ]

    mixed, fine, nothing = in_container(engine, use)
    assert (mixed.outcome, mixed.exit_code, mixed.stdout, mixed.stderr) == ("nonzero", 3, "one", "two\n")
    assert (fine.outcome, fine.exit_code) == ("ok", 0)
    assert (nothing.outcome, nothing.exit_code) == ("nonzero", 126)


def test_a_timeout_ends_everything_inside(engine):
    async def use(sandbox):
        late = await sandbox.run(["sh", "-c", "setsid sleep 1000 & sleep 1000"], timeout_s=0.5)
        left = await sandbox.run(["sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"])
        return late, left

    late, left = in_container(engine, use)
    assert (late.outcome, late.exit_code) == ("timeout", 124)
    assert late.seconds < 15
    assert "sleep 1000" not in left.stdout


def test_what_a_command_leaves_behind_is_killed_even_if_it_kills_who_watches(engine):
    async def use(sandbox):
        # kill -9 -1 spares only the one that calls it: the watching shell dies, the caller goes on.
        await sandbox.run(["sh", "-c", "kill -9 -1; sleep 1; echo > /workspace/alive; sleep 500"], timeout_s=5)
        return await sandbox.run(["sh", "-c", "cat /proc/[0-9]*/cmdline"])

    assert "sleep500" not in in_container(engine, use).stdout.replace("\0", "")


def test_memory_and_output_are_limited(engine):
    async def use(sandbox):
        return (
            await sandbox.run(["sh", "-c", "dd if=/dev/zero bs=300M count=1 | wc -c"]),
            await sandbox.run(["sh", "-c", "dd if=/dev/zero bs=1M count=3 2>/dev/null; echo end"]),
        )

    large, long = in_container(engine, use)
    assert large.outcome in ("out_of_memory", "ok") and "314572800" not in large.stdout
    assert long.truncated_bytes == 3 * 2**20 + 4 - 64 * 1024
    assert long.stdout.endswith("end\n")


def test_there_is_no_network_and_no_capability(engine):
    async def use(sandbox):
        return await sandbox.run(["sh", "-c", "cat /proc/net/dev /proc/self/status; ls /"])

    output = in_container(engine, use).stdout
    assert "eth0" not in output and "lo:" in output
    assert "CapEff:\t0000000000000000" in output and "CapBnd:\t0000000000000000" in output
    assert "NoNewPrivs:\t1" in output


def test_capabilities_are_those_that_were_asked_for(engine):
    async def go():
        limits = SandboxLimits(timeout_s=20, memory_mb=64, processes=32)
        async with ContainerPool(engine.image, limits, engine=engine, linux_capabilities=("KILL", "SETUID")) as pool:
            async with await pool.acquire({}) as sandbox:
                return await sandbox.run(["cat", "/proc/self/status"])

    assert "CapEff:\t00000000000000a0" in asyncio.run(go()).stdout  # bits 5 and 7


def test_changes_are_told_and_can_be_laid_on_another_container(engine):
    command = """
    echo new > kept; rm doomed; rm -r old; mkdir deep empty; echo x > 'deep/a b'; chmod 755 'deep/a b'
    ln -s kept link; echo commit > .git/later-commits; echo same > laid
    """

    async def change(sandbox):
        before = await sandbox.changes()
        await sandbox.run(["sh", "-c", command])
        return before, await sandbox.changes()

    before, changes = in_container(engine, change)
    assert before == {}
    assert changes == {
        ".git/later-commits": Change("file", b"commit\n"),
        "deep": Change("folder", mode=0o755),
        "deep/a b": Change("file", b"x\n", 0o755),
        "doomed": GONE,
        "empty": Change("folder", mode=0o755),
        "kept": Change("file", b"new\n"),
        "laid": Change("file", b"same\n"),
        "link": Change("link", b"kept", 0o777),
        "old": GONE,
    }

    async def lay(sandbox):
        await sandbox.apply(changes)
        return await sandbox.changes()

    assert in_container(engine, lay) == changes


def test_a_tree_is_what_changes_are_told_against(engine, tmp_path):
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg/a.py").write_text("a\n")
    (tmp_path / "pkg/b.py").write_text("b\n")
    (tmp_path / "kept").write_text("from the tree\n")

    async def use(sandbox):
        first = await sandbox.changes()
        await sandbox.run(["sh", "-c", "rm pkg/a.py; echo c > pkg/b.py"])
        return first, await sandbox.read("kept"), await sandbox.changes()

    first, kept, changes = in_container(engine, use, tree=tmp_path, files={"given": "file\n"})
    assert first == {"given": Change("file", b"file\n")}
    assert kept == b"from the tree\n"
    assert changes == {**first, "pkg/a.py": GONE, "pkg/b.py": Change("file", b"c\n")}


def test_tests_are_shown_to_the_one_that_grades(engine, tmp_path):
    (tmp_path / "test.sh").write_text("echo 1 > /logs/verifier/reward.txt\n")

    async def use(sandbox):
        result = await sandbox.run(["sh", "/tests/test.sh"])
        return result, await sandbox.read("/logs/verifier/reward.txt")

    result, reward = in_container(engine, use, tests=tmp_path)
    assert (result.outcome, reward) == ("ok", b"1\n")

    async def look(sandbox):
        return await sandbox.run(["ls", "/tests"])

    assert in_container(engine, look).outcome == "nonzero"


def test_failed_file_operations_raise_with_a_reason(engine):
    async def use(sandbox):
        for path in ("../out", "/etc/passwd", ""):
            with pytest.raises(SandboxFileError, match="not a path in the workspace"):
                await sandbox.write(path, "x")
        with pytest.raises(SandboxFileError, match="nowhere cannot be read"):
            await sandbox.read("nowhere")
        await sandbox.write("deep/er/file", b"\0\xff")
        assert await sandbox.read("deep/er/file") == b"\0\xff"
        await sandbox.run(["touch", "line\nbreak"])
        assert "line\nbreak" not in await sandbox.changes()

    in_container(engine, use)


def test_a_container_that_dies_is_not_a_failed_command(engine):
    async def use(sandbox):
        engine.call("rm", "--force", sandbox.name)
        with pytest.raises(SandboxDied, match="died"):
            await sandbox.run(["true"])
        await sandbox.close()
        with pytest.raises(SandboxDied, match="it was closed"):
            await sandbox.run(["true"])

    in_container(engine, use)


def test_a_pool_hands_out_as_many_as_it_may_and_leaves_none(engine):
    async def go():
        pool = ContainerPool(engine.image, size=1, engine=engine, workspace="/workspace")
        first = await pool.acquire({})
        second = asyncio.ensure_future(pool.acquire({}))
        await asyncio.sleep(0)
        assert not second.done()
        await first.close()
        await (await second).run(["true"])
        await pool.close()
        return {first.name, second.result().name}

    names = asyncio.run(go())
    assert not names & set(engine.call("ps", "--all", "--format", "{{.Names}}").stdout.split())


def test_containers_of_a_crashed_owner_are_removed(engine):
    script = (
        "import asyncio, os, sys\n"
        "from composer_jax.sandbox.container_pool import ContainerPool\n"
        "from composer_jax.sandbox.engine import ContainerEngine\n"
        "pool = ContainerPool(sys.argv[1], engine=ContainerEngine(sys.argv[2]), workspace='/workspace')\n"
        "print(asyncio.run(pool.acquire({})).name, flush=True)\n"
        "os._exit(1)\n"
    )
    crashed = subprocess.run(
        [sys.executable, "-c", script, engine.image, engine.command], capture_output=True, text=True
    )
    name = crashed.stdout.strip()
    listed = ["ps", "--all", "--filter", f"label={OWNER}", "--format", "{{.Names}}"]
    assert name and name in engine.call(*listed).stdout.split(), crashed.stderr

    async def go():
        async with ContainerPool(engine.image, engine=engine, workspace="/workspace") as pool:
            async with await pool.acquire({}) as mine:
                assert name not in engine.call(*listed).stdout.split()
                assert engine.remove_leftovers() == 0
                assert (await mine.run(["true"])).outcome == "ok"

    asyncio.run(go())


def test_an_image_is_built_of_a_folder(engine, tmp_path):
    (tmp_path / "Dockerfile").write_text(f"FROM {engine.image}\nCOPY hello /workspace/hello\nWORKDIR /workspace\n")
    (tmp_path / "hello").write_text("hello")
    engine.build(tmp_path, "localhost/composer-jax-test-built")
    try:
        assert engine.working_folder("localhost/composer-jax-test-built") == "/workspace"
    finally:
        engine.call("rmi", "--force", "localhost/composer-jax-test-built")
    (tmp_path / "Dockerfile").write_text(f"FROM {engine.image}\nCOPY missing /\n")
    with pytest.raises(UserError, match="cannot be built"):
        engine.build(tmp_path, "localhost/composer-jax-test-built")


def test_without_an_engine_one_sentence_says_what_is_missing(tmp_path, monkeypatch):
    broken = tmp_path / "docker"
    broken.write_text("#!/bin/sh\necho first >&2; echo 'the daemon is not running' >&2; exit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}")
    with pytest.raises(UserError) as raised:
        find_engine()
    assert str(raised.value) == (
        "tasks with a container image need Docker or Podman: docker does not work (the daemon is not running); "
        "podman is not installed"
    )


def test_the_command_line_gives_a_container_no_more_than_it_needs(tmp_path):
    """What an engine is asked for, from one that writes it down: this holds where there is no engine, too."""
    recorder = tmp_path / "docker"
    recorder.write_text('#!/bin/sh\necho "$@" >> "$0.log"\n[ "$1" = inspect ] && echo true\nexit 0\n')
    recorder.chmod(0o755)

    async def go(network):
        pool = ContainerPool(
            "image", SandboxLimits(memory_mb=128, processes=9), engine=ContainerEngine(str(recorder)), cpus=2
        )
        async with await pool.acquire({}, network=network):
            pass

    asyncio.run(go(False))
    asyncio.run(go(True))
    lines = (tmp_path / "docker.log").read_text().splitlines()
    closed, opened = (line for line in lines if line.startswith("run "))
    for words in ("--cap-drop ALL", "no-new-privileges", "--memory 128m", "--pids-limit 9", "--cpus 2", "--pull never"):
        assert words in closed and words in opened
    assert f"{OWNER}=" in closed and str(os.getpid()) in closed
    assert "--network none" in closed and "--network" not in opened
    for line in (closed, opened):
        assert not any(word in line for word in ("--volume", "-v ", "--mount", "--privileged"))
    assert sum(line.startswith("rm --force") for line in lines) == 2


@pytest.fixture
def changed_here(tmp_path):
    """A call for `changes` of a workspace of this machine, whose engine runs find, stat and tar where they are."""
    (workspace := tmp_path / "workspace").mkdir()
    program = tmp_path / "docker"
    program.write_text(
        "#!/bin/sh\n"
        'case "$1:$6" in\n'
        'diff:*) cat "$0.diff" ;;\n'
        'exec:find | exec:xargs) echo "$@" >> "$0.log"; cd "$4"; shift 5; exec "$@" ;;\n'
        "inspect:*) echo true ;;\n"
        "esac\n"
    )
    program.chmod(0o755)

    def changes(files, tree=None):
        for name, content in files.items():
            (workspace / name).write_bytes(content)
        (tmp_path / "docker.diff").write_text("".join(f"A {workspace}/{name}\n" for name in files))

        async def go():
            limits = SandboxLimits(workspace_mb=1)
            async with ContainerPool(
                "image", limits, engine=ContainerEngine(str(program)), workspace=str(workspace)
            ) as pool:
                sandbox = await pool.acquire({})
                sandbox._tree = tree  # as acquire() would set it, without the copy that this fake engine cannot make
                return await sandbox.changes()

        return asyncio.run(go())

    return changes


def test_changes_up_to_the_limit_are_told_whole(changed_here):
    files = {f"{number:0200}": bytes([number]) * 6000 for number in range(170)}  # in several calls
    assert changed_here(files) == {name: Change("file", content) for name, content in files.items()}


def test_changes_are_limited_together_and_before_they_are_packed(changed_here, tmp_path):
    with pytest.raises(SandboxFileError, match="the changes are more than 1 MiB"):
        changed_here({f"{number:0200}": bytes(9000) for number in range(160)})
    for path in (tmp_path / "workspace").iterdir():
        path.unlink()
    (tmp_path / "docker.log").unlink()
    with pytest.raises(SandboxFileError, match="the changes are more than 1 MiB"):
        changed_here({"large": bytes(3 << 20)})
    assert " stat " in (output := (tmp_path / "docker.log").read_text()) and " tar " not in output


def test_a_listing_that_was_cut_reports_nothing_as_gone(changed_here, tmp_path):
    with pytest.raises(SandboxFileError, match="too many files"):
        changed_here({f"{number:0240}": b"" for number in range(4500)}, tmp_path / "workspace")


@pytest.mark.parametrize("place", ["VOLUME /workspace", "VOLUME /workspace/old", "VOLUME /"])
def test_a_workspace_in_a_volume_is_refused(engine, tmp_path, place):
    (tmp_path / "Dockerfile").write_text(f"FROM {engine.image}\n{place}\n")
    image = f"{engine.image}-volume"
    engine.build(tmp_path, image)
    try:
        with pytest.raises(UserError, match="in a volume, where changes of the workspace /workspace cannot be seen"):
            ContainerPool(image, engine=engine, workspace="/workspace")
    finally:
        engine.call("rmi", "--force", image)


def test_a_workspace_behind_a_link_is_where_the_link_leads(engine, tmp_path):
    (tmp_path / "Dockerfile").write_text(f"FROM {engine.image}\nRUN ln -s /workspace /tmp/link\nWORKDIR /tmp/link/\n")
    image = f"{engine.image}-link"
    engine.build(tmp_path, image)

    async def go():
        async with ContainerPool(image, SandboxLimits(timeout_s=20, memory_mb=64), engine=engine) as pool:
            async with await pool.acquire({}) as sandbox:
                await sandbox.run(["sh", "-c", "echo new > kept"])
                return pool.workspace, await sandbox.changes()

    try:
        assert asyncio.run(go()) == ("/workspace", {"kept": Change("file", b"new\n")})
    finally:
        engine.call("rmi", "--force", image)
