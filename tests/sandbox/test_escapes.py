"""Attacks from inside a sandbox. Each one must fail, and the host must not notice (fixture `host` checks that)."""

import asyncio
import os
import textwrap
import time

import pytest

from composer_jax.sandbox import SandboxFileError


def test_read_a_secret_of_the_host(host, run_python):
    code = f"""
    import glob, os
    name = {str(host.file)!r}
    roots = ["", "/proc/1/root", "/proc/self/root", "/proc/1/cwd/..", "/proc/self/cwd/../../..", "/dev/fd/3/.."]
    roots += ["/oldroot", "/newroot", "/."]
    for path in [root + name for root in roots] + ["/workspace/.." + name, *glob.glob("/proc/1/fd/*")]:
        try:
            text = open(path).read(10000)
            if "secret" in text and path != "/proc/self/cwd/program.py": print("LEAK", path)
        except OSError as error:
            pass
    print(sorted(os.listdir("/")), os.path.exists("/root"), os.path.exists("/home"), os.path.exists("/var"))
    """
    result = run_python(code)
    assert result.outcome == "ok" and "LEAK" not in result.stdout, result
    assert "'bin', 'dev', 'lib'" in result.stdout and result.stdout.endswith("False False False\n")
    for name in ("etc", "root", "home", "var", "run", "sys", "boot", "mnt", "work"):
        assert f"'{name}'" not in result.stdout


def test_read_passwords(host, run_python):
    code = """
    import pwd, os
    assert os.stat("/usr").st_uid == os.stat("/usr/bin").st_uid == 65534  # root's files stay root's
    for path in ("/etc/passwd", "/etc/shadow", "/usr/../etc/passwd", "/proc/1/root/etc/shadow", "/etc"):
        try:
            os.listdir(path) if path == "/etc" else open(path).read()
            print("LEAK", path)
        except OSError: pass
    try: print("LEAK", pwd.getpwuid(0))
    except KeyError: pass
    """
    result = run_python(code)
    assert (result.outcome, result.stdout) == ("ok", ""), result


def test_look_at_the_processes_of_the_host(host, run_python):
    code = """
    import os
    print(sorted(int(p) for p in os.listdir("/proc") if p.isdigit()), os.getpid(), os.getppid())
    for name in ("meminfo", "cpuinfo", "kcore", "kallsyms", "cmdline", "sys", "sysrq-trigger", "mounts/../../1/environ",
                 "1/environ", "1/mem", "1/maps", "1/fd", "1/root", "1/cwd", "1/exe", "1/task/1/environ", "1/syscall"):
        path = "/proc/" + name
        try:
            if os.path.isdir(path): print("LEAK", path, os.listdir(path))
            elif name in ("1/root", "1/cwd", "1/exe"): print("LEAK", path, os.readlink(path))
            else: print("LEAK", path, open(path, "rb").read(64))
        except OSError: pass
    """
    result = run_python(code)
    assert "LEAK" not in result.stdout, result
    assert result.stdout == "[1, 2] 2 1\n"


def test_environment_of_the_host(host, run_python):
    code = """
    import os, subprocess
    print(dict(os.environ), subprocess.run(["env"], capture_output=True).stdout)
    for pid in os.listdir("/proc"):
        try: print(open(f"/proc/{pid}/environ").read())
        except OSError: pass
    """
    result = run_python(code)
    assert result.outcome == "ok"
    for leak in ("COMPOSER_TEST_SECRET", "secret-of-the-environment", *os.environ["HOME"].split("\0")):
        assert leak not in result.stdout
    assert not {"USER", "SHELL", "VIRTUAL_ENV", "PYTEST_CURRENT_TEST"} & set(result.stdout.split("'"))


