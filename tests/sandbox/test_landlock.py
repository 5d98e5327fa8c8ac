"""Attacks from inside a sandbox of the landlock backend, and the limits that it holds by looking.

Each attack must fail, and the host must not notice (fixture `host` checks that). What it shares with bubblewrap is in
test_sandbox.py.
"""

import asyncio
import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest

from composer_jax.sandbox import LocalSandboxPool, SandboxDied, SandboxFileError, SandboxLimits
from composer_jax.sandbox.inside import disk, landlock, processes, quota
from tests.sandbox.fixtures import LIMITS, REPOSITORY, as_another_user, contents


@pytest.fixture(scope="module")
def pool():
    pool = LocalSandboxPool(LIMITS, size=4, backend="landlock")
    yield pool
    pool.kill()


def others(pool: LocalSandboxPool) -> list[int]:
    """Pids that no command may reach: this process, the launcher, zygote, supervisors and workers."""
    launcher = pool._spawner._process.pid
    return [os.getpid(), launcher, *processes.descendants(launcher)]


ATTEMPT = """
import ctypes, errno, os, signal, socket, subprocess, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def attempt(what, call):
    try: result = call()
    except (OSError, subprocess.SubprocessError): return
    print("DID", what, result)
def fails(what, *arguments):
    if libc.syscall(*arguments) != -1: print("DID", what)
def descriptor_of(pid):
    try: return os.pidfd_open(pid)
    except ProcessLookupError: return -1  # the sandbox of the test before has ended now
"""


@pytest.fixture
def attack(run_python):
    """Runs a program that must end well and have nothing to say."""

    def run(code: str, files: dict[str, str] | None = None) -> None:
        result = run_python(ATTEMPT + textwrap.dedent(code), files)
        assert (result.outcome, result.stdout, result.stderr) == ("ok", "", ""), result

    return run


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
    """Both have the same uid, and the attacker is told the paths."""

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


def test_network_and_other_sockets(host, attack):
    attack(f"""
    tcp, udp = {host.tcp.getsockname()!r}, {host.udp.getsockname()!r}
    attempt("tcp", lambda: socket.create_connection(tcp, 1))
    attempt("udp", lambda: socket.socket(type=socket.SOCK_DGRAM).sendto(b"x", udp))
    attempt("abstract", lambda: socket.socket(socket.AF_UNIX).connect("\\0{host.abstract_name}"))
    attempt("server", lambda: socket.create_server(("127.0.0.1", 0)))
    for family in range(64):
        for kind in (1, 2, 3, 5):
            attempt((family, kind), lambda: socket.socket(family, kind, 0))
            if (family, kind) not in ((1, 1), (1, 5)):
                attempt(("pair", family, kind), lambda: socket.socketpair(family, kind))
    for kind in (1, 5):
        one, other = socket.socketpair(socket.AF_UNIX, kind)
        for call in (lambda: one.connect("\\0{host.abstract_name}"), lambda: one.bind("socket"), lambda: one.listen()):
            attempt(("connected", kind), call)
        try: one.sendto(b"x", "\\0{host.abstract_name}")  # packets go to the other end, whatever address they have
        except OSError: one.sendall(b"x")
        assert other.recv(1) == b"x"
    """)


def test_a_unix_socket_of_the_host_by_its_path(host, attack):
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as server:
        os.chmod(folder, 0o755)
        path = f"{folder}/socket"
        server.bind(path)
        os.chmod(path, 0o777)
        server.listen()
        server.setblocking(False)
        attack(f"""
        attempt("stream", lambda: socket.socket(socket.AF_UNIX).connect({path!r}))
        attempt("pair", lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b"x", {path!r}))
        """)
        with pytest.raises(BlockingIOError):
            server.accept()


