"""Namespaces, mounts and privileges of one sandbox, set up by the process that then runs in them.

bubblewrap has already created the outer sandbox: a read-only system, no files of the host, no capabilities, an
unprivileged uid. Inside it, each sandbox gets its own user, mount, process, network, ipc, uts and cgroup namespace and
its own workspace, and drops every right to change them. Plain system calls through ctypes: about 2 ms per sandbox.
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
_SECCOMP_SET_MODE_FILTER, _SECCOMP_ASKING = 1, 8 | 32  # new listener; a received call waits killably
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
TMP_FOLDERS = ("/tmp", "/dev/shm")  # for files of commands; private to one sandbox
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
    """mount(2). Raises OSError with the target."""
    arguments = (source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode())
    _check(_libc.mount(*arguments), f"mount {target}")


def mount_tmpfs(target: str, size: int) -> None:
    """Mounts a tmpfs, limited in bytes and in files."""
    # One inode costs about 1 KiB of kernel memory that `size` does not count.
    options = f"size={size},nr_inodes={max(256, size // 4096)},mode=0755"
    mount("tmpfs", target, "tmpfs", _MS_NOSUID | _MS_NODEV, options)


def mount_overlay(target: str, lower: list[str], layer: str) -> None:
    """Mounts an overlay of the trees `lower`, the topmost first, with its changes in the folder `layer`."""
    # userxattr: without it, overlays in a user namespace cannot delete folders of a tree. Renaming one is EXDEV with
    # it as well; mv and shutil.move copy it then.
    options = f"lowerdir={':'.join(lower)},upperdir={layer}/changes,workdir={layer}/work,userxattr"
    mount("overlay", target, "overlay", _MS_NOSUID | _MS_NODEV, options)


def bind_mount(folder: str, target: str) -> None:
    """Mounts a folder in a second place."""
    mount(folder, target, "none", _MS_BIND, "")


def hide_folder(target: str) -> None:
    """Hides what is in a folder; permanent after drop_privileges."""
    mount("tmpfs", target, "tmpfs", _MS_RDONLY | _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, "size=4k,nr_inodes=2,mode=0555")


def unmount(target: str) -> None:
    """Unmounts a file system as soon as it is unused."""
    _check(_libc.umount2(target.encode(), _MNT_DETACH), f"unmount {target}")


def become_subreaper() -> None:
    """Makes this process the parent of descendants whose parent has ended."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1, "become subreaper")


def set_no_new_privileges() -> None:
    """Forbids this process and its children to gain privileges by executing programs."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1, "no new privileges")


def set_parent_death_signal(number: int) -> None:
    """Has the kernel send a signal to this process when its parent ends."""
    _prctl(_PR_SET_PDEATHSIG, number, "hear of the parent's end")


def make_undumpable() -> None:
    """Closes /proc/<pid>/{mem,fd,...} of this process to other processes of its uid."""
    _prctl(_PR_SET_DUMPABLE, 0, "hide worker")


def make_dumpable() -> None:
    """Opens them again, for a command: a process that is not dumpable cannot read its own /proc files."""
    _prctl(_PR_SET_DUMPABLE, 1, "show command")


def _unshare(namespaces: int) -> None:
    """Enters new namespaces, with a user namespace in which this process may mount; its uid stays the same."""
    uid, gid = os.getuid(), os.getgid()
    _check(_libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNS | namespaces), "new namespaces")
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def enter_mount_namespace() -> None:
    """Enters a mount namespace whose mounts all later children inherit."""
    _unshare(0)
    mount("none", "/", "none", _MS_REC | _MS_PRIVATE, "")


def enter_sandbox_namespaces(network: bool) -> None:
    """Enters the namespaces of a sandbox; the next child is process 1 of the new process namespace.

    network: keep the network of this process.
    """
    _unshare(_CLONE_NEWPID | _CLONE_NEWIPC | _CLONE_NEWUTS | _CLONE_NEWCGROUP | (0 if network else _CLONE_NEWNET))
    with open("/proc/sys/user/max_user_namespaces", "w") as file:
        file.write("0")  # no further user namespace below this one
    if network:
        return
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:  # bring up loopback, which tests may use
        request = struct.pack("16sH14x", b"lo", 0)
        flags = struct.unpack("16sH14x", fcntl.ioctl(sock, _SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | _IFF_UP))


def mount_private_file_systems(tmp_bytes: int) -> None:
    """Mounts a private, size-limited /tmp and /dev/shm, a /proc with processes only, and private terminals."""
    mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, "subset=pid")
    for target in TMP_FOLDERS:
        mount_tmpfs(target, tmp_bytes)
    mount("devpts", "/dev/pts", "devpts", _MS_NOSUID | _MS_NOEXEC, "newinstance,ptmxmode=0666,mode=0620")


def drop_privileges(program: bytes) -> None:
    """Drops all capabilities for good and installs the seccomp filter `program`."""
    set_no_new_privileges()
    for capability in range(_LAST_CAPABILITY + 1):
        if _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            break  # beyond the last capability of the kernel
    header, nothing = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0), bytes(24)
    _check(_libc.capset(header, nothing), "drop capabilities")
    make_undumpable()
    install_filter(program)


def install_filter(program: bytes) -> None:
    """Installs one more seccomp filter."""
    filtered = _Program(len(program) // 8, program)
    _check(_libc.prctl(_PR_SET_SECCOMP, 2, ctypes.byref(filtered), 0, 0), "install the system-call filter")


def install_notifying_filter(program: bytes) -> int:
    """Installs one more filter, which hands calls to the holder of the returned descriptor (seccomp_unotify(2))."""
    filtered = _Program(len(program) // 8, program)
    number = _SECCOMP[os.uname().machine]
    listener = _libc.syscall(number, _SECCOMP_SET_MODE_FILTER, _SECCOMP_ASKING, ctypes.byref(filtered))
    _check(min(0, listener), "install the filter that asks")
    return listener
