"""Mounts, namespaces, privileges, keys, and parts of the kernel that a program under test has no use for."""

import os

import pytest

MOUNTS = {
    "mount_a_file_system": "libc.mount(b'none', b'/tmp', b'tmpfs', 0, None)",
    "mount_the_processes": "libc.mount(b'none', b'/tmp', b'proc', 0, None)",
    "mount_an_overlay": "libc.mount(b'none', b'/tmp', b'overlay', 0, b'lowerdir=/usr:/opt')",
    "show_a_folder_elsewhere": "libc.mount(b'/usr', b'/tmp', None, 4096, None)",
    "remount_the_root_writable": "libc.mount(None, b'/', None, 32 | 4096, None)",
    "remount_the_tests_writable": "libc.mount(None, b'/tests', None, 32 | 4096, None)",
    "share_mounts": "libc.mount(None, b'/', None, 16384 | (1 << 20), None)",
    "unmount_the_processes": "libc.umount2(b'/proc', 2)",
    "unmount_the_workspace": "libc.umount2(b'/workspace', 2)",
    "uncover_the_layers": "libc.umount2(b'/opt/composer/hidden', 2)",
    "change_the_root": "libc.chroot(b'/tmp')",
    "pivot_the_root": "libc.syscall({'x86_64': 155, 'aarch64': 41}[platform.machine()], b'/tmp', b'/tmp')",
    "open_tree": "libc.syscall(428, -100, b'/', 1)",
    "move_mount": "libc.syscall(429, -100, b'/tmp', -100, b'/dev/shm', 0)",
    "fsopen": "libc.syscall(430, b'tmpfs', 0)",
    "fspick": "libc.syscall(433, -100, b'/', 0)",
    "mount_setattr": "libc.syscall(442, -100, b'/', 0, bytes(32), 32)",
    "list_mounts": "libc.syscall(458, bytes(32), bytes(64), 8, 0)",
}


def test_mounts_and_roots(attempts):
    answers = attempts({name: f"checked({call})" for name, call in MOUNTS.items()})
    assert set(answers.values()) == {"EPERM"}, answers


NAMESPACES = {
    "user": 0x10000000, "mount": 0x20000, "process": 0x20000000, "network": 0x40000000, "uts": 0x4000000,
    "ipc": 0x8000000, "cgroup": 0x2000000, "time": 0x80, "user_and_mount": 0x10020000,
}  # fmt: skip


def test_new_namespaces(attempts):
    calls = {f"unshare {name}": f"checked(libc.unshare({flags}))" for name, flags in NAMESPACES.items()}
    clones = NAMESPACES.items() - {("time", 0x80)}  # clone has no such flag
    calls |= {f"clone {name}": f"syscall(56, 220, {flags} | 17, 0, 0, 0, 0)" for name, flags in clones}
    answers = attempts(calls)
    assert set(answers.values()) == {"EPERM"}, answers


def test_a_clone_that_hides_its_flags(attempt):
    assert attempt("checked(libc.syscall(435, struct.pack('11Q', 0x10000000, *[0] * 10), 88))") == "ENOSYS"


@pytest.mark.parametrize(("process", "error"), [("self", "EPERM"), ("1", "EACCES")])
def test_entering_a_namespace(attempts, process, error):
    enter = "checked(libc.setns(os.open('/proc/{}/ns/{}', os.O_RDONLY), 0))"
    answers = attempts({name: enter.format(process, name) for name in ("user", "mnt", "net", "pid")})
    assert set(answers.values()) == {error}, answers


IDENTITY = {
    "setuid": ("os.setuid(0)", "EINVAL"),
    "setgid": ("os.setgid(0)", "EINVAL"),
    "setreuid": ("os.setreuid(0, 0)", "EINVAL"),
    "setresuid": ("os.setresuid(0, 0, 0)", "EINVAL"),
    "setgroups": ("os.setgroups([0])", "EPERM"),
    "another_user": ("os.setuid(1001)", "EINVAL"),
    "filesystem_user": ("libc.setfsuid(0) == 1000 == libc.setfsuid(0) or None", "DID True"),
    "capabilities": ("checked(libc.capset(struct.pack('=Ii', 0x20080522, 0), b'\\xff' * 24))", "EPERM"),
    "ambient_capabilities": ("checked(libc.prctl(47, 2, 21, 0, 0))", "EPERM"),
    "keep_capabilities": ("checked(libc.prctl(28, 0x3F, 0, 0, 0))", "EPERM"),
    "privileges_on_exec": ("checked(libc.prctl(38, 0, 0, 0, 0))", "EINVAL"),
    "no_filter": ("checked(libc.prctl(22, 0, 0, 0, 0))", "EINVAL"),
}