@pytest.mark.skipif(
    landlock.abi_version() < landlock.SIGNAL_SCOPE_ABI, reason="this kernel's Landlock does not confine signals"
)
def test_signals_to_the_host_and_to_the_worker(host, pool, run_python):
    reached = [host.process.pid, *others(pool)]
    code = f"""
    import fcntl
    r, w = os.pipe()
    for pid in [os.getppid(), *{reached!r}]:
        for number in (0, signal.SIGTERM, signal.SIGSTOP, signal.SIGKILL):
            attempt(pid, lambda: os.kill(pid, number))
            descriptor = descriptor_of(pid)
            attempt(pid, lambda: signal.pidfd_send_signal(descriptor, number))
            if descriptor != -1: os.close(descriptor)
        attempt(pid, lambda: os.killpg(pid, 9))
        try: fcntl.fcntl(r, fcntl.F_SETOWN, pid); fcntl.fcntl(r, 10, 9); fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC)
        except OSError: pass
        os.write(w, b"x")
    print("still here", flush=True)
    os.kill(-1, 9)
    """
    result = run_python(ATTEMPT + textwrap.dedent(code))
    assert result.stdout == "still here\n", result
    assert set(others(pool)) >= {os.getpid(), pool._spawner._process.pid}


def test_trace_and_look_into_other_processes(host, pool, attack):
    reached = [host.process.pid, *others(pool)]
    attack(f"""
    class IOVec(ctypes.Structure): _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]
    buffer = ctypes.create_string_buffer(64)
    vector = IOVec(ctypes.addressof(buffer), 64)
    for pid in [os.getppid(), *{reached!r}]:
        for request in (16, 0x4206):  # attach, seize
            if libc.ptrace(request, pid, 0, 0) != -1: print("DID ptrace", pid)
        if libc.process_vm_readv(pid, ctypes.byref(vector), 1, ctypes.byref(vector), 1, 0) != -1: print("DID read", pid)
        fails("pidfd_getfd", 438, descriptor_of(pid), 3, 0)
        for name in ("mem", "environ", "maps", "cmdline", "status", "stat", "syscall", "io", "task", "fd", "net/tcp"):
            attempt((pid, name), lambda: os.open(f"/proc/{{pid}}/{{name}}", os.O_RDONLY))
        attempt((pid, "mem"), lambda: os.open(f"/proc/{{pid}}/mem", os.O_RDWR))
        attempt((pid, "fds"), lambda: os.open(f"/proc/{{pid}}/fd/3", os.O_RDWR))
        for name in ("cwd", "root", "exe"):
            attempt((pid, name), lambda: os.readlink(f"/proc/{{pid}}/{{name}}"))
    """)


def test_starve_other_processes(host, pool, attack):
    reached = [host.process.pid, *others(pool)]
    before = os.sched_getaffinity(host.process.pid), os.getpriority(os.PRIO_PROCESS, host.process.pid)
    attack(f"""
    import platform, resource
    for pid in [os.getppid(), *{reached!r}]:
        for call in (lambda: resource.prlimit(pid, resource.RLIMIT_NOFILE, (0, 0)),
                     lambda: os.setpriority(os.PRIO_PROCESS, pid, 19), lambda: os.setpriority(os.PRIO_PGRP, pid, 19),
                     lambda: os.setpriority(os.PRIO_USER, 0, 19), lambda: os.sched_setaffinity(pid, {{0}}),
                     lambda: os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0)),
                     lambda: open(f"/proc/{{pid}}/oom_score_adj", "w"), lambda: open(f"/proc/{{pid}}/comm", "w")):
            attempt(pid, call)
        fails("ioprio_set", {{"x86_64": 251, "aarch64": 30}}[platform.machine()], 1, pid, 3 << 13)
    os.nice(1); os.sched_setaffinity(0, os.sched_getaffinity(0))  # on oneself it is allowed
    """)
    assert before == (os.sched_getaffinity(host.process.pid), os.getpriority(os.PRIO_PROCESS, host.process.pid))