def test_network(host, run_python):
    code = f"""
    import socket
    def attempt(what, call):
        try: print("LEAK", what, call())
        except OSError as error: print(what, error.errno)
    tcp, udp = {host.tcp.getsockname()!r}, {host.udp.getsockname()!r}
    attempt("tcp", lambda: socket.create_connection(tcp, 1))
    attempt("gateway", lambda: socket.create_connection(("10.0.0.1", 80), 1))
    attempt("outside", lambda: socket.create_connection(("1.1.1.1", 53), 1))
    attempt("outside6", lambda: socket.create_connection(("2606:4700:4700::1111", 53), 1))
    attempt("udp outside", lambda: socket.socket(type=socket.SOCK_DGRAM).sendto(b"x", ("1.1.1.1", 53)))
    attempt("broadcast", lambda: socket.socket(type=socket.SOCK_DGRAM).sendto(b"x", ("255.255.255.255", 53)))
    attempt("name", lambda: socket.getaddrinfo("example.com", 80))
    attempt("abstract", lambda: socket.socket(socket.AF_UNIX).connect("\\0{host.abstract_name}"))
    try: socket.socket(type=socket.SOCK_DGRAM).sendto(b"x", udp)  # into the sandbox's own loopback: goes nowhere
    except OSError: pass
    print([line.split()[0] for line in open("/proc/self/net/dev")][2:])
    """
    result = run_python(code)
    assert result.outcome == "ok" and "LEAK" not in result.stdout, result
    assert result.stdout.endswith("['lo:']\n")


def test_kinds_of_sockets_that_pass_the_network_namespace(host, run_python):
    code = """
    import socket
    for family in range(64):
        for kind in (1, 2, 3, 5):
            try:
                socket.socket(family, kind, 0)
                print(family, kind)
            except OSError: pass
    """
    lines = run_python(code).stdout.splitlines()
    assert {line.split()[0] for line in lines} == {"1", "2", "10"}, lines
    assert not {"2 3", "10 3"} & set(lines)  # raw sockets


def test_write_outside(host, run_python):
    code = f"""
    import os, sys
    targets = ["/x", "/usr/x", "/usr/bin/python3", "/opt/x", "/opt/composer/inside/worker.py", os.__file__, "/dev/x",
               "/dev/pts/x", "/proc/sys/kernel/hostname", "/proc/self/oom_score_adj", "/proc/1/oom_score_adj",
               sys.prefix + "/lib/x", {str(host.file)!r}, "/etc/x", "/lib/x", "/proc/self/uid_map",
               "/proc/self/setgroups"]
    for path in targets:
        try:
            os.write(os.open(path, os.O_WRONLY | os.O_CREAT), b"-999")
            print("WROTE", path)
        except OSError: pass
    for call in (lambda: os.remove("/bin"), lambda: os.rename("/workspace", "/w"), lambda: os.mkdir("/d"),
                 lambda: os.mknod("/tmp/disk", 0o60666, os.makedev(254, 0)), lambda: os.chmod("/", 0o777),
                 lambda: os.chown("/workspace", 0, 0), lambda: os.utime("/usr")):
        try: print("DID", call())
        except OSError: pass
    """
    result = run_python(code)
    assert (result.outcome, result.stdout) == ("ok", ""), result


TARGETS = ["/usr/lib/os-release", "/opt/composer/inside/worker.py", "/proc/1/environ", "/tmp/own"]


