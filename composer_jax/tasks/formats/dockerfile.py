"""Builds the workspace of simple Dockerfiles without a container: a plain base image and copied files.

A sandbox has the programs of its host and shows its workspace as /workspace, /app and /testbed. A Dockerfile needs no
image iff each of its lines

- starts from Python, Debian or Ubuntu (or from Terminal-Bench's images of them),
- copies files of its own folder below one of these three folders,
- makes one of the three the working directory, or creates folders in it,
- sets a variable that has no effect in a sandbox,
- installs Python packages at stated versions that are already in the user's folder (nothing is downloaded), or
- sets a property of the image that its commands cannot observe.
"""

import fnmatch
import importlib.metadata
import json
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from composer_jax.errors import UserError
from composer_jax.sandbox import WORKSPACE_PATHS

_BASES = re.compile(r"(?:docker\.io/)?(?:library/)?(?:python|debian|ubuntu)(?::[\w.-]+)?(?:@sha256:[0-9a-f]+)?")
_TB_BASES = re.compile(r"ghcr\.io/laude-institute/t-bench/(?:ubuntu|python|debian)[\w.-]*(?::[\w.-]+)?")
_HARMLESS_VARIABLES = re.compile(
    r"PYTHONDONTWRITEBYTECODE|PYTHONUNBUFFERED|DEBIAN_FRONTEND|PIP_\w+|LANG|LC_\w+|TZ|TERM"
)
_WITHOUT_EFFECT = ("LABEL", "MAINTAINER", "EXPOSE", "STOPSIGNAL")
_IDLE_COMMANDS = ("sleep", "bash", "sh", "/bin/bash", "/bin/sh", "tail")  # a CMD that only keeps the container alive
_INSTALLS = re.compile(r"(?:^|[\s;&|(])(?:apt|apt-get|apk|dnf|yum|curl|wget|uv|uvx|pipx?|pip3|npm|npx|conda)\s")
_PIP = re.compile(r"(?:python3? -m )?pip3? install")
_PIP_FLAGS = ("--no-cache-dir", "--no-cache", "-q", "--quiet", "--upgrade", "-U", "--break-system-packages")
_PINNED = re.compile(r"([A-Za-z0-9._-]+)(?:\[[\w,.-]*\])?==([\w.!+-]+)")


class NeedsContainer(Exception):
    """Raised for a line that has no equivalent without a container."""


@dataclass(frozen=True)
class _Line:
    number: int
    word: str
    rest: str


def build_workspace(dockerfile: Path, target: Path, packages: Path | None) -> None:
    """Fills the folder `target` with the contents of the image's workspace.

    packages: the folder of installed packages. Raises NeedsContainer with the first line that needs an image, UserError
    for a file that is not a Dockerfile or copies missing files.
    """
    root = None
    working = PurePosixPath("/")
    for line in _lines(dockerfile):
        try:
            if line.word in ("COPY", "ADD", "WORKDIR", "RUN"):
                line_root, working = _execute(line, dockerfile.parent, target, working, packages)
                if line_root is not None and root not in (None, line_root):
                    raise NeedsContainer(f"it uses {line_root} as well as {root}, which are one folder in a sandbox")
                root = line_root or root
            else:
                _check(line)
        except NeedsContainer as why:
            text = f"{line.word} {line.rest}"
            text = text if len(text) <= 100 else f"{text[:97]}..."
            raise NeedsContainer(f"{dockerfile}, line {line.number}: {text} ({why})") from None
    if root is not None and str(working) != root:
        raise NeedsContainer(f"{dockerfile}: commands would start in {working}, but its files are in {root}")


def check_script(script: Path) -> None:
    """Raises NeedsContainer for a script that installs something: only root in its own image can do that."""
    for number, line in enumerate(script.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        if _INSTALLS.search(line.partition("#")[0]):
            raise NeedsContainer(f"{script}, line {number}: {line.strip()[:100]} (it installs something)")


def _lines(dockerfile: Path) -> Iterator[_Line]:
    """Yields the instructions, with continuation lines joined."""
    try:
        if dockerfile.is_symlink():
            raise OSError("it is a link")
        text = dockerfile.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"{dockerfile} cannot be read: {error}") from error
    joined, start = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        start = start if joined else number
        joined += line.strip()
        if joined.endswith("\\"):
            joined = joined[:-1] + " "
            continue
        word, _, rest = joined.partition(" ")
        if not word.isalpha():
            raise UserError(f"{dockerfile}, line {start} is not an instruction of a Dockerfile: {joined[:80]!r}")
        yield _Line(start, word.upper(), rest.strip())
        joined = ""
    if not start:
        raise UserError(f"{dockerfile} is empty; it needs at least FROM")


def _check(line: _Line) -> None:
    """Raises NeedsContainer unless a line that creates no files has no effect in a sandbox."""
    if line.word == "FROM":
        if not (_BASES.fullmatch(line.rest) or _TB_BASES.fullmatch(line.rest)):
            raise NeedsContainer("only one stage based on Python, Debian or Ubuntu needs no image")
    elif line.word in ("ENV", "ARG"):
        names = re.findall(r"(?:^|\s)(\w+)=", line.rest) or line.rest.split()[:1]
        for name in names:
            if not _HARMLESS_VARIABLES.fullmatch(name):
                raise NeedsContainer(f"the variable {name} may matter")
    elif line.word in ("CMD", "ENTRYPOINT"):
        if not (words := _words(line.rest)) or words[0] not in _IDLE_COMMANDS:
            raise NeedsContainer("it starts something")
    elif line.word not in _WITHOUT_EFFECT:
        raise NeedsContainer("only an image can do this")