def test_mounts_namespaces_and_roots(host, attack):
    attack("""
    for what, result in (("mount", libc.mount(b"none", b".", b"tmpfs", 0, None)),
                         ("bind", libc.mount(b"/", b".", None, 4096, None)),
                         ("umount", libc.umount2(b"/proc", 2)), ("chroot", libc.chroot(b"."))):
        if result != -1: print("DID", what)
    for flag in (0x10000000, 0x20000, 0x20000000, 0x40000000, 0x4000000, 0x8000000, 0x2000000, 0x10020000, 0x80):
        if libc.unshare(flag) != -1: print("DID unshare", flag)
    import platform
    fails("clone", {"x86_64": 56, "aarch64": 220}[platform.machine()], 0x10000000 | 17, 0, 0, 0, 0)
    fails("clone3", 435, ctypes.create_string_buffer(88), 88)
    fails("open_tree", 428, -100, b"/", 1)
    """)


def test_become_root(host, attack):
    attack("""
    import glob, stat
    for call in (lambda: os.setuid(0), lambda: os.setgid(0), lambda: os.setgroups([0]), lambda: os.setreuid(0, 0)):
        attempt("root", call)
    with open("id", "wb") as file: file.write(open("/usr/bin/id", "rb").read())
    os.chmod("id", 0o6755)
    assert subprocess.run(["./id", "-u"], capture_output=True, text=True).stdout == f"{os.getuid()}\\n"
    for path in glob.glob("/usr/bin/*") + glob.glob("/usr/sbin/*"):
        if os.path.exists(path) and os.stat(path).st_mode & stat.S_ISUID:  # su, passwd, ...: none may gain anything
            subprocess.run([path, "-c", "id -u > won"], stdin=subprocess.DEVNULL, capture_output=True, timeout=5)
    if os.path.exists("won"): print("WON", open("won").read())
    """)


def test_keys_and_other_denied_calls(host, attack):
    attack("""
    import platform
    calls = {"x86_64": [248, 249, 250, 298, 304, 321, 323, 425, 175, 169, 246, 103, 135, 443, 300, 254, 92, 188, 437],
             "aarch64": [217, 218, 219, 241, 265, 280, 282, 425, 105, 142, 104, 116, 92, 443, 262, 27, 54, 5, 437]}
    for number in calls[platform.machine()]:
        ctypes.set_errno(0)
        fails(number, number, 0, 0, 0, 0, 0)
        if ctypes.get_errno() not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS): print("DID", number)
    """)


def test_shared_memory_and_queues_of_the_host(host, attack):
    libc = ctypes.CDLL(None, use_errno=True)
    memory, queue = libc.shmget(0, 4096, 0o1666), libc.msgget(0, 0o1666)
    assert memory >= 0 and queue >= 0
    try:
        attack(f"""
        libc.shmat.restype = ctypes.c_ssize_t
        if libc.shmat({memory}, None, 0) != -1: print("DID shmat")
        if libc.shmctl({memory}, 2, ctypes.create_string_buffer(256)) != -1: print("DID shmctl")
        if libc.msgsnd({queue}, ctypes.create_string_buffer(b"\\1" + bytes(15)), 1, 0o4000) != -1: print("DID msgsnd")
        for made in (libc.shmget(0, 4096, 0o1666), libc.msgget(0, 0o1666), libc.semget(0, 1, 0o1666)):
            if made != -1: print("DID make", made)
        if libc.mq_open(b"/composer", os.O_CREAT | os.O_RDWR, 0o600, None) != -1: print("DID mq_open")
        """)
    finally:
        libc.shmctl(memory, 0, None)
        libc.msgctl(queue, 0, None)


def test_forge_an_answer(host, run_python):
    code = """
    import json, os, struct
    text = {"outcome": "ok", "exit_code": 0, "seconds": 0, "pieces": [0, 0, 0, 0], "dropped": [0, 0]}
    text = json.dumps(text).encode()
    for fd in range(3, 4096):
        try: os.write(fd, struct.pack("<II", len(text), 0) + text); print("WROTE", fd)
        except OSError: pass
    raise SystemExit(5)
    """
    result = run_python(code)
    assert (result.outcome, result.exit_code, result.stdout) == ("nonzero", 5, ""), result