@pytest.mark.parametrize("target", TARGETS)
def test_symbolic_links_through_the_file_tools(host, pool, target):
    async def go():
        async with await pool.acquire({"real/file": "content"}) as sandbox:
            links = {
                "absolute": target,
                "relative": "../" + target.lstrip("/"),
                "folder": os.path.dirname(target),
                "up": "..",
                "loop": "loop",
                "real/up": "../..",
                "inner": "real",  # even those that stay inside: simpler to trust
            }
            code = "import os\nopen('/tmp/own', 'w').write('x')\n"
            code += f"for name, to in {links!r}.items(): os.symlink(to, name)"
            assert (await sandbox.run(["python", "-c", code])).outcome == "ok"
            base, own = os.path.basename(target), target.lstrip("/")
            paths = ["absolute", "relative", f"folder/{base}", f"up/{own}", f"real/up/{own}", "loop", "loop/x"]
            for path in [*paths, "inner/file"]:
                with pytest.raises(SandboxFileError, match="symbolic link"):
                    await sandbox.read(path)
                with pytest.raises(SandboxFileError, match="symbolic link"):
                    await sandbox.write(path, b"overwritten")
                if "/" in path:
                    with pytest.raises(SandboxFileError, match="symbolic link"):
                        await sandbox.delete(path)
            assert await sandbox.list() == ["real/file"]
            assert await sandbox.read_all() == {"real/file": b"content"}
            assert (await sandbox.run(["cat", "/tmp/own"])).stdout == "x"
            await sandbox.delete("absolute")  # the link itself may go
            await sandbox.write_files({"absolute": "a file now"})
            assert await sandbox.read_all() == {"absolute": b"a file now", "real/file": b"content"}
            assert (await sandbox.run(["cat", "/tmp/own"])).stdout == "x"

    asyncio.run(go())


def test_hard_links(host, run_python):
    code = """
    import glob, os
    for source in ("/usr/bin/env", os.__file__, "/proc/self/exe", "/dev/null", "/opt/composer/inside/worker.py"):
        for target in ("/workspace/link", "/tmp/link", "/dev/shm/link"):
            try:
                os.link(source, target)
                print("LINKED", source)
            except OSError: pass
    """
    result = run_python(code)
    assert (result.outcome, result.stdout) == ("ok", ""), result


def test_odd_files_through_the_file_tools(host, pool):
    code = """
    import os, socket
    os.mkfifo("fifo")
    socket.socket(socket.AF_UNIX).bind("socket")
    os.mkdir("closed"); open("closed/file", "w").write("x"); os.chmod("closed/file", 0); os.chmod("closed", 0)
    for _ in range(500):
        os.mkdir("deep"); os.chdir("deep")
    os.chdir("/workspace"); os.chmod("/workspace", 0)
    """

    async def go():
        async with await pool.acquire({}) as sandbox:
            assert (await sandbox.run(["python", "-c", textwrap.dedent(code)])).outcome == "ok"
            for path in ("fifo", "socket"):
                with pytest.raises(SandboxFileError, match="not a regular file"):
                    await sandbox.read(path)
                with pytest.raises(SandboxFileError, match="not a regular file"):
                    await sandbox.write(path, b"x")
            assert await sandbox.read("closed/file") == b"x"
            for call in (sandbox.list, sandbox.read_all):
                with pytest.raises(SandboxFileError, match="nested more than 64 deep"):
                    await call()
            snapshot = await sandbox.snapshot()
            await sandbox.restore(pool.tree())
            await sandbox.write("a", "b")
            assert await sandbox.list() == ["a"]
            await sandbox.restore(snapshot)
            assert await sandbox.read("closed/file") == b"x"

    asyncio.run(go())


def test_files_that_would_fill_the_host(host, pool):
    """A worker must not send more than its workspace may hold: neither sparse files nor endless names."""
    sparse = "for i in range(100):\n    with open(f's{i}', 'wb') as f: f.truncate(8 << 20)"
    names = """
    import os
    n, below = 0, "/" + "d" * 250 + "/" + "e" * 250
    try:
        while True:
            os.makedirs(f"{n:0250}" + below)
            open(f"{n:0250}{below}/" + "f" * 250, "w")
            n += 1
    except OSError: print(n)
    """

    async def go():
        async with await pool.acquire({}) as sandbox:
            assert (await sandbox.run(["python", "-c", sparse])).outcome == "ok"
            with pytest.raises(SandboxFileError, match="holds more than"):
                await sandbox.read_all()
            await sandbox.restore(pool.tree())
            created = await sandbox.run(["python", "-c", textwrap.dedent(names)])
            assert int(created.stdout) > 500
            await sandbox.list()
            await sandbox.restore(pool.tree())

    asyncio.run(go())


