"""Fixtures of tests of sandboxes: one pool with small limits, and a host that is checked for harm."""

import asyncio
import os
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from composer_jax.sandbox import LocalSandbox, LocalSandboxPool, RunResult, SandboxLimits, launcher

REPOSITORY = Path(__file__).parents[2]

LIMITS = SandboxLimits(
    timeout_s=10.0, cpu_s=5, memory_mb=256, processes=24, file_mb=8, open_files=64, workspace_mb=16, tmp_mb=8
)


@pytest.fixture(scope="session")
def pool() -> Iterator[LocalSandboxPool]:
    """Made outside any event loop and used from many: what a pool promises."""
    pool = LocalSandboxPool(LIMITS, size=4)
    yield pool
    pool.kill()


@pytest.fixture
def run_python(pool: LocalSandboxPool) -> Callable[..., RunResult]:
    """Run one Python program in a fresh sandbox and return how it ended."""

    def run(code: str, files: dict[str, str] | None = None, timeout_s: float = 10.0) -> RunResult:
        async def go() -> RunResult:
            async with await pool.acquire({"program.py": textwrap.dedent(code), **(files or {})}) as sandbox:
                result = await sandbox.run(["python", "program.py"], timeout_s=timeout_s)
                # Whatever it did, the sandbox still works for the next command.
                after = await sandbox.run(["python", "-c", "print('alive')"])
                assert (after.outcome, after.stdout) == ("ok", "alive\n"), after
                return result

        return asyncio.run(go())

    return run


def zygote_of(pool: LocalSandboxPool) -> int:
    """Pid of the zygote: the only process below the launcher whose command holds the start line."""
    pid = pool.launcher_pid
    while children := Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        pid = int(children[0])
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
        if b"inside/start.py" in words and b"--clearenv" not in words:
            return pid
    raise AssertionError("no zygote")


async def contents(sandbox: LocalSandbox) -> dict[str, bytes]:
    """Every regular file of a workspace, as it is read one by one."""
    return {path: await sandbox.read(path) for path in await sandbox.list()}


OF_ENGINES = (
    "/var/lib/containers/",
    "/var/lib/docker/",
    "/run/containers/",
    "/run/docker/",
    "/run/netns",
    "/run/user/",
)
"""Where Docker and Podman mount: other tests, at the same time, for one."""


class Host:
    """Things of the host that an escape would read or break."""

    def __init__(self, folder: Path):
        self.secret = "secret-of-the-host-4711"
        self.file = folder / "secret.txt"
        self.file.write_text(self.secret)
        folder.chmod(0o755)
        self.file.chmod(0o666)  # readable and writable to every uid that can reach it
        self.process = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
        self.tcp = socket.create_server(("127.0.0.1", 0))
        self.udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.udp.bind(("127.0.0.1", 0))
        self.abstract = socket.socket(socket.AF_UNIX)
        self.abstract_name = f"composer-test-{os.getpid()}"
        self.abstract.bind(f"\0{self.abstract_name}")
        self.abstract.listen()
        self.listeners = (self.tcp, self.udp, self.abstract)
        for listener in self.listeners:
            listener.setblocking(False)
        self.before = self.state()

    def state(self) -> tuple:
        """What must be the same after an attack."""
        lines = Path("/proc/self/mounts").read_text().splitlines()
        mounts = [line for line in lines if not line.split()[1].startswith(OF_ENGINES)]
        return self.file.read_text(), self.file.stat().st_mode, os.uname().nodename, mounts, os.getuid()

    def check(self) -> None:
        """Asserts that no file changed, no connection came, and the neighbour process lives."""
        assert self.state() == self.before
        assert self.process.poll() is None
        for listener in self.listeners:
            with pytest.raises(BlockingIOError):
                listener.recv(1) if listener is self.udp else listener.accept()

    def close(self) -> None:
        """Free what it holds."""
        self.process.communicate()
        for listener in self.listeners:
            listener.close()


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    """A host to attack, checked for harm after the test."""
    for folder in (tmp_path.parent, tmp_path.parent.parent):
        folder.chmod(0o755)  # only the sandbox may stand between the attack and the file
    monkeypatch.setenv("COMPOSER_TEST_SECRET", "secret-of-the-environment")
    host = Host(tmp_path)
    yield host
    try:
        host.check()
    finally:
        host.close()


class Trace:
    """A number of seconds to sleep that no other process of this machine has on its command line."""

    def __init__(self, text: str):
        self.text = text

    def processes(self) -> list[int]:
        """Pids on the host that have it there."""
        return self._pids(lambda line: self.text.encode() in line)

    def _pids(self, matches: Callable[[bytes], bool]) -> list[int]:
        found = []
        for folder in Path("/proc").iterdir():
            try:
                if folder.name.isdigit() and matches((folder / "cmdline").read_bytes()):
                    found.append(int(folder.name))
            except OSError:  # it has ended
                pass
        return found

    async def wait_until_sleeping(self, count: int = 1) -> list[int]:
        """Returns the pids of so many `sleep TEXT`, which are neither about to start nor a shell that starts them."""
        deadline = time.monotonic() + 30
        while len(found := self._pids(f"sleep\0{self.text}\0".encode().__eq__)) < count:
            assert time.monotonic() < deadline, self.processes()
            await asyncio.sleep(0.01)
        return found

    def wait_until_gone(self) -> None:
        """No such process may be left after ten seconds."""
        deadline = time.monotonic() + 10
        while left := self.processes():
            assert time.monotonic() < deadline, left
            time.sleep(0.02)


@pytest.fixture
def trace() -> Trace:
    """A fresh one."""
    return Trace(f"4711.{os.getpid()}{time.monotonic_ns()}")


def as_another_user(script: str) -> str:
    """Runs a Python script as an ordinary user, whose uid is its first argument, and returns what it printed.

    As root, it changes to such a user, with a mount of the files that only root can read.
    """
    if os.geteuid() != 0:
        command = [sys.executable, "-c", script, str(os.getuid())]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout
    folders = [os.path.realpath(sys.base_prefix), str(REPOSITORY), str(Path(pytest.__file__).parents[1])]
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.dup2(send, 1)
            os.dup2(send, 2)
            python, repository, packages = launcher.reachable_by(folders, 60_999)
            os.chmod("/tmp", 0o1777)
            launcher.become(60_999)
            environment = {"PYTHONPATH": f"{repository}:{packages}", "LD_LIBRARY_PATH": f"{python}/lib"}
            version = f"python{sys.version_info.major}.{sys.version_info.minor}"
            command = [f"{python}/bin/{version}", "-B", "-S", "-c", script, "60999"]
            os.execve(command[0], command, environment)
        finally:
            os._exit(99)
    os.close(send)
    with open(receive) as output:
        printed = output.read()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, printed
    return printed


@pytest.fixture
def folder(tmp_path) -> Path:
    """A small repository with everything that is special about files."""
    folder = tmp_path / "repository"
    (folder / "package" / "deep").mkdir(parents=True)
    (folder / "package" / "code.py").write_text("print('pristine')\n")
    (folder / "package" / "deep" / "data.bin").write_bytes(bytes(range(256)))
    (folder / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (folder / "run.sh").chmod(0o700)
    (folder / "closed.txt").write_text("for its owner")
    (folder / "closed.txt").chmod(0o400)
    (folder / "link.py").symlink_to("package/code.py")
    os.mkfifo(folder / "pipe")
    return folder