DAEMON = """
import os, signal, time
if os.fork(): {parent}
os.setsid()
if os.fork(): os._exit(0)
for number in range(1, 32):
    try: signal.signal(number, signal.SIG_IGN)
    except OSError: pass
while True:
    open("beat", "a").write("x")
    if os.fork(): os._exit(0)  # never the same process for long
    time.sleep(0.03)
"""


@pytest.mark.parametrize("parent", ["os._exit(0)", "time.sleep(60)"])
def test_a_daemon_that_evades_the_end(host, pool, parent):
    async def go():
        async with await pool.acquire({"d.py": DAEMON.format(parent=parent)}) as sandbox:
            result = await sandbox.run(["python", "d.py"], timeout_s=0.3)
            assert result.outcome == ("timeout" if "sleep" in parent else "ok") and result.seconds < 5
            sizes = [
                (await sandbox.run(["sh", "-c", "test -e beat && wc -c < beat || echo 0"])).stdout for _ in range(5)
            ]
            assert len(set(sizes)) == 1

    asyncio.run(go())


def test_nothing_is_left_when_a_sandbox_is_closed_or_its_worker_is_killed(host, pool, trace):
    async def go(end):
        sandbox = await pool.acquire({})
        script = f"(setsid sleep {trace.text} &); nohup sleep {trace.text} & exec sleep {trace.text}"
        run = asyncio.create_task(sandbox.run(["sh", "-c", script]))
        while len(trace.processes()) < 3:
            await asyncio.sleep(0.01)
        await end(sandbox)
        with pytest.raises(SandboxDied):
            await run

    async def close(sandbox):
        await sandbox.close()

    async def kill(_):
        for process in trace.processes():
            parent = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
            if b"start.py" in Path(f"/proc/{parent}/cmdline").read_bytes():
                os.kill(parent, signal.SIGKILL)
                return

    for end in (close, kill):
        asyncio.run(go(end))
        trace.wait_until_gone()


@pytest.mark.parametrize("who", ["zygote", "supervisor", "launcher", "owner"])
def test_nothing_is_left_when_what_watches_a_sandbox_is_killed(trace, who, tmp_path):
    code = f"""
    import asyncio, os, signal, sys
    from composer_jax.sandbox import LocalSandboxPool
    from composer_jax.sandbox.inside import processes
    async def main():
        pool = LocalSandboxPool(size=1, backend="landlock")
        sandbox = await pool.acquire({{}})
        script = "setsid sleep {trace.text} & exec sleep {trace.text}"
        task = asyncio.create_task(sandbox.run(["sh", "-c", script]))
        launcher = pool._spawner._process.pid
        read = lambda pid, name: open(f"/proc/{{pid}}/{{name}}", "rb").read()
        def is_one(pid):
            try: return read(pid, "cmdline").split(b"\\0")[:2] == [b"sleep", b"{trace.text}"]
            except OSError: return False  # it has ended
        while len(sleeping := [pid for pid in processes.descendants(launcher) if is_one(pid)]) < 2:
            await asyncio.sleep(0.01)
        above = [sleeping[0]]
        while above[-1] != launcher: above.append(int(read(above[-1], "stat").rpartition(b")")[2].split()[1]))
        *_, supervisor, zygote, _ = above
        print("started", flush=True)
        os.kill({{"zygote": zygote, "supervisor": supervisor, "launcher": launcher, "owner": os.getpid()}}[{who!r}], 9)
        try: await task
        except Exception as error: print(type(error).__name__)
        await pool.close()
    asyncio.run(main())
    """
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    for folder in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        folder.chmod(0o755)
    script = [sys.executable, "-c", textwrap.dedent(code)]
    owner = subprocess.run(script, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=60)
    assert owner.stdout == ("started\n" if who == "owner" else "started\nSandboxDied\n"), owner.stderr
    trace.wait_until_gone()
    deadline = time.monotonic() + 10
    while who != "launcher" and list(tmp_path.glob("composer-sandboxes-*")):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_modes_and_times_of_its_own_files_can_be_changed_in_every_way(pool):
    """The supervisor does it; nobody may be able to tell."""
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