def test_fork_bomb(host, pool, run_python):
    code = """
    import os, time
    n = 0
    try:
        while n < 10_000:
            if os.fork() == 0: time.sleep(30); os._exit(0)
            n += 1
    except OSError: print(n)
    """
    result = run_python(code)
    assert 0 < int(result.stdout) < pool.limits.processes
    spreading = run_python("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", timeout_s=1)
    assert spreading.outcome == "timeout" and spreading.seconds < 5
    threads = "import threading, time\nfor n in range(9999): threading.Thread(target=time.sleep, args=(30,)).start()"
    assert run_python(threads, timeout_s=1).outcome != "ok"


def test_memory_bombs(host, run_python):
    assert run_python("x = [bytearray(1 << 20) for _ in range(100_000)]").outcome == "out_of_memory"
    many = "import os, time\nfor _ in range(4): os.fork()\nx = bytearray(200 << 20)\ntime.sleep(30)"
    started = time.monotonic()
    assert run_python(many).outcome == "out_of_memory"
    assert time.monotonic() - started < 10
    hidden = """
    import ctypes, os
    libc = ctypes.CDLL(None, use_errno=True)
    print(libc.memfd_create(b"x", 0), libc.shmget(0, 1 << 20, 0o1666))
    print(libc.msgget(0, 0o1666), libc.semget(0, 1, 0o1666))
    """
    assert run_python(hidden).stdout == "-1 -1\n-1 -1\n"


def test_disk_bombs(host, pool, run_python):
    code = """
    import os
    for folder in ("/workspace", "/tmp", "/dev/shm"):
        total = 0
        try:
            for i in range(10_000):
                with open(f"{folder}/bomb{i}", "wb", buffering=0) as file:
                    for _ in range(4): total += file.write(bytes(1 << 20))
        except OSError as error: print(folder, error.errno, total >> 20)
        for i in range(10_000):
            if os.path.exists(f"{folder}/bomb{i}"): os.remove(f"{folder}/bomb{i}")
    count = 0
    try:
        while True:
            open(f"/tmp/{count}", "w"); count += 1
    except OSError: print("inodes", count)
    try: open("large", "wb").write(bytes(64 << 20))
    except OSError as error: print("large", error.errno)
    """
    lines = dict(line.split(" ", 1) for line in run_python(code).stdout.splitlines())
    limits = pool.limits
    for folder, size in (("/workspace", limits.workspace_mb), ("/tmp", limits.tmp_mb), ("/dev/shm", limits.tmp_mb)):
        error, total = lines[folder].split()
        assert error == "28" and int(total) <= size
    assert int(lines["inodes"]) < 10_000 and lines["large"] == "27"


def test_output_flood(host, pool, run_python):
    for code in (
        "import os\nwhile True: os.write(1, bytes(65536))",
        "import os\nfor _ in range(8):\n    if os.fork() == 0: break\nwhile True: os.write(2, bytes(65536))",
    ):
        result = run_python(code)
        assert result.outcome == "output_limit" and result.seconds < 10
        assert len(result.stdout) + len(result.stderr) < 3 * pool.limits.output_kb * 1024


def test_use_up_file_descriptors(host, pool, run_python):
    code = """
    import os
    opened = []
    try:
        while True: opened.append(os.open("/dev/null", os.O_RDONLY))
    except OSError as error: print(error.errno, len(opened))
    import resource
    try: resource.setrlimit(resource.RLIMIT_NOFILE, (100_000, 100_000))
    except (OSError, ValueError): print("kept")
    """
    error, count, kept = run_python(code).stdout.split()
    assert error == "24" and int(count) <= pool.limits.open_files and kept == "kept"


