"""The metadata of a repository's own package, as its installation would have them, for code that reads them.

importlib.metadata finds a folder NAME.dist-info in any folder of sys.path, and the root of a workspace is one. Nothing
of the repository runs to make it: what a build would compute (a version from tags) is read as far as files say it.
"""

import ast
import configparser
import email.message
import email.parser
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from composer_jax.git import GitError, run_git

_VERSION_FILES = ("__init__.py", "_version.py", "version.py", "__about__.py", "__version__.py", "_about.py")
_VERSION_NAMES = ("__version__", "version", "VERSION", "__VERSION__")
_UNKNOWN_VERSION = "0"
_LOADED_BY_TEST_FRAMEWORKS = ("pytest11", "hypothesis")
"""Groups of entry points without which a suite runs, and by which the tested code would run before the tests do."""
_KEPT_HEADERS = ("Summary", "Requires-Python", "Requires-Dist", "Provides-Extra")


@dataclass(frozen=True)
class PackageMetadata:
    """name, version, other headers: of METADATA. entry_points: group -> name -> object."""

    name: str
    version: str
    headers: tuple[tuple[str, str], ...] = ()
    entry_points: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


def write_metadata(repository: Path, root: Path) -> None:
    """Writes NAME-VERSION.dist-info below `root`, a copy of `repository`, whose files say the name; else nothing."""
    metadata = read_metadata(repository)
    if metadata is None:
        return
    folder = root / f"{re.sub(r'[^A-Za-z0-9]+', '_', metadata.name)}-{metadata.version}.dist-info"
    folder.mkdir()
    headers = [("Metadata-Version", "2.1"), ("Name", metadata.name), ("Version", metadata.version), *metadata.headers]
    (folder / "METADATA").write_text("".join(f"{key}: {value}\n" for key, value in headers), encoding="utf-8")
    groups = {
        group: entries for group, entries in metadata.entry_points.items() if group not in _LOADED_BY_TEST_FRAMEWORKS
    }
    sections = [
        f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in entries.items())
        for group, entries in groups.items()
    ]
    (folder / "entry_points.txt").write_text("\n".join(sections), encoding="utf-8")


def read_metadata(repository: Path) -> PackageMetadata | None:
    """Metadata from PKG-INFO (source distributions), pyproject.toml, setup.cfg or setup.py; None without a name."""
    project = _read_toml(repository / "pyproject.toml")
    setup_cfg = _read_ini(repository / "setup.cfg")
    standard, poetry = project.get("project", {}), project.get("tool", {}).get("poetry", {})
    info = _read_pkg_info(repository)
    setup_py = _setup_arguments(repository / "setup.py")
    sources = (
        {"name": info["Name"], "version": info["Version"]} if info is not None else {},
        standard,
        poetry,
        project.get("tool", {}).get("flit", {}).get("metadata", {}),
        setup_cfg.get("metadata", {}),
        setup_py,
    )
    name = next((str(source["name"]) for source in sources if source.get("name")), None)
    if name is None:
        return None
    stated = (str(source.get("version") or "") for source in sources)
    version = next((text for text in stated if re.match(r"[vV]?\d", text)), None)
    entry_points = _read_entry_points(repository, standard, poetry, setup_cfg)
    headers = () if info is None else tuple((key, value) for key, value in info.items() if key in _KEPT_HEADERS)
    return PackageMetadata(
        name, (version or _version_in_code(repository) or _tagged_version(repository)).strip(), headers, entry_points
    )


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


class _CaseSensitiveParser(configparser.RawConfigParser):
    """Keeps the case of names, which those of entry points need."""

    def optionxform(self, optionstr: str) -> str:
        return optionstr


def _read_ini(path: Path) -> dict[str, dict[str, str]]:
    parser = _CaseSensitiveParser(strict=False)
    try:
        parser.read(path, encoding="utf-8")
    except (configparser.Error, UnicodeDecodeError):
        return {}
    return {section: dict(parser[section]) for section in parser.sections()}


def _info_folders(repository: Path) -> list[Path]:
    patterns = ("*.egg-info", "src/*.egg-info", "lib/*.egg-info")
    return [repository, *(folder for pattern in patterns for folder in sorted(repository.glob(pattern)))]


def _read_pkg_info(repository: Path) -> email.message.Message | None:
    for folder in _info_folders(repository):
        try:
            text = (folder / "PKG-INFO").read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        info = email.parser.HeaderParser().parsestr(text)
        if info["Name"] and info["Version"]:
            return info
    return None


def _read_entry_points(
    repository: Path, standard: Mapping[str, Any], poetry: Mapping[str, Any], setup_cfg: Mapping[str, Mapping[str, str]]
) -> dict[str, dict[str, str]]:
    for folder in _info_folders(repository):
        if groups := _read_ini(folder / "entry_points.txt"):
            return groups
    groups: dict[str, Any] = {
        "console_scripts": standard.get("scripts") or poetry.get("scripts"),
        "gui_scripts": standard.get("gui-scripts"),
        **poetry.get("plugins", {}),
        **standard.get("entry-points", {}),
    }
    for group, text in setup_cfg.get("options.entry_points", {}).items():
        pairs = (line.partition("=") for line in text.splitlines() if "=" in line)
        groups[group] = {name.strip(): target.strip() for name, _, target in pairs}
    return {
        group: {name: target for name, target in entries.items() if isinstance(target, str)}
        for group, entries in groups.items()
        if isinstance(entries, Mapping)
    }


def _setup_arguments(path: Path) -> dict[str, str]:
    """The texts among the arguments of setup() in a setup.py."""
    for node in ast.walk(_parse(path)):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == "setup":
            pairs = ((word.arg, word.value) for word in node.keywords)
            return {
                name: value.value
                for name, value in pairs
                if name and isinstance(value, ast.Constant) and isinstance(value.value, str)
            }
    return {}


def _parse(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ast.Module([], [])


def _version_in_code(repository: Path) -> str | None:
    """The version that a module at the top of the repository, or a file of a package there, states as a text."""
    return next((version for path in _version_files(repository) for version in _versions(_parse(path))), None)


def _version_files(repository: Path) -> Iterator[Path]:
    for folder in (repository, repository / "src"):
        for package in sorted(folder.glob("*/__init__.py")):
            yield from (package.with_name(name) for name in _VERSION_FILES)
        yield from sorted(path for path in folder.glob("*.py") if path.stem not in ("setup", "conftest"))


def _versions(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
        value = getattr(node, "value", None)
        if (
            any(isinstance(target, ast.Name) and target.id in _VERSION_NAMES for target in targets)
            and isinstance(value, ast.Constant)
            and isinstance(value.value, str)
            and re.match(r"\d", value.value)
        ):
            yield value.value


def _tagged_version(repository: Path) -> str:
    """The version in the newest tag before HEAD."""
    try:
        tag = run_git("describe", "--tags", "--abbrev=0", cwd=repository).decode(errors="replace")
    except GitError:
        return _UNKNOWN_VERSION
    match = re.search(r"\d+(\.\d+)*\S*", tag)
    return match[0] if match else _UNKNOWN_VERSION
