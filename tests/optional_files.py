"""Prints the test files that skip a test, or branch on what may not be installed. .ci/bare runs them.

    python tests/optional_files.py

It reads syntax trees and imports nothing, so any Python will do. Its hook, which tests/conftest.py imports, fails a run
in which another file skips a test.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = {
    *("pytest.skip", "pytest.importorskip", "pytest.mark.skip", "pytest.mark.skipif"),
    *("pytest.mark.parity", "pytest.mark.tpu", "libtpu"),  # two markers and a fixture of tests/conftest.py
    *("importlib.util.find_spec", "shutil.which", "ImportError", "ModuleNotFoundError"),
}


def optional_files(root: Path) -> list[Path]:
    """Returns paths relative to `root`, a checkout, in order.

    A file counts if it has one of NAMES, or if such a file is among those of tests/ that it imports and the conftest.py
    beside and above it. tests/conftest.py itself does not count: its markers and its fixture are in NAMES.
    """
    files = [path.relative_to(root) for path in (root / "tests").rglob("*.py")]
    names = {path: set(_names(ast.parse((root / path).read_bytes()))) for path in files}
    modules = {".".join(path.with_suffix("").parts): path for path in files}
    uses = {
        path: {modules[name] for name in names[path] & modules.keys()}
        | {folder / "conftest.py" for folder in path.parents}
        for path in files
    }
    optional = {path for path in files if names[path] & NAMES} - {Path("tests/conftest.py")}
    while more := {path for path in uses.keys() - optional if uses[path] & optional} - {Path("tests/conftest.py")}:
        optional |= more
    return sorted(path for path in optional if path.name.startswith("test_"))


def _names(tree: ast.AST) -> Iterator[str]:
    """Yields names, arguments, attributes with what is before their dots, imported modules, and the string "libtpu"."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.arg(arg=name) | ast.Constant(value="libtpu" as name):
                yield name
            case ast.Attribute():
                yield ast.unparse(node)
            case ast.Import(names=aliases):
                yield from (alias.name for alias in aliases)
            case ast.ImportFrom(module=str(module), names=aliases):
                yield from (module, *(f"{module}.{alias.name}" for alias in aliases))


def pytest_sessionfinish(session: Any) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or not (skipped := reporter.stats.get("skipped")):  # a worker of xdist has none
        return
    files = {Path(report.nodeid.partition("::")[0]) for report in skipped}
    for path in sorted(files.difference(optional_files(session.config.rootpath))):
        reporter.write_line(f"{path} skips a test, but tests/optional_files.py does not find it: add a name", red=True)
        session.exitstatus = 1


if __name__ == "__main__":
    print(*optional_files(Path(__file__).parents[1]), sep="\n")