def test_raise_the_limits(host, run_python):
    code = """
    import resource
    for name in ("AS", "CPU", "NPROC", "FSIZE", "NOFILE", "CORE"):
        kind = getattr(resource, "RLIMIT_" + name)
        try:
            resource.setrlimit(kind, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            print("RAISED", name)
        except (OSError, ValueError): pass
    """
    result = run_python(code)
    assert (result.outcome, result.stdout) == ("ok", ""), result


def test_kill_the_worker(host, run_python):
    code = """
    import os, signal
    for number in range(1, 65):
        try: os.kill(1, number)
        except OSError: pass
    for number in (signal.SIGSTOP, signal.SIGKILL):
        signal.pidfd_send_signal(os.pidfd_open(1), number)
    import fcntl
    r, w = os.pipe()
    fcntl.fcntl(r, fcntl.F_SETOWN, 1); fcntl.fcntl(r, 10, 9); fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC)  # F_SETSIG
    os.write(w, b"x")
    print("still here", flush=True)
    os.kill(-1, 9)
    """
    assert "still here" in run_python(code).stdout


def test_starve_the_worker(host, run_python):
    """Whoever could break the worker would have the episode run again: limits and scheduling of process 1."""
    code = """
    import ctypes, os, resource
    libc = ctypes.CDLL(None, use_errno=True)
    calls = [lambda: resource.prlimit(1, resource.RLIMIT_NOFILE, (0, 0)),
             lambda: resource.prlimit(1, resource.RLIMIT_CPU, (0, 0)),
             lambda: os.setpriority(os.PRIO_PROCESS, 1, 19), lambda: os.setpriority(os.PRIO_USER, 0, 19),
             lambda: os.setpriority(os.PRIO_PGRP, 1, 19), lambda: os.sched_setaffinity(1, {0}),
             lambda: os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0)),
             lambda: os.open("/proc/1/oom_score_adj", os.O_WRONLY), lambda: os.open("/proc/1/comm", os.O_WRONLY),
             lambda: os.open("/proc/1/mem", os.O_RDWR), lambda: os.listdir("/proc/1/fd")]
    for number, call in enumerate(calls):
        try: call(); print("DID", number)
        except OSError: pass
    os.nice(1); os.sched_setaffinity(0, os.sched_getaffinity(0))  # on oneself it is allowed
    print("done")
    """
    assert run_python(code).stdout == "done\n"


def test_trace_the_worker(host, run_python):
    code = """
    import ctypes, os
    libc = ctypes.CDLL(None, use_errno=True)
    print(libc.ptrace(16, 1, 0, 0), libc.ptrace(0x4206, 1, 0, 0), libc.ptrace(0, 0, 0, 0))  # attach, seize, trace me
    buffer = ctypes.create_string_buffer(64)
    class IOVec(ctypes.Structure): _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]
    vector = IOVec(ctypes.addressof(buffer), 64)
    print(libc.process_vm_readv(1, ctypes.byref(vector), 1, ctypes.byref(vector), 1, 0))
    print(libc.syscall(438, os.pidfd_open(1), 3, 0))  # pidfd_getfd: its line to the host
    """
    assert run_python(code).stdout.split() == ["-1"] * 5


def test_forge_an_answer(host, run_python):
    """The worker's line to the host must not be in any command's hands."""
    code = """
    import os, socket, struct, json
    text = {"outcome": "ok", "exit_code": 0, "seconds": 0, "pieces": [0, 0, 0, 0], "dropped": [0, 0]}
    text = json.dumps(text).encode()
    frame = struct.pack("<II", len(text), 0) + text
    for fd in range(3, 4096):
        try: os.write(fd, frame); print("WROTE", fd)
        except OSError: pass
    import gc
    for thing in gc.get_objects():
        if isinstance(thing, socket.socket):
            try: thing.sendall(frame); print("SENT", thing)
            except OSError: pass
    raise SystemExit(5)
    """
    result = run_python(code)
    assert (result.outcome, result.exit_code, result.stdout) == ("nonzero", 5, ""), result