def test_processes_are_limited(host, pool, run_python):
    patient = "import os, time\nfor _ in range(10_000):\n    if os.fork() == 0: time.sleep(30); os._exit(0)"
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    threads = "import threading, time\nthreading.stack_size(65536)\n"
    threads += "for n in range(9999): threading.Thread(target=time.sleep, args=(30,), daemon=True).start()"
    for code in (patient, bomb, threads):
        result = run_python(code)
        assert result.outcome == "nonzero", result
        if code is not bomb:  # a bomb may end without a word
            words = f"there were more than {pool.limits.processes} processes and threads at once\n"
            # Whoever is faster than two looks meets the kernel's limit for the user.
            assert result.stderr.endswith((words, "Resource temporarily unavailable\n", "can't start new thread\n"))
    few = "import os, time\nfor _ in range(3):\n    if os.fork() == 0: time.sleep(0.2); os._exit(0)\ntime.sleep(0.2)"
    assert run_python(few).outcome == "ok"


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("for n in range(40): open(str(n), 'wb').write(bytes(1 << 20))", "the workspace holds more than the 16 MiB"),
        ("import os\nfor n in range(2200): open(os.environ['TMPDIR'] + f'/{n}', 'w')",
         "the folder for temporary files holds more files"),
        ("import tempfile\nfor n in range(12): tempfile.NamedTemporaryFile(delete=False).write(bytes(1 << 20))",
         "the folder for temporary files holds more than the 8 MiB"),
        ("import os, time\nfor n in range(40): open(str(n), 'wb').write(bytes(1 << 20))\ntime.sleep(60)",
         "the workspace holds more than the 16 MiB"),
        ("import os\nos.mkdir('d')\nfor n in range(40): open(f'd/{n}', 'wb').write(bytes(1 << 20))\nos.chmod('d', 0)",
         "the workspace holds more than the 16 MiB"),
    ],
)  # fmt: skip
def test_disk_is_limited_by_looking(pool, code, says):
    async def go():
        async with await pool.acquire({}) as sandbox:
            result = await sandbox.run(["python", "-c", code])
            assert result.outcome == "nonzero" and result.exit_code != 0 and result.seconds < 8
            assert result.stderr.startswith("the sandbox's limit is passed: " + says), result
            # Whoever takes something away is not blamed for what is left.
            freed = await sandbox.run(["sh", "-c", "chmod 700 d; rm -rf 0 1 d/0; true"])
            assert freed.outcome == "ok", freed
            assert (await sandbox.run(["sh", "-c", 'rm -rf * "$TMPDIR"/*'])).outcome == "ok"
            assert (await sandbox.run(["sh", "-c", "echo x > y"])).outcome == "ok"

    asyncio.run(go())


def test_the_file_tools_have_the_limit_of_the_workspace(pool):
    async def go():
        async with await pool.acquire({}) as sandbox:
            for _ in range(5):
                await sandbox.write("same", bytes(7 << 20))  # again and again: it is no more than it was
            await sandbox.write("second", bytes(7 << 20))
            with pytest.raises(SandboxFileError, match="no space left in the workspace for third"):
                await sandbox.write("third", bytes(7 << 20))
            assert await sandbox.list() == ["same", "second"]
            await sandbox.delete("same")
            await sandbox.write("third", bytes(7 << 20))

    asyncio.run(go())


