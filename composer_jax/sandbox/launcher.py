"""Starts bubblewrap for a pool and ends with it. Run as a plain file; standard library only.

Its argument is one JSON object: {"home", "bwrap", "options", "folders", "trees", "closing", "command", "uid"}. As root
it drops to `uid`, because the kernel does not enforce the process limit for root and an escape would have the files of
root. Before that it opens, in a mount namespace of its own, the folders that this uid may not reach (for example an
interpreter under /root). The launcher keeps running for two reasons: bubblewrap dies with its parent *thread*, which
must live as long as the pool; and when fd 0 closes, because the trainer closed it or died, the launcher kills
everything. If the trainer died, the launcher also removes the folder `trees`.
"""

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import struct
import sys
from collections.abc import Collection

CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
OPEN_TREE, MOVE_MOUNT, MOUNT_SETATTR = 428, 429, 442  # system calls; the numbers are those of every architecture
OPEN_TREE_CLONE, MOVE_MOUNT_EMPTY_PATH, AT_EMPTY_PATH = 1, 4, 0x1000
MOUNT_ATTR_RDONLY, MOUNT_ATTR_IDMAP = 1, 0x00100000

GRACE_MS = 1000
DISMISSED = 9  # exit code of a zygote that was asked to end

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> int:
    """Starts bubblewrap, watches it, cleans up; returns its exit code."""
    plan = json.loads(sys.argv[1])
    owner = os.pidfd_open(os.getppid())
    above, trees = os.open(os.path.dirname(plan["trees"]), os.O_PATH), os.path.basename(plan["trees"])
    folders, home = plan["folders"], plan["home"]
    if plan["uid"] is not None:
        with contextlib.suppress(OSError):  # root without the right to mount: the folders may be readable as they are
            *mounted, home = reachable_by([*folders.values(), home], plan["uid"])
            folders = dict(zip(folders, mounted, strict=True))
    bwrap = os.path.join(home, plan["bwrap"])
    pid = os.fork()
    if pid == 0:
        try:
            become(plan["uid"])
            binds = [word for inside, outside in folders.items() for word in ("--ro-bind", outside, inside)]
            os.execv(bwrap, ["bwrap", *plan["options"], *binds, *plan["closing"], "--", *plan["command"]])
        except OSError as error:
            print(f"launcher: {bwrap}: {error}", file=sys.stderr)
        finally:
            os._exit(127)
    code = watch(pid)
    if code != DISMISSED:
        remove_if_left(trees, above, owner)
    return code


def watch(pid: int) -> int:
    """Waits for the end of a child (zygote or bubblewrap) or of the trainer; returns the exit code of the child."""
    end = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(end, select.POLLIN)
    poll.register(0, 0)  # reports hang-up only: the messages on fd 0 are the zygote's
    if not any(fd == end for fd, _ in poll.poll()):
        poll.unregister(0)
        if not poll.poll(GRACE_MS):  # the zygote sees the end of the trainer, too, and ends its sandboxes itself
            os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) & 0xFF


def remove_if_left(name: str, above: int, owner: int) -> None:
    """Removes a folder whose owner has ended.

    above: descriptor of the folder that it is in, whose path may be hidden by now. owner: pidfd. A process closes its
    files shortly before it ends, hence the wait.
    """
    if select.select([owner], [], [], GRACE_MS / 1000)[0]:
        shutil.rmtree(name, ignore_errors=True, dir_fd=above)


def reachable_by(folders: list[str], uid: int, changing: Collection[str] = ()) -> list[str]:
    """Mounts `folders` of root below a private /tmp, readable for `uid`; returns their new paths.

    No folder above them is closed there. From Linux 5.12, files of root appear to belong to `uid`, so an installation
    made with a strict umask works too. The mounts are read-only except for the folders in `changing`, which are mounted
    as they are.
    """
    _check(_libc.unshare(CLONE_NEWNS))
    _mount("none", "/", None, MS_REC | MS_PRIVATE)
    owners = _owner_map(uid)
    sources = [os.open(folder, os.O_PATH | os.O_DIRECTORY) for folder in folders]  # some may be below /tmp
    _mount("tmpfs", "/tmp", b"tmpfs", 0, b"mode=0755,size=64k")
    places = []
    for folder, source in zip(folders, sources, strict=True):
        places.append(f"/tmp/{source}/{os.path.basename(folder)}")
        os.makedirs(places[-1])
        os.chmod(f"/tmp/{source}", 0o755)
        if folder in changing or not _mounted_as(source, places[-1], owners):
            _mount(f"/proc/self/fd/{source}", places[-1], None, MS_BIND | MS_REC)
        os.close(source)
    os.close(owners)
    return places


def _check(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def _mount(source: str, target: str, kind: bytes | None, flags: int, options: bytes | None = None) -> None:
    _check(_libc.mount(source.encode(), target.encode(), kind, ctypes.c_ulong(flags), options))


def _owner_map(uid: int) -> int:
    """Returns a descriptor of a user namespace in which root is `uid` of the outside."""
    receive, send = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            _check(_libc.unshare(CLONE_NEWUSER))
            os.write(send, b"x")
            signal.pause()
        finally:
            os._exit(1)
    try:
        os.close(send)
        os.read(receive, 1)
        for kind in ("uid", "gid"):
            with open(f"/proc/{pid}/{kind}_map", "w") as file:
                file.write(f"0 {uid} 1")
        return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(receive)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _mounted_as(source: int, target: str, owners: int) -> bool:
    """Mounts a folder with mapped owners; returns False on a kernel or a file system that cannot."""
    try:
        tree = _check(_libc.syscall(OPEN_TREE, source, b"", OPEN_TREE_CLONE | os.O_CLOEXEC | AT_EMPTY_PATH))
    except OSError:
        return False
    try:
        attributes = struct.pack("=QQQQ", MOUNT_ATTR_RDONLY | MOUNT_ATTR_IDMAP, 0, 0, owners)
        _check(_libc.syscall(MOUNT_SETATTR, tree, b"", AT_EMPTY_PATH, attributes, len(attributes)))
        _check(_libc.syscall(MOVE_MOUNT, tree, b"", -100, target.encode(), MOVE_MOUNT_EMPTY_PATH))  # -100: AT_FDCWD
        return True
    except OSError:
        return False
    finally:
        os.close(tree)


def become(uid: int | None) -> None:
    """Drops to `uid`, with the group of the same number and no others."""
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)


if __name__ == "__main__":
    sys.exit(main())
