"""Reading what is the host's: files, processes, devices."""

import os

import pytest

NOT_THERE = ("ENOENT", "EACCES")

DETOURS = {
    "directly": "",
    "by_the_root_of_the_worker": "/proc/1/root",
    "by_its_own_root": "/proc/self/root",
    "by_the_folder_of_the_worker": "/proc/1/cwd/..",
    "up_from_its_own_folder": "/proc/self/cwd/../../..",
    "up_from_the_workspace": "/workspace/../..",
    "up_from_a_descriptor": "/dev/fd/0/../..",
    "by_a_thread_of_the_worker": "/proc/1/task/1/root",
    "in_the_root_that_was_left": "/oldroot",
    "in_the_root_that_was_entered": "/newroot",
}


def test_a_secret_of_the_host(host, attempts):
    answers = attempts({name: f"open({detour + str(host.file)!r}).read()" for name, detour in DETOURS.items()})
    assert set(answers.values()) <= {*NOT_THERE, "ENOTDIR"}, answers


@pytest.mark.parametrize("descriptors", ["/proc/1/fd", "/proc/self/fd", "/dev/fd"])
def test_a_secret_behind_an_inherited_descriptor(host, attempt, descriptors):
    output = attempt(f"""
    found = []
    for fd in os.listdir({descriptors!r}):
        try: found.append((fd, os.readlink(f"{descriptors}/{{fd}}")))
        except FileNotFoundError: continue  # that of listdir itself
    return sorted(target.split(":")[0] for fd, target in found)
    """)
    # Its own are standard input, two pipes and nothing else.
    assert output in ("EACCES", "DID ['/dev/null', 'pipe', 'pipe']")


def test_a_secret_by_its_file_handle(host, attempt):
    status = host.file.stat()
    body = f"syscall(304, 265, os.open('/', os.O_RDONLY), struct.pack('=IiQQ', 12, 1, {status.st_ino}, 0), 0)"
    assert attempt(body) == "EPERM"


SYSTEM_FILES = (
    "/etc/passwd", "/etc/shadow", "/etc/hostname", "/etc/resolv.conf", "/etc/ssl/private", "/etc", "/root",
    "/root/.ssh", "/home", "/var", "/run", "/run/docker.sock", "/sys", "/boot", "/srv", "/mnt", "/usr/../etc/passwd",
    "/proc/1/root/etc/shadow",
)  # fmt: skip


def test_files_of_the_system(attempts):
    look = "os.listdir({0!r}) if os.path.isdir({0!r}) else open({0!r}).read()"
    answers = attempts({path: look.format(path) for path in SYSTEM_FILES})
    assert set(answers.values()) <= set(NOT_THERE), answers


def test_the_root_holds_nothing_else(attempt):
    names = set(eval(attempt("os.listdir('/')").removeprefix("DID ")))
    system = {"bin", "sbin", "lib", "lib32", "lib64", "libx32", "usr", "opt", "dev", "proc", "tmp"}
    assert (
        {"usr", "dev", "proc", "tmp", "workspace"}
        <= names
        <= system | {*("workspace", "app", "testbed", "tests", "solution", "logs")}
    )
    assert "DID 65534" == attempt("os.stat('/usr').st_uid"), "root's files stay root's"


def test_names_of_users(attempt):
    assert attempt("try: return pwd.getpwuid(0)\nexcept KeyError: return 'nobody'") == "DID nobody"


OF_THE_WORKER = (
    "environ",
    "mem",
    "maps",
    "smaps",
    "fd/0",
    "root/usr",
    "cwd",
    "exe",
    "task/1/environ",
    "syscall",
    "stack",
)
OF_THE_KERNEL = (
    "meminfo",
    "cpuinfo",
    "kcore",
    "kallsyms",
    "cmdline",
    "modules",
    "sys/kernel/hostname",
    "sysrq-trigger",
)


def test_the_memory_and_state_of_the_worker(attempts):
    look = "os.readlink('/proc/1/{0}') if {0!r} in ('cwd', 'exe') else open('/proc/1/{0}', 'rb').read(64)"
    answers = attempts({name: look.format(name) for name in OF_THE_WORKER})
    assert set(answers.values()) <= {"EACCES", "EPERM"}, answers


def test_the_state_of_the_kernel(attempts):
    answers = attempts({name: f"open('/proc/{name}', 'rb').read(64)" for name in OF_THE_KERNEL})
    assert set(answers.values()) == {"ENOENT"}, answers


def test_processes_of_the_host(host, attempt):
    """Only the worker and the program itself are there, and those of the host cannot be named."""
    assert attempt("sorted(int(p) for p in os.listdir('/proc') if p.isdigit()), os.getpid(), os.getppid()") == (
        "DID ([1, 2], 2, 1)"
    )
    assert attempt(f"os.pidfd_open({max(host.process.pid, 100)})") == "ESRCH"


DEVICES = ("mem", "kmsg", "port", "kvm", "fuse", "net/tun", "vsock", "sda", "vda", "nvme0", "nvidia0", "snd",
           "input", "loop-control", "mapper/control", "vhost-net")  # fmt: skip


def test_devices(attempts):
    answers = attempts({name: f"os.open('/dev/{name}', os.O_RDONLY)" for name in DEVICES})
    assert set(answers.values()) == {"ENOENT"}, answers


def test_what_devices_there_are(attempt):
    harmless = {"null", "zero", "full", "random", "urandom", "tty", "console", "pts", "ptmx", "shm", "fd", "core"}
    assert set(eval(attempt("os.listdir('/dev')").removeprefix("DID "))) <= harmless | {"stdin", "stdout", "stderr"}


def test_the_name_of_the_host(attempt):
    assert attempt("os.uname().nodename") == "DID sandbox" != f"DID {os.uname().nodename}"