def _execute(
    line: _Line, context: Path, target: Path, working: PurePosixPath, packages: Path | None
) -> tuple[str | None, PurePosixPath]:
    """Executes an instruction. Returns the root it used, or None, and the working directory after it."""
    if line.word == "WORKDIR":
        working = working / _words(line.rest)[0]
        root, inner = _split(working)
        (target / inner).mkdir(parents=True, exist_ok=True)
        return root, working
    if line.word == "RUN":
        words = _words(line.rest)
        if words[:1] == ["mkdir"] and not re.search(r"[;&|<>$`*?]", line.rest):
            roots = set()
            for path in (word for word in words[1:] if word != "-p"):
                root, inner = _split(working / path)
                (target / inner).mkdir(parents=True, exist_ok=True)
                roots.add(root)
            if len(roots) == 1:
                return roots.pop(), working
        _check_pip(line.rest, packages)
        return None, working
    *sources, destination = _words(line.rest)
    if any(word.startswith("--") for word in sources) or not sources:
        raise NeedsContainer("only COPY with sources and a destination needs no image")
    if line.word == "ADD" and any(re.search(r"://|@|\.(?:tar|tgz|gz|bz2|xz)\b", source) for source in sources):
        raise NeedsContainer("it downloads or unpacks")
    root, inner = _split(working / destination)
    _copy(sources, context, target, inner, destination.endswith(("/", ".")))
    return root, working


def _split(path: PurePosixPath) -> tuple[str, PurePosixPath]:
    """Splits a path below one of the roots into the root and the rest."""
    if ".." not in path.parts and "$" not in str(path):
        for root in WORKSPACE_PATHS:
            if path.is_relative_to(root):
                return root, path.relative_to(root)
    raise NeedsContainer(f"{path} is not below {', '.join(WORKSPACE_PATHS)}")


def _copy(sources: list[str], context: Path, workspace: Path, inner: PurePosixPath, into: bool) -> None:
    """Copies into `inner` of the workspace. Neither reads nor writes follow links."""
    target = workspace / inner
    for pattern in sources:
        if ".." in PurePosixPath(pattern).parts or "$" in pattern:
            raise NeedsContainer("a source is not a plain path in the folder of the Dockerfile")
        pattern = str(PurePosixPath("/", pattern).relative_to("/"))
        matches = [context] if pattern == "." else sorted(context.glob(pattern))
        if not matches:
            raise UserError(f"{context} has no {pattern!r}, which its Dockerfile copies; add it")
        ignored = _ignored(context)
        for source in matches:
            if source != context and not source.parent.resolve().is_relative_to(context.resolve()):
                raise NeedsContainer("a source is behind a link that leads out of the folder")
            if source.is_dir() and not source.is_symlink():
                shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True, ignore=ignored)
            else:
                destination = (
                    target / source.name if into or len(sources) + len(matches) > 2 or target.is_dir() else target
                )
                destination.parent.mkdir(parents=True, exist_ok=True)
                destination.unlink(missing_ok=True)
                shutil.copy2(source, destination, follow_symlinks=False)
            _check_links(workspace)


def _check_links(workspace: Path) -> None:
    """Raises NeedsContainer if a link leads out of the workspace: the next copy would follow it."""
    for path in workspace.rglob("*"):
        if path.is_symlink() and not path.resolve().is_relative_to(workspace.resolve()):
            raise NeedsContainer(f"the link {path.relative_to(workspace)} leads out of the workspace")


def _ignored(context: Path) -> Callable[[str, list[str]], set[str]]:
    """Returns the `ignore` argument of shutil.copytree for the patterns of .dockerignore."""
    file = context / ".dockerignore"
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    patterns = [line.strip().strip("/") for line in lines if line.strip() and not line.startswith("#")]
    if any(pattern.startswith("!") for pattern in patterns):
        raise NeedsContainer("its .dockerignore has exceptions")

    def ignore(folder: str, names: list[str]) -> set[str]:
        above = Path(folder).relative_to(context)
        return {name for name in names if any(fnmatch.fnmatch(str(above / name), pattern) for pattern in patterns)}

    return ignore


def _check_pip(command: str, packages: Path | None) -> None:
    """Raises NeedsContainer unless all packages that the command installs are in the folder of packages."""
    if not (match := _PIP.match(command)):
        raise NeedsContainer("only mkdir and pip install of pinned packages need no image")
    requirements = [word for word in _words(command[match.end() :]) if word not in _PIP_FLAGS]
    installed = {}
    if packages is not None:
        for distribution in importlib.metadata.distributions(path=[str(packages)]):
            installed[_canonical(distribution.metadata["Name"])] = distribution.version
    for word in requirements:
        pinned = _PINNED.fullmatch(word)
        if pinned is None:
            raise NeedsContainer(f"{word} is not a package at a stated version")
        if installed.get(_canonical(pinned[1])) != pinned[2]:
            where = f"in {packages}" if packages else "installed: no folder of packages was given"
            raise NeedsContainer(f"{word} is not {where}")


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _words(text: str) -> list[str]:
    """Splits an instruction in JSON or shell form into its words, at least one."""
    try:
        words = json.loads(text) if text.startswith("[") else shlex.split(text)
    except (ValueError, RecursionError):
        words = None
    if not isinstance(words, list) or not words or not all(isinstance(word, str) and word for word in words):
        raise NeedsContainer("its words cannot be parsed")
    return words