def test_folders_that_resist_are_removed(tmp_path):
    folder = tmp_path / "root"
    folder.mkdir()
    here = os.open(folder, os.O_RDONLY)
    for _ in range(1200):  # deeper than any recursion reaches
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.mkfifo("fifo", dir_fd=here)
    os.symlink("/", "link", dir_fd=here)
    os.close(here)
    closed = folder / "closed"
    closed.mkdir()
    (closed / "file").write_bytes(bytes(4096))
    closed.chmod(0)
    held = disk.disk_usage(str(folder))
    assert held.too_deep and held.entries < 1000 and held.size >= 4096
    disk.remove_contents(str(folder))
    assert list(folder.iterdir()) == []


CLOSING = """
import os, sys, tempfile
from composer_jax.sandbox.inside import disk, quota
root = tempfile.mkdtemp()
os.makedirs(f"{root}/a/b/c")
open(f"{root}/a/b/c/file", "wb").write(bytes(8192))
judged = quota.Folder(root, "the workspace", 1 << 20)
left, event, closing = 0, "", False
def close():
    for folder in (f"{root}/a/b/c", f"{root}/a/b", f"{root}/a", root):
        try: os.chmod(folder, 0)
        except PermissionError: pass
def watch(happens, arguments):  # as a command would, that runs at the same time
    global left, closing
    if happens == event and left and not closing:
        closing = True
        close()
        left, closing = left - 1, False
sys.addaudithook(watch)
for event in ("open", "os.chmod", "os.scandir"):
    close()
    left = 2
    held = disk.disk_usage(root)
    print(left, held.entries, held.size >= 8192, held.closed)
event, left = "open", 1_000_000
print(disk.disk_usage(root).closed, judged.check())
left = 0
print(judged.check() == "", judged.now.entries)
os.chmod(f"{root}/a/b", 0), os.chmod(root, 0)
disk.remove_contents(root)
os.rmdir(root)
"""


def test_folders_that_are_closed_during_a_look_are_counted_or_too_much():
    said = as_another_user(CLOSING).splitlines()
    assert said[:3] == ["0 4 True False"] * 3
    assert said[3:] == [
        "True the workspace holds folders that are closed whenever they are opened to be counted",
        "True 4",
    ]


def test_who_closes_its_folders_is_limited_and_does_not_end_its_sandbox(pool):
    code = """
    import os, time
    os.makedirs("a/b/c")
    end = time.monotonic() + 1.0
    for n in range(10): open(f"a/b/c/{n}", "wb").write(bytes(1 << 20))
    while time.monotonic() < end:
        for path, mode in (("a/b", 0), ("a", 0), ("a", 0o700), ("a/b", 0o700)): os.chmod(path, mode)
    os.chmod("a", 0); os.chmod(".", 0); os.chmod(os.environ["TMPDIR"], 0)
    """

    async def go():
        async with await pool.acquire({"close.py": textwrap.dedent(code)}) as sandbox:
            result = await sandbox.run(["python", "close.py"])
            assert result.outcome == "ok" or "closed whenever they are opened" in result.stderr, result
            assert (await sandbox.run(["sh", "-c", "chmod 700 a && rm -r a && echo x > $TMPDIR/y"])).outcome == "ok"
            assert await sandbox.list() == ["close.py"]

    asyncio.run(go())


def background(shell: subprocess.Popen, command: str) -> None:
    """What a shell starts as a job, once the job is done with it."""
    shell.stdin.write(f"{{ {command}; echo; exec sleep 60; }} &\n".encode())
    shell.stdin.flush()
    shell.stdout.readline()


def passes(judged: quota.Quota) -> bool:
    """Whether it says so once it looks: the disk is looked at for a small share of the time only."""
    end = time.monotonic() + 10
    while not judged.is_exceeded() and time.monotonic() < end:
        time.sleep(0.001)
    return judged.is_exceeded()


IN_A_PROCESS_OF_ITS_OWN = """
import os, sys
sys.path.insert(0, {repository!r})
from tests.sandbox.test_landlock import {name}
{name}(sys.argv[1])
"""


