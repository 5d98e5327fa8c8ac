"""Starts the zygote of the landlock backend and ends with it. Run as a plain file; standard library only.

Its argument is one JSON object: {"folders", "executable", "shared", "environment", "path", "flags", "uid"}. As root
it drops to `uid` for the zygote, as launcher.py does for bubblewrap. It creates the folder of all workspaces. When the
zygote or the trainer has ended, it kills every process that is left and removes that folder.
"""

import contextlib
import json
import os
import signal
import sys
import tempfile
import time

if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import launcher
from inside import disk, landlock, layers, namespaces, processes

GRACE_S = 1.0  # for supervisors to kill their sandboxes, which is more reliable than a list of processes


def main() -> int:
    """Starts the zygote, watches it, cleans up; returns its exit code."""
    plan, owner = json.loads(sys.argv[1]), os.pidfd_open(os.getppid())
    trees = plan["folders"]["trees"]
    beside = os.open(os.path.dirname(trees), os.O_PATH)
    namespaces.become_subreaper()
    try:
        landlock.require_abi_version()
    except OSError as error:
        print(error, file=sys.stderr)
        return 1
    scratch = os.path.realpath(tempfile.mkdtemp(prefix="composer-sandboxes-"))
    above = os.open(os.path.dirname(scratch), os.O_PATH)  # its path may be hidden later
    places = {**plan["folders"], "scratch": scratch}
    try:
        if plan["uid"] is not None:
            os.chown(scratch, plan["uid"], plan["uid"])
            with contextlib.suppress(
                OSError
            ):  # root without the right to mount: the folders may be readable as they are
                mounted = launcher.reachable_by(list(places.values()), plan["uid"], changing=[scratch])
                places = dict(zip(places, mounted, strict=True))
        code = launcher.watch(start(plan, places))
        if code != launcher.DISMISSED:
            launcher.remove_if_left(os.path.basename(trees), beside, owner)
    finally:
        _end_all()
        disk.remove_contents(places["scratch"])
        os.rmdir(os.path.basename(scratch), dir_fd=above)
    return code


def start(plan: dict, places: dict[str, str]) -> int:
    """Starts the zygote with the paths of its folders; returns its pid."""
    executable = os.path.join(places.get("python", "/"), plan["executable"])
    programs = layers.link_interpreter(executable, places["scratch"], places["inside"])
    environment = {**plan["environment"], "PATH": ":".join([programs, os.path.dirname(executable), *plan["path"]])}
    if plan["shared"]:
        environment["LD_LIBRARY_PATH"] = os.path.join(os.path.dirname(os.path.dirname(executable)), "lib")
    file = os.path.join(places["inside"], "start.py")
    launching = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            launcher.become(plan["uid"])
            landlock.die_with_parent(launching, signal.SIGKILL)
            program = f"{programs}/python"
            os.execve(program, [program, *plan["flags"], file, json.dumps(places)], environment)
        except OSError as error:
            print(f"launcher: {executable}: {error}", file=sys.stderr)
        finally:
            os._exit(127)
    return pid


def _end_all() -> None:
    """Waits for the supervisors, which get a signal when the zygote ends, then kills every process that is left."""
    deadline = time.monotonic() + GRACE_S
    try:
        while time.monotonic() < deadline:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.002)
    except ChildProcessError:
        return
    processes.kill_all_descendants(at_once=False)


if __name__ == "__main__":
    sys.exit(main())
