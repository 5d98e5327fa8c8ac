"""Candidates that delete a module that the other modules do not need."""

from __future__ import annotations

import ast
from pathlib import PurePosixPath

from composer_jax.tasks.repository.candidate import Candidate, make_candidate
from composer_jax.tasks.repository.imports import Module, Repository
from composer_jax.tasks.repository.remove_symbols import SymbolRemoval

_STARTED_BY_NAME = ("__init__.py", "__main__.py", "conftest.py", "setup.py", "noxfile.py")


def delete_file(repository: Repository, module: Module) -> Candidate | None:
    """The candidate without `module` and without the imports that only re-export its names.

    None for tests, for files that are started by their name, and where another module uses a name of this one,
    spells this module in a string, or imports it inside a function or as `import a.b`.
    """
    if module.is_test or PurePosixPath(module.path).name in _STARTED_BY_NAME:
        return None
    removal = SymbolRemoval(repository, {}, frozenset({module.path}))
    for other in repository.code:
        if other is not module and _depends(repository, other, removal, repository.dotted(module.path)):
            return None
    if removal.needed({}, strict=True):
        return None
    files = removal.files({})
    for path, text in files.items():
        if text is not None and not text.strip() and PurePosixPath(path).name != "__init__.py":
            return None  # a module that only re-exported the names
    names = tuple(entity.id for entity in module.entities)
    note = f"{module.path} was deleted; other files that passed its names on: {len(files) - 1}"
    return make_candidate("delete_file", repository.sources, files, names, note)


def _depends(repository: Repository, other: Module, removal: SymbolRemoval, dotted: str) -> bool:
    removed_aliases = removal.aliases.get(other.path, [])
    for node, _, early in other.imports:
        for alias in node.names:
            if any(alias is part for part in removed_aliases):
                dotted_import = isinstance(node, ast.Import) and "." in alias.name and not alias.asname
                if not early or dotted_import:
                    return True
    return any(isinstance(node, ast.Constant) and node.value == dotted for node in ast.walk(other.source.tree))