def judge_jobs(root: str) -> None:
    """The looks at a shell with jobs, by a process that has no other children."""
    workspace, tmp = f"{root}/workspace", f"{root}/tmp"
    os.mkdir(workspace)
    os.mkdir(tmp)
    judged = quota.Quota(workspace, tmp, {"workspace_bytes": 1 << 20, "tmp_bytes": 1 << 20, "processes": 4})
    environment = {"PATH": os.environ["PATH"]}
    shell = subprocess.Popen(["bash"], cwd=workspace, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert not judged.is_exceeded() and judged.finish_command() == ""
    background(shell, "head -c 2M /dev/zero > big")
    assert passes(judged) and judged.is_exceeded()
    for _ in range(2):  # each command that ends meanwhile says so, and none forgives it
        assert judged.finish_command() == "the workspace holds more than the 1 MiB that may be added to it"
        assert judged.is_exceeded()
    os.truncate(f"{workspace}/big", 0)  # the job takes it back
    assert judged.finish_command() != "" and not judged.is_exceeded() and judged.finish_command() == ""
    background(shell, "head -c 2M /dev/zero > big")
    assert passes(judged)
    for job in set(processes.descendants(os.getpid())) - {shell.pid}:
        os.kill(job, signal.SIGKILL)
    while processes.running_descendants(os.getpid()) != [shell.pid]:
        time.sleep(0.001)
    assert judged.finish_command() != ""
    assert not judged.is_exceeded() and judged.folders[0].check() == ""  # whoever cleans up now is not blamed
    for _ in range(4):
        background(shell, "true")
    assert judged.is_exceeded() and judged.finish_command() == "there were more than 4 processes and threads at once"
    processes.kill_descendants(os.getpid())
    shell.wait()
    assert not judged.is_exceeded() and judged.finish_command() == ""


def test_what_background_jobs_hold_is_looked_at_between_commands_and_not_forgiven(tmp_path):
    code = IN_A_PROCESS_OF_ITS_OWN.format(repository=str(REPOSITORY), name=judge_jobs.__name__)
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=60)


def test_what_a_sandbox_left_on_disk_is_gone_with_it_and_with_its_pool(tmp_path, monkeypatch):
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
    said = as_another_user(AS_ORDINARY_USER)
    assert said == f"as {uid} []\n" if os.getuid() == 0 else said.startswith(f"as {uid} ")


def test_root_is_an_unused_user_without_rights(pool, trace):
    async def go():
        async with await pool.acquire({}) as sandbox:
            running = asyncio.create_task(sandbox.run(["sleep", trace.text], timeout_s=5))
            while not trace.processes():
                await asyncio.sleep(0.01)
            status = Path(f"/proc/{trace.processes()[0]}/status").read_text()
            score = Path(f"/proc/{trace.processes()[0]}/oom_score_adj").read_text()
            running.cancel()
            return status, score

    status, score = asyncio.run(go())
    fields = dict(line.split(":\t", 1) for line in status.splitlines())
    assert "0" not in fields["Uid"].split() + fields["Gid"].split()
    assert fields["CapEff"] == fields["CapPrm"] == fields["CapInh"] == fields["CapAmb"] == "0" * 16
    assert (fields["NoNewPrivs"], fields["Seccomp"], score) == ("1", "2", "1000\n")
    assert fields["Groups"].strip() in ("", fields["Gid"].split()[0]) or os.geteuid() != 0


def test_a_bomb_in_one_sandbox_is_over_for_the_others_when_it_is_for_this_one():
    async def go():
        async with LocalSandboxPool(SandboxLimits(processes=16), backend="landlock", size=3) as pool:
            sandboxes = [await pool.acquire({"n": str(number)}) for number in range(3)]
            bomb = await sandboxes[0].run(["sh", "-c", "b() { b | b & }; b; sleep 60"])
            assert bomb.outcome == "nonzero"
            work = "for i in 1 2 3 4 5; do (cat n) || exit 1; done"
            done = await asyncio.gather(*(sandbox.run(["sh", "-c", work]) for sandbox in sandboxes))
            assert [result.stdout for result in done] == [str(number) * 5 for number in range(3)], done

    asyncio.run(go())
