"""Extensions: a config names our implementations by a short name and a user's by import path.

An import path is "package.module:Attribute" or "path/file.py:Attribute". It is resolved where it is used, in every
process, so a resumed run, the report and other machines need nothing but config.json and a Python path that holds the
module, or the file at its path.
"""

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from composer_jax.errors import UserError

T = TypeVar("T")


def resolve(name: str, table: Mapping[str, T], place: str) -> T:
    """Returns the entry of `table` called `name`, or the object at the import path `name`.

    Args:
      table: our implementations by name.
      place: what holds `name`, for error messages ("config.rl.algorithm.name").

    Raises:
      UserError: `name` is neither in the table nor an import path that resolves.
    """
    if name in table:
        return table[name]
    if ":" not in name:
        known = f"use one of {', '.join(table)}, or" if table else "use"
        raise UserError(f"{place}={name!r} is unknown; {known} an import path like 'package.module:Attribute'.")
    return import_object(name, place)


def import_object(path: str, place: str) -> Any:
    """Returns the object at the import path "package.module:Attribute" or "path/file.py:Attribute".

    Raises:
      UserError: the module cannot be imported or lacks the attribute; the sentence begins with `place`, which says
        what holds the path ("config.model.init").
    """
    module, _, attribute = path.partition(":")
    try:
        value: Any = _import_file(Path(module)) if module.endswith(".py") else importlib.import_module(module)
        for part in attribute.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError, ValueError, OSError) as error:
        raise UserError(f"{place}={path!r} cannot be imported: {error}.") from error
    return value


def _import_file(path: Path) -> ModuleType:
    """Returns the module of a file, which runs once in a process; its name is its absolute path."""
    name = str(path.resolve())
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, name)
        assert spec is not None and spec.loader is not None  # the suffix is .py
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses look their module up
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