def test_mount_and_change_root(host, run_python):
    code = """
    import ctypes, os
    libc = ctypes.CDLL(None, use_errno=True)
    print(libc.mount(b"none", b"/tmp", b"tmpfs", 0, None), libc.mount(b"/usr", b"/tmp", None, 4096, None),
          libc.mount(None, b"/", None, 32 | 4096, None), libc.umount2(b"/proc", 2), libc.umount2(b"/workspace", 2),
          libc.chroot(b"/tmp"), libc.pivot_root(b"/tmp", b"/tmp"), libc.syscall(428, -100, b"/", 1),
          libc.syscall(430, b"tmpfs", 0))
    """
    assert set(run_python(code).stdout.split()) == {"-1"}


def test_new_namespaces(host, run_python):
    code = """
    import ctypes, errno, os, subprocess, threading
    libc = ctypes.CDLL(None, use_errno=True)
    for flag in (0x10000000, 0x20000, 0x20000000, 0x40000000, 0x4000000, 0x8000000, 0x2000000, 0x10020000, 0x80):
        print(libc.unshare(flag))
    import platform
    clone = {"x86_64": 56, "aarch64": 220}[platform.machine()]
    print(libc.syscall(clone, 0x10000000 | 17, 0, 0, 0, 0), ctypes.get_errno() == errno.EPERM or "")
    print(libc.syscall(435, ctypes.create_string_buffer(88), 88), ctypes.get_errno() == errno.ENOSYS or "")
    print(libc.setns(os.open("/proc/self/ns/net", os.O_RDONLY), 0))
    """
    assert set(run_python(code).stdout.split()) == {"-1", "True"}


def test_become_root(host, run_python):
    code = """
    import glob, os, stat, subprocess, ctypes
    for call in (lambda: os.setuid(0), lambda: os.setgid(0), lambda: os.setgroups([0]), lambda: os.setreuid(0, 0)):
        try: call(); print("DID")
        except OSError: pass
    with open("/tmp/id", "wb") as file: file.write(open("/usr/bin/id", "rb").read())
    os.chmod("/tmp/id", 0o6755)
    print(subprocess.run(["/tmp/id", "-u"], capture_output=True, text=True).stdout)
    for path in glob.glob("/usr/bin/*") + glob.glob("/usr/sbin/*"):
        if os.path.exists(path) and os.stat(path).st_mode & stat.S_ISUID:  # su, passwd, ...: none may gain anything
            subprocess.run([path, "-c", "id -u > /tmp/won"], stdin=subprocess.DEVNULL, capture_output=True, timeout=5)
    if os.path.exists("/tmp/won"): print("WON", open("/tmp/won").read())
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    print({status[name].strip() for name in ("CapEff", "CapPrm", "CapInh", "CapBnd", "CapAmb")})
    """
    assert run_python(code).stdout.split() == ["1000", "{'0000000000000000'}"]


def test_kernel_keys_and_other_denied_calls(host, run_python):
    code = """
    import ctypes, platform
    libc = ctypes.CDLL(None, use_errno=True)
    calls = {"x86_64": [248, 249, 250, 298, 304, 321, 323, 425, 175, 169, 246, 103, 135, 443, 300],
             "aarch64": [217, 218, 219, 241, 265, 280, 282, 425, 105, 142, 104, 116, 92, 443, 262]}[platform.machine()]
    for number in calls:
        ctypes.set_errno(0)
        print(libc.syscall(number, 0, 0, 0, 0, 0), ctypes.get_errno())
    """
    assert set(run_python(code).stdout.splitlines()) == {"-1 1"}


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="there is no second system-call table on this processor")
def test_the_other_system_call_tables(host, run_python):
    """The 32-bit and the x32 entry would have other numbers for everything that is denied."""
    code = """
    import ctypes, mmap
    def call(machine_code):
        page = mmap.mmap(-1, 4096, prot=7)
        page.write(machine_code)
        return ctypes.CFUNCTYPE(ctypes.c_long)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
    print(call(b"\\x48\\xc7\\xc0\\x27\\x00\\x00\\x40\\x0f\\x05\\xc3"), flush=True)  # x32 getpid
    print(call(b"\\xb8\\x14\\x00\\x00\\x00\\xcd\\x80\\xc3"), flush=True)  # int 0x80 getpid
    """
    result = run_python(code)
    assert (result.outcome, result.exit_code, result.stdout) == ("nonzero", 128 + 31, "-1\n")  # SIGSYS


