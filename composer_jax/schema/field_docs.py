"""Meaning and default of config fields, read from the dataclass that declares each.

The meaning is the string literal below the field.
"""

import ast
import dataclasses
import functools
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Mapping
from typing import Any, cast

_SENTENCE_END = re.compile(r"(?<!e\.g)(?<!i\.e)(?<!Dr)[.!?](?=\s+[\"'(A-Z0-9])")


def field_meaning(root: type, path: str) -> str:
    """Returns the first sentence about the field at `path`, "" where the field or its text is missing.

    Args:
      root: a dataclass; its fields may be dataclasses, mappings to dataclasses, or a union of these and None.
      path: names joined by dots ("rl.reward.weight"). A value inside a mapping of plain or any values
        has the mapping's meaning.
    """
    declared = _declaration(root, path)
    return first_sentence(field_texts(declared[0]).get(declared[1].name, "")) if declared else ""


def field_default(root: type, path: str) -> Any:
    """Returns the default that the dataclass of the field at `path` declares, or dataclasses.MISSING.

    An entry of a mapping of plain values has none.
    """
    declared = _declaration(root, path)
    if declared is None or declared[1].name != path.split(".")[-1]:
        return dataclasses.MISSING
    field = declared[1]
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _declaration(root: type, path: str) -> tuple[type, dataclasses.Field] | None:
    """Returns the dataclass that declares the field at `path`, and the field; None if there is none."""
    hint: Any = root
    declared: tuple[type, dataclasses.Field] | None = None
    for name in path.split("."):
        section = _section(hint)
        if section is None:
            return declared if hint is Any else None  # a value inside a mapping of any values
        if dataclasses.is_dataclass(section):
            section = cast(type, section)
            field = {field.name: field for field in dataclasses.fields(section)}.get(name)
            if field is None:
                return None
            declared, hint = (section, field), typing.get_type_hints(section)[name]
        else:
            hint = typing.get_args(section)[1]
    return declared


@functools.cache
def field_texts(cls: type) -> Mapping[str, str]:
    """Returns {field: text of the string literal below it} of a dataclass, inherited fields included.

    A class without source (created at run time) has no texts.
    """
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        try:
            source = textwrap.dedent(inspect.getsource(base))
        except (OSError, TypeError):
            continue
        (definition,) = ast.parse(source).body
        assert isinstance(definition, ast.ClassDef)
        for field, below in zip(definition.body, definition.body[1:], strict=False):
            if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
                continue
            if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                texts[field.target.id] = inspect.cleandoc(str(below.value.value))
    return types.MappingProxyType(texts)


def first_sentence(text: str) -> str:
    """Returns the first sentence of `text` on one line."""
    text = " ".join(text.split())
    end = _SENTENCE_END.search(text)
    return text[: end.end()] if end else text


def _section(hint: Any) -> Any:
    """Returns the dataclass or mapping type that `hint` is or, as a union, contains; else None."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for option in options:
        origin = typing.get_origin(option)
        if dataclasses.is_dataclass(option) or (isinstance(origin, type) and issubclass(origin, Mapping)):
            return option
    return None
