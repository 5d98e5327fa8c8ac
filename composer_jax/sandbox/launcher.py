"""Starts bubblewrap for a pool and outlives nothing. Run as a plain file; standard library only.

Its argument is one JSON object: {"home", "bwrap", "options", "folders", "trees", "closing", "command", "uid"}. It does
what must happen between the trainer and bubblewrap: as root it becomes `uid` first (the process limit is not enforced
for root, and root's files would stay readable through any hole), after opening, in a mount namespace of its own,
the folders that this uid might not be able to reach (an interpreter under /root, say). It then stays, for two
reasons: bubblewrap dies with its parent *thread*, which must be one that lives as long as the pool; and when the
trainer closes fd 0, by intent or by dying, it kills everything. If it was by dying, the folder `trees` goes as well.
"""

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
DISMISSED = 9  # exit code of a zygote that was told to go

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> int:
    """Start, watch, end; returns bubblewrap's exit code."""
    plan = json.loads(sys.argv[1])
    owner = os.pidfd_open(os.getppid())
    above, trees = os.open(os.path.dirname(plan["trees"]), os.O_PATH), os.path.basename(plan["trees"])
    folders, home = plan["folders"], plan["home"]
    if plan["uid"] is not None:
        try:
            *shown, home = reachable_by([*folders.values(), home], plan["uid"])
            folders = dict(zip(folders, shown, strict=True))
        except OSError:
            pass  # root without the right to mount: the folders may be readable as they are
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
    """Until a child, the zygote or what it is in, has ended, by itself or because the trainer has; its exit code."""
    end = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(end, select.POLLIN)
    poll.register(0, 0)  # reports hang-up only: the messages on fd 0 are the zygote's
    if not any(fd == end for fd, _ in poll.poll()):
        poll.unregister(0)
        if not poll.poll(GRACE_MS):  # the zygote, too, sees the trainer go; when it ends, all is gone before bubblewrap
            os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) & 0xFF


def remove_if_left(name: str, above: int, owner: int) -> None:
    """Removes a folder that its owner will not remove any more.

    above: the open folder that it is in, whose path may be out of sight by now. owner: descriptor of a process. Its
    files close shortly before it is gone, hence the wait.
    """
    if select.select([owner], [], [], GRACE_MS / 1000)[0]:
        shutil.rmtree(name, ignore_errors=True, dir_fd=above)


def reachable_by(folders: list[str], uid: int, changing: Collection[str] = ()) -> list[str]:
    """Show root's `folders` to `uid` below a private /tmp; returns their new paths.

    There nothing above a folder is closed, and where the kernel can (5.12 and later), root's files appear to belong
    to `uid`, so that an installation made with a strict umask works too. The views are read-only, but for those of the
    folders in `changing`, which are shown as they are.
    """
    _check(_libc.unshare(CLONE_NEWNS))
    _mount("none", "/", None, MS_REC | MS_PRIVATE)
    owners = _owner_map(uid)
    sources = [os.open(folder, os.O_PATH | os.O_DIRECTORY) for folder in folders]  # some may lie below /tmp
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
    """A user namespace, as a descriptor, in which root is `uid` of the outside."""
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
    """False on a kernel or a file system that cannot map owners."""
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
    """Drop to `uid` with a group of the same number and no others."""
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)


if __name__ == "__main__":
    sys.exit(main())