DAEMON = """
import os, sys, time, signal
if os.fork(): {parent}
os.setsid()
if os.fork(): os._exit(0)
for number in range(1, 32):
    try: signal.signal(number, signal.SIG_IGN)
    except OSError: pass
null = os.open(os.devnull, os.O_RDWR)
for fd in {fds}: os.dup2(null, fd)
while True:
    open("/tmp/beat", "a").write("x")
    open("/workspace/beat", "a").write("x")
    time.sleep(0.01)
"""


@pytest.mark.parametrize("parent", ["os._exit(0)", "time.sleep(60)"])
@pytest.mark.parametrize("fds", ["(0, 1, 2)", "()"])
def test_a_daemon_that_evades_the_end(host, pool, parent, fds):
    async def go():
        async with await pool.acquire({"d.py": DAEMON.format(parent=parent, fds=fds)}) as sandbox:
            result = await sandbox.run(["python", "d.py"], timeout_s=0.5)
            assert result.outcome == ("timeout" if "sleep" in parent else "ok") and result.seconds < 5
            look = "import os; print(os.path.exists('/tmp/beat') and os.path.getsize('/tmp/beat'), "
            look += "[p for p in os.listdir('/proc') if p.isdigit()])"
            first = await sandbox.run(["python", "-c", look])
            await asyncio.sleep(0.3)
            second = await sandbox.run(["python", "-c", look])
            assert first.stdout.partition("[")[0] == second.stdout.partition("[")[0]
            assert second.stdout.partition("[")[2].count("'") == 4  # the worker and the program itself

    asyncio.run(go())


def test_processes_left_after_close(host, pool, trace):
    async def go():
        sandbox = await pool.acquire({})
        script = f"setsid sleep {trace.text} & nohup sleep {trace.text} & sleep {trace.text}"
        run = asyncio.create_task(sandbox.run(["sh", "-c", script]))
        await asyncio.sleep(0.5)
        assert len(trace.processes()) >= 3
        await sandbox.close()
        await asyncio.wait([run])
        assert run.exception() is not None

    asyncio.run(go())
    trace.wait_until_gone()


def test_hooks_that_python_runs_at_start(host, pool):
    """Files a real start would execute or read must not reach the worker or later commands by surprise."""
    files = {
        "sitecustomize.py": "print('HOOKED')",
        "usercustomize.py": "print('HOOKED')",
        "frames.py": "raise RuntimeError('HOOKED')",
        "inside/__init__.py": "value = 'mine'",
        "json.py": "value = 'my json'",
        "p.py": "import inside, json; print(inside.value, json.value)",
    }

    async def go():
        async with await pool.acquire(files) as sandbox:
            result = await sandbox.run(["python", "p.py"])
            assert (result.stdout, result.stderr) == ("mine my json\n", "")
            assert len(await sandbox.list()) == len(files)

    asyncio.run(go())


def test_a_program_that_breaks_its_interpreter(host, run_python):
    """What a command does to the forked interpreter stays in that fork."""
    code = """
    import builtins, os, sys, signal, gc, ctypes, json, time
    builtins.print = builtins.open = builtins.len = None
    json.loads = json.dumps = time.monotonic = os.fork = os.kill = lambda *a, **k: 1 / 0
    sys.modules.clear(); gc.disable()
    ctypes.string_at(0)
    """
    result = run_python(code)
    assert (result.outcome, result.exit_code) == ("nonzero", 128 + 11)