@pytest.mark.parametrize(("body", "output"), IDENTITY.values(), ids=IDENTITY)
def test_changing_the_user(attempt, body, output):
    assert attempt(body) == output


def test_no_capability_is_left(attempt):
    body = "s = dict(line.split(':', 1) for line in open('/proc/self/status'))\n"
    body += (
        "return [int(s[n], 16) for n in ('CapEff', 'CapPrm', 'CapInh', 'CapBnd', 'CapAmb')], s['NoNewPrivs'].strip()"
    )
    assert attempt(body) == "DID ([0, 0, 0, 0, 0], '1')"


def test_a_program_that_belongs_to_itself_with_the_set_user_bit(attempt):
    body = """
    with open("/tmp/id", "wb") as file: file.write(open("/usr/bin/id", "rb").read())
    os.chmod("/tmp/id", 0o6755)
    return subprocess.run(["/tmp/id", "-u"], capture_output=True, text=True).stdout.strip()
    """
    assert attempt(body) == "DID 1000"


def test_every_program_of_the_system_with_the_set_user_bit(attempt):
    body = """
    for path in glob.glob("/usr/bin/*") + glob.glob("/usr/sbin/*"):
        if os.path.isfile(path) and os.stat(path).st_mode & (stat.S_ISUID | stat.S_ISGID):
            subprocess.run([path, "-c", "id -u > /tmp/won"], stdin=subprocess.DEVNULL, capture_output=True, timeout=5)
    return os.path.exists("/tmp/won")
    """
    assert attempt(body) == "DID False"


CALLS = {  # x86_64, aarch64
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "perf_event_open": (298, 241),
    "bpf": (321, 280), "userfaultfd": (323, 282), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "reboot": (169, 142), "kexec_load": (246, 104), "kexec_file_load": (320, 294), "syslog": (103, 116),
    "personality": (135, 92), "quotactl_fd": (443, 443), "fanotify_init": (300, 262), "swapon": (167, 224),
    "swapoff": (168, 225), "acct": (163, 89), "settimeofday": (164, 170), "clock_settime": (227, 112),
    "adjtimex": (159, 171), "sethostname": (170, 161), "setdomainname": (171, 162), "vhangup": (153, 58),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "process_madvise": (440, 440),
    "move_pages": (279, 239), "migrate_pages": (256, 238), "mbind": (237, 235),
}  # fmt: skip


def test_calls_that_are_closed(attempts):
    """EPERM is the filter's: with only zeros the kernel would say something else, or do it."""
    answers = attempts({name: f"syscall(*{numbers}, 0, 0, 0, 0, 0)" for name, numbers in CALLS.items()})
    assert set(answers.values()) == {"EPERM"}, answers


X86 = pytest.mark.skipif(
    os.uname().machine != "x86_64", reason="there is no second system-call table on this processor"
)
TABLES = {
    "x32": (b"\x48\xc7\xc0\x27\x00\x00\x40\x0f\x05\xc3", "-1\n", 0),  # getpid with the x32 bit
    "32_bit": (b"\xb8\x14\x00\x00\x00\xcd\x80\xc3", "", 128 + 31),  # getpid by int 0x80: SIGSYS
}


@X86
@pytest.mark.parametrize(("machine_code", "stdout", "code"), TABLES.values(), ids=TABLES)
def test_the_other_tables_of_system_calls(host, run_python, machine_code, stdout, code):
    """They have other numbers for everything that is denied."""
    program = f"""
    import ctypes, mmap
    page = mmap.mmap(-1, 4096, prot=7)
    page.write(b"\\xb8\\x01\\x00\\x00\\x00\\xc3")  # return 1: that machine code can be run here
    call = ctypes.CFUNCTYPE(ctypes.c_long)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
    assert call() == 1
    page.seek(0)
    page.write({machine_code!r})
    print(call(), flush=True)
    """
    result = run_python(program)
    assert (result.exit_code, result.stdout, result.stderr) == (code, stdout, "")
