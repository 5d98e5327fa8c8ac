"""The walls of one sandbox, raised by the process that will live inside them.

bubblewrap has already built the room (read-only system, no host files, no capabilities, an unprivileged uid); here
each sandbox gets its own user, mount, process, network, ipc, uts and cgroup namespace in that room, its own
workspace, and gives up every means of changing any of it. Plain system calls through ctypes: some 2 ms per sandbox.
"""

import ctypes
import fcntl
import os
import socket
import struct

_libc = ctypes.CDLL(None, use_errno=True)

_CLONE_NEWNS, _CLONE_NEWCGROUP, _CLONE_NEWUTS, _CLONE_NEWIPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
_CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 1, 2, 4, 8
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000
_MNT_DETACH = 2
_PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 4, 22, 24, 38
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_SECCOMP = {"x86_64": 317, "aarch64": 277}  # the system call
_SECCOMP_SET_MODE_FILTER, _SECCOMP_ASKING = 1, 8 | 32  # a new listener; once it has heard, only death interrupts
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_CAPABILITY_VERSION_3, _LAST_CAPABILITY = 0x20080522, 63


class _Program(ctypes.Structure):  # struct sock_fprog
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def _check(result: int, what: str) -> None:
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")


def _prctl(option: int, value: object, what: str) -> None:
    _check(_libc.prctl(option, value, 0, 0, 0), what)


def mount(source: str, target: str, kind: str, flags: int, options: str) -> None:
    """mount(2); raises OSError naming the target."""
    arguments = (source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode())
    _check(_libc.mount(*arguments), f"mount {target}")


def mount_tmpfs(target: str, size: int) -> None:
    """A file system in memory, limited in bytes and in files."""
    # One inode costs about 1 KiB of kernel memory that `size` does not count.
    options = f"size={size},nr_inodes={max(256, size // 4096)},mode=0755"
    mount("tmpfs", target, "tmpfs", _MS_NOSUID | _MS_NODEV, options)


def mount_overlay(target: str, lower: list[str], layer: str) -> None:
    """The trees `lower`, the topmost first, and what is changed of them in the folder `layer`."""
    # userxattr: without it, overlays in a user namespace cannot delete folders of a tree. (To rename one is EXDEV with
    # it as well, as between file systems; mv and shutil.move copy then.)
    options = f"lowerdir={':'.join(lower)},upperdir={layer}/changes,workdir={layer}/work,userxattr"
    mount("overlay", target, "overlay", _MS_NOSUID | _MS_NODEV, options)


def bind_mount(folder: str, target: str) -> None:
    """The same folder in another place."""
    mount(folder, target, "none", _MS_BIND, "")


def hide_folder(target: str) -> None:
    """Hide what is in a folder, for good once `drop_privileges` was called."""
    mount("tmpfs", target, "tmpfs", _MS_RDONLY | _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, "size=4k,nr_inodes=2,mode=0555")


def unmount(target: str) -> None:
    """Take a file system away as soon as nobody uses it."""
    _check(_libc.umount2(target.encode(), _MNT_DETACH), f"unmount {target}")


def become_subreaper() -> None:
    """Make this process the parent of descendants whose own parent is gone."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1, "become subreaper")


def set_no_new_privileges() -> None:
    """From now on no program that is started gains any."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1, "no new privileges")


def set_parent_death_signal(number: int) -> None:
    """Have the kernel send a signal when the parent of this process ends."""
    _prctl(_PR_SET_PDEATHSIG, number, "hear of the parent's end")


def make_undumpable() -> None:
    """Take /proc/<pid>/{mem,fd,...} of this process away from others of its uid."""
    _prctl(_PR_SET_DUMPABLE, 0, "hide worker")


def make_dumpable() -> None:
    """The opposite, for a command: without it a process may not even look at its own /proc files."""
    _prctl(_PR_SET_DUMPABLE, 1, "make_dumpable command")


def _unshare(namespaces: int) -> None:
    """New namespaces, among them one of users in which this process may mount; its uid stays."""
    uid, gid = os.getuid(), os.getgid()
    _check(_libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNS | namespaces), "new namespaces")
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def enter_mount_namespace() -> None:
    """A place for mounts that every later child inherits."""
    _unshare(0)
    mount("none", "/", "none", _MS_REC | _MS_PRIVATE, "")


def enter_sandbox_namespaces(network: bool) -> None:
    """New namespaces for this process; its next child is process 1 of the new process namespace.

    network: keep the network that this process has.
    """
    _unshare(_CLONE_NEWPID | _CLONE_NEWIPC | _CLONE_NEWUTS | _CLONE_NEWCGROUP | (0 if network else _CLONE_NEWNET))
    with open("/proc/sys/user/max_user_namespaces", "w") as file:
        file.write("0")  # no further user namespace below this one
    if network:
        return
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:  # tests may talk to themselves: loopback up
        request = struct.pack("16sH14x", b"lo", 0)
        flags = struct.unpack("16sH14x", fcntl.ioctl(sock, _SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | _IFF_UP))


def mount_private_file_systems(tmp_bytes: int) -> None:
    """Private, size-limited /tmp and /dev/shm; own /proc (processes only) and own terminals."""
    mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, "subset=pid")
    for target in ("/tmp", "/dev/shm"):
        mount_tmpfs(target, tmp_bytes)
    mount("devpts", "/dev/pts", "devpts", _MS_NOSUID | _MS_NOEXEC, "newinstance,ptmxmode=0666,mode=0620")


def drop_privileges(program: bytes) -> None:
    """Give up all capabilities for good and install_filter the system-call filter `program`."""
    set_no_new_privileges()
    for capability in range(_LAST_CAPABILITY + 1):
        if _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            break  # past the kernel's last capability
    header, nothing = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0), bytes(24)
    _check(_libc.capset(header, nothing), "drop capabilities")
    make_undumpable()
    install_filter(program)


def install_filter(program: bytes) -> None:
    """One more system-call filter."""
    filtered = _Program(len(program) // 8, program)
    _check(_libc.prctl(_PR_SET_SECCOMP, 2, ctypes.byref(filtered), 0, 0), "install_filter the system-call filter")


def install_notifying_filter(program: bytes) -> int:
    """One more filter, which hands calls to the holder of the returned descriptor (seccomp_unotify(2))."""
    filtered = _Program(len(program) // 8, program)
    number = _SECCOMP[os.uname().machine]
    listener = _libc.syscall(number, _SECCOMP_SET_MODE_FILTER, _SECCOMP_ASKING, ctypes.byref(filtered))
    _check(min(0, listener), "install_filter the filter that asks")
    return listener
