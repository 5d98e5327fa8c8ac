"""Writing outside of the workspace and /tmp."""

import pytest

REFUSED = ("EROFS", "EACCES", "ENOENT", "EPERM", "ETXTBSY")

TARGETS = {
    "the_root": "'/x'",
    "usr": "'/usr/x'",
    "a_program": "'/usr/bin/env'",
    "the_interpreter": "os.path.realpath(sys.executable or '/opt/bin/python')",
    "an_alias_of_the_interpreter": "'/opt/bin/python'",
    "the_worker": "'/opt/composer/inside/worker.py'",
    "the_cover_of_the_layers": "'/opt/composer/hidden/x'",
    "the_standard_library": "os.__file__",
    "the_search_path": "sys.prefix + '/lib/x'",
    "the_linker": "'/etc/ld.so.preload'",
    "a_library_folder": "'/lib/x'",
    "dev": "'/dev/x'",
    "terminals": "'/dev/pts/x'",
    "the_name_of_the_machine": "'/proc/sys/kernel/hostname'",
    "the_core_handler": "'/proc/sys/kernel/core_pattern'",
    "sysrq": "'/proc/sysrq-trigger'",
    "the_map_of_users": "'/proc/self/uid_map'",
    "setgroups": "'/proc/self/setgroups'",
    "the_score_of_the_worker": "'/proc/1/oom_score_adj'",
    "packages": "'/opt/packages/x'",
    "tests": "'/tests/x'",
    "logs": "'/logs/x'",
    "app": "'/app/../x'",
}


def test_a_file(attempts):
    write = "os.write(os.open({}, os.O_WRONLY | os.O_CREAT), b'-999')"
    answers = attempts({name: write.format(path) for name, path in TARGETS.items()})
    assert set(answers.values()) <= set(REFUSED), answers


def test_the_secret_of_the_host(host, attempt):
    assert attempt(f"open({str(host.file)!r}, 'w').write('overwritten')") == "ENOENT"


def test_its_own_killing_score_cannot_be_lowered(attempt):
    """Else the machine's memory killer would go for the trainer first."""
    assert attempt("os.write(os.open('/proc/self/oom_score_adj', os.O_WRONLY), b'-999')") == "EACCES"
    assert attempt("open('/proc/self/oom_score_adj').read().strip()") == "DID 1000"


CALLS = {
    "remove": ("os.remove('/bin')", "EROFS"),
    "remove_a_folder": ("os.rmdir('/opt')", "EROFS"),
    "rename_the_workspace": ("os.rename('/workspace', '/w')", "EROFS"),
    "remove_the_workspace": ("os.rmdir('/workspace')", "EROFS"),
    "make_a_folder": ("os.mkdir('/d')", "EROFS"),
    "make_a_link": ("os.symlink('/tmp', '/usr/l')", "EROFS"),
    "change_the_mode_of_the_root": ("os.chmod('/', 0o777)", "EROFS"),
    "give_a_file_away": ("os.chown('/workspace', 0, 0)", "EINVAL"),
    "change_times": ("os.utime('/usr')", "EROFS"),
    "truncate_a_program": ("os.truncate('/usr/bin/env', 0)", "EACCES"),
    "attributes_of_a_program": ("os.setxattr('/usr/bin/env', 'user.x', b'1')", "EROFS"),
    "file_capabilities": (
        "open('/tmp/f', 'w')\n"
        "return os.setxattr('/tmp/f', 'security.capability', struct.pack('<5I', 0x02000001, 1, 0, 1, 0))",
        "EPERM",
    ),
    "trusted_attributes": ("os.setxattr('/workspace', 'trusted.overlay.opaque', b'y')", "EPERM"),
    "a_disk_in_tmp": ("os.mknod('/tmp/disk', 0o60666, os.makedev(254, 0))", "EPERM"),
    "a_disk_in_the_workspace": ("os.mknod('disk', 0o60666, os.makedev(8, 0))", "EPERM"),
    "the_memory_as_a_device": ("os.mknod('/dev/shm/mem', 0o20666, os.makedev(1, 1))", "EPERM"),
    "the_sign_of_a_deleted_file": ("os.mknod('program.py2', 0o20666, 0)", "EPERM"),
    "shared_memory_of_a_program": (
        "mmap.mmap(os.open('/usr/bin/env', os.O_RDONLY), 0, mmap.MAP_SHARED, mmap.PROT_WRITE)",
        "EACCES",
    ),
}


def test_a_change(attempts):
    answers = attempts({name: body for name, (body, _) in CALLS.items()})
    assert answers == {name: error for name, (_, error) in CALLS.items()}


def test_the_program_that_runs_cannot_be_written(attempt):
    """EACCES where it belongs to another user, as a system's Python does."""
    assert attempt("os.open('/proc/self/exe', os.O_WRONLY)") in ("ETXTBSY", "EACCES")


SOURCES = ("/usr/bin/env", "/opt/composer/inside/worker.py", "/proc/self/exe", "/dev/null", "/proc/1/environ")


@pytest.mark.parametrize("target", ["/workspace/link", "/tmp/link", "/dev/shm/link"])
def test_a_hard_link(attempts, target):
    answers = attempts({source: f"os.link({source!r}, {target!r}, follow_symlinks=False)" for source in SOURCES})
    assert set(answers.values()) <= {"EXDEV", "EPERM"}, answers
