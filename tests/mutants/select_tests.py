"""Which test files belong to a module of the library, the likeliest first.

A test file imports a module by its name, or by a name that the module's package takes from it (`from
composer_jax.sandbox import LocalSandboxPool` imports composer_jax.sandbox.local_pool). The files of a module are, in
this order and each once:

    those that import it
    those of its room, tests/ROOM for composer_jax/ROOM
    those of folders that are no room, such as tests/attacks, whose conftest.py imports the room or its fixtures

The first two are each sorted: test_router.py of router.py, then names that have the module's (test_router_replay.py),
then the nearest folder.
"""

import ast
import functools
import os
from pathlib import Path, PurePosixPath
from typing import NamedTuple

PACKAGE = "composer_jax"


class TestFiles(NamedTuple):
    """Paths from the root of the repository, the likeliest first."""

    importing: list[str]
    """Those that import the module."""
    others: list[str]
    """Those of its room, and of folders that test the room."""

    __test__ = False  # keeps pytest from collecting this class


def find_tests(module_file: str, root: Path) -> TestFiles:
    """Returns the test files of a module, given by its path from `root`, such as "composer_jax/models/router.py"."""
    path = PurePosixPath(module_file)
    module, room = ".".join(path.with_suffix("").parts), path.parts[1]

    def by_likelihood(file: Path) -> tuple[bool, bool, int, Path]:
        other_name = file.stem != f"test_{path.stem}", f"_{path.stem}_" not in f"_{file.stem}_"
        shared = os.path.commonprefix([path.parts[1:-1], file.relative_to(root / "tests").parts])
        return *other_name, -len(shared), file

    files = sorted(root.glob("tests/**/test_*.py"), key=by_likelihood)
    importing = [file for file in files if module in imported_modules(file, root)]
    of_room = [file for file in files if file.is_relative_to(root / "tests" / room)]
    of_folders = [file for file in files if _tests_room(file.relative_to(root), room, root)]
    ordered = list(dict.fromkeys(file.relative_to(root).as_posix() for file in (*importing, *of_room, *of_folders)))
    return TestFiles(ordered[: len(importing)], ordered[len(importing) :])


def _tests_room(file: Path, room: str, root: Path) -> bool:
    """Whether a test file is in a folder that is no room and whose conftest.py imports something of the room."""
    folder = file.parts[1]
    conftest = root / "tests" / folder / "conftest.py"
    if (root / PACKAGE / folder).is_dir() or not conftest.is_file():
        return False
    rooms = f"{PACKAGE}.{room}.", f"tests.{room}."
    return any(f"{imported}.".startswith(rooms) for imported in imported_modules(conftest, root))


@functools.cache
def imported_modules(file: Path, root: Path) -> frozenset[str]:
    """Returns the dotted names of what a file imports anywhere; of `from a import b` both a and a.b."""
    modules = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            origins = _origins(node.module, root)
            modules.add(node.module)
            for alias in node.names:
                modules.update((f"{node.module}.{alias.name}", origins.get(alias.name, node.module)))
    return frozenset(modules)


@functools.cache
def _origins(package: str, root: Path) -> dict[str, str]:
    """Returns name -> the module that a package of the library takes it from."""
    front_door = root.joinpath(*package.split("."), "__init__.py")
    if not package.startswith(PACKAGE) or not front_door.is_file():
        return {}
    tree = ast.parse(front_door.read_text(encoding="utf-8"))
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module]
    return {alias.asname or alias.name: str(node.module) for node in imports for alias in node.names}
