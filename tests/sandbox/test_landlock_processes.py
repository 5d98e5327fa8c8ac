"""Processes behind Landlock: attacks by sockets, signals, tracing and daemons, each of which must fail."""

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

from composer_jax.sandbox import SandboxDied
from composer_jax.sandbox.inside import landlock
from tests.sandbox.fixtures import REPOSITORY
from tests.sandbox.landlock_fixtures import ATTEMPT, protected_pids


@pytest.fixture(scope="module")
def pool(landlock_pool):
    return landlock_pool


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
    reached = [host.process.pid, *protected_pids(pool)]
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
    assert set(protected_pids(pool)) >= {os.getpid(), pool.launcher_pid}


def test_trace_and_look_into_other_processes(host, pool, attack):
    reached = [host.process.pid, *protected_pids(pool)]
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
    reached = [host.process.pid, *protected_pids(pool)]
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
        await trace.wait_until_sleeping(3)
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
        launcher = pool.launcher_pid
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
