"""The metadata of a repository's own package, as its installation would have them, for code that reads them.

importlib.metadata finds a folder NAME.dist-info in any folder of sys.path, and the root of a workspace is one. Nothing
of the repository runs to make it: a version that a build would compute is read where a file or a tag states it.
"""

import ast
import configparser
import email.message
import email.parser
import itertools
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
_NAME = re.compile(r"[ -~]{1,100}")  # name and version become the name of a folder
_VERSION = re.compile(r"[vV]?\d[\w.+!-]{0,60}", re.ASCII)
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
    tool = _table(project.get("tool"))
    standard, poetry, flit = (
        _table(table)
        for table in (project.get("project"), tool.get("poetry"), _table(tool.get("flit")).get("metadata"))
    )
    dynamic = _table(_table(tool.get("setuptools")).get("dynamic"))
    stated_in_cfg = {key.lower(): value for key, value in setup_cfg.get("metadata", {}).items()}  # as setuptools reads
    info = _read_pkg_info(repository)
    setup_py = _setup_arguments(repository / "setup.py")
    sources = (
        {"name": info["Name"], "version": info["Version"]} if info is not None else {},
        standard,
        poetry,
        flit,
        stated_in_cfg,
        setup_py,
    )
    names = (source.get("name") for source in sources)
    name = next((text for text in names if isinstance(text, str) and _NAME.fullmatch(text)), None)
    if name is None:
        return None
    files = (*_files_of_cfg(stated_in_cfg.get("version", "")), *_files_of_toml(dynamic.get("version")))
    versions = itertools.chain(  # the later ones take the longest to read
        (str(source.get("version") or "") for source in sources),
        (_read_text(repository, file) for file in files),
        _versions_in_code(repository),
        _tagged_versions(repository),
    )
    version = next((text.strip() for text in versions if _VERSION.fullmatch(text.strip())), _UNKNOWN_VERSION)
    entry_points = _read_entry_points(repository, standard, poetry, setup_cfg)
    headers = () if info is None else tuple((key, value) for key, value in info.items() if key in _KEPT_HEADERS)
    return PackageMetadata(name, version, headers, entry_points)


def _table(value: object) -> Mapping[str, Any]:
    """The value if it is a table, else an empty one: files of a repository may hold anything."""
    return value if isinstance(value, Mapping) else {}


def _files_of_cfg(version: str) -> list[str]:
    """The files in `version = file: VERSION, ...` of a setup.cfg."""
    kind, _, files = version.partition(":")
    return [file.strip() for file in files.split(",")] if kind.strip() == "file" else []


def _files_of_toml(version: object) -> list[str]:
    """The files in `version = {file = "VERSION"}` of a pyproject.toml; a list is allowed, too."""
    files = _table(version).get("file")
    return [file for file in (files if isinstance(files, list) else [files]) if isinstance(file, str)]


def _read_text(repository: Path, file: str) -> str:
    """The text of a file of the repository; empty for one that cannot be read or lies elsewhere."""
    try:
        path = (repository / file).resolve()
        return path.read_text(encoding="utf-8-sig") if path.is_relative_to(repository.resolve()) else ""
    except (OSError, ValueError, RuntimeError):  # the last one: a loop of links
        return ""


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError):
        return {}


class _CaseSensitiveParser(configparser.RawConfigParser):
    """Keeps the case of names, which those of entry points need."""

    def optionxform(self, optionstr: str) -> str:
        return optionstr


def _read_ini(path: Path) -> dict[str, dict[str, str]]:
    parser = _CaseSensitiveParser(strict=False)
    try:
        parser.read(path, encoding="utf-8-sig")
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
        **_table(poetry.get("plugins")),
        **_table(standard.get("entry-points")),
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
    """The texts among the arguments of setup() in a setup.py, which may stand in a variable of the file."""
    tree = _parse(path)
    variables = dict(_assigned_texts(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == "setup":
            pairs = ((word.arg, _text_of(word.value, variables)) for word in node.keywords)
            return {name: text for name, text in pairs if name and text is not None}
    return {}


def _text_of(value: ast.expr | None, variables: Mapping[str, str]) -> str | None:
    if isinstance(value, ast.Name):
        return variables.get(value.id)
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else None


def _assigned_texts(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(variable, text) of every assignment of a text at the top of a module."""
    for node in tree.body:
        targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
        text = _text_of(getattr(node, "value", None), {})
        if text is not None:
            yield from ((target.id, text) for target in targets if isinstance(target, ast.Name))


def _parse(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):  # the last two: nested too deeply
        return ast.Module([], [])


def _versions_in_code(repository: Path) -> Iterator[str]:
    """The versions that modules at the top of the repository, and files of packages there, state as texts."""
    for path in _version_files(repository):
        for name, text in _assigned_texts(_parse(path)):
            if name in _VERSION_NAMES and text[:1].isdigit():
                yield text


def _version_files(repository: Path) -> Iterator[Path]:
    for folder in (repository, repository / "src"):
        for package in sorted(folder.glob("*/__init__.py")):
            yield from (package.with_name(name) for name in _VERSION_FILES)
        yield from sorted(path for path in folder.glob("*.py") if path.stem not in ("setup", "conftest"))


def _tagged_versions(repository: Path) -> Iterator[str]:
    """The version at the end of the newest tag before HEAD, such as 1.2 of pkg/v1.2."""
    try:
        tag = run_git("describe", "--tags", "--abbrev=0", cwd=repository).decode(errors="replace")
    except GitError:
        return
    if match := re.search(r"\d[\w.+!-]*$", tag.strip()):
        yield match[0]
