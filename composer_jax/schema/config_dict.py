"""ConfigDict <-> frozen dataclasses: defaults are read from the dataclasses, values are checked against their types."""

import dataclasses
import functools
import operator
import types
import typing
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from composer_jax.errors import UserError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance  # of the type checker, not of the standard library

T = TypeVar("T", bound="DataclassInstance")


def to_config_dict(section: Any) -> ConfigDict:
    """Returns a ConfigDict with a field for every field of a dataclass instance, nested ones included.

    A field whose value is None and whose type is `int | None` (or another plain type, or a tuple) becomes a placeholder
    of that type, and the whole number of a fraction a float, so that the command line can set them.
    """
    hints = typing.get_type_hints(type(section))
    return ConfigDict(
        {
            field.name: plain_value(getattr(section, field.name), hints[field.name])
            for field in dataclasses.fields(section)
        }
    )


def plain_value(value: Any, hint: Any) -> Any:
    """Returns the value of a field as a ConfigDict holds it; None of a plain type is a placeholder of that type."""
    if dataclasses.is_dataclass(value):
        return to_config_dict(value)
    if isinstance(value, Mapping):
        kind = typing.get_args(hint)[1] if typing.get_args(hint) else Any
        return ConfigDict({name: plain_value(item, kind) for name, item in value.items()})
    if type(value) is int and float in (hint, *typing.get_args(hint)):
        return float(value)
    if value is None:
        options = (hint, *(type(o) if isinstance(o, str) else o for o in typing.get_args(hint)))  # Literals are strings
        options = (typing.get_origin(option) or option for option in options)
        kinds = [kind for kind in options if kind in (bool, int, float, str, tuple)]
        return placeholder(kinds[0]) if kinds else None
    return value


def from_mapping(cls: type[T], values: Mapping[str, Any], path: str) -> T:
    """Builds a dataclass, its nested dataclasses included, from a ConfigDict or a nested dict.

    Raises UserError, which names the whole path, for an unknown or missing field, or a value of a wrong type.

    Args:
      path: the name of the section in error messages ("config").
    """
    if not hasattr(values, "items"):
        raise UserError(f"{path} must be a section of fields, not {values!r}.")
    hints = typing.get_type_hints(cls)
    values = dict(values.items())
    unknown = sorted(set(values) - set(hints))
    if unknown:
        raise UserError(f"Unknown field {path}.{unknown[0]}; the fields there are {', '.join(hints)}.")
    missing = [field.name for field in dataclasses.fields(cls) if field.name not in values and not _has_default(field)]
    if missing:
        raise UserError(f"{path}.{missing[0]} is missing.")
    return cls(**{name: _convert(hints[name], value, f"{path}.{name}") for name, value in values.items()})


def field_paths(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yields the dotted path of every section and field."""
    for name, value in values.items():
        yield prefix + name
        if hasattr(value, "items"):
            yield from field_paths(value, f"{prefix}{name}.")


def _has_default(field: dataclasses.Field) -> bool:
    return field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING


def _convert(hint: Any, value: Any, path: str) -> Any:
    """Returns `value` as the type `hint`; raises UserError if it has another type."""
    if isinstance(hint, types.UnionType):
        hint = _member_for(hint, value)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return from_mapping(hint, value, path)
    origin = typing.get_origin(hint)
    if origin is tuple:
        return _convert_tuple(hint, value, path)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if not hasattr(value, "items"):
            raise UserError(f"{path} must be a section of fields, not {value!r}.")
        kind = typing.get_args(hint)[1]
        return {name: _convert(kind, item, f"{path}.{name}") for name, item in value.items()}
    if hint is Any:
        return value.to_dict() if isinstance(value, ConfigDict) else value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    plain = hint if isinstance(hint, type | types.UnionType) else None
    if plain is not None and (not isinstance(value, plain) or (isinstance(value, bool) and plain is not bool)):
        raise UserError(f"{path}={value!r} must be of type {getattr(plain, '__name__', plain)}.")
    return value


def _member_for(union: types.UnionType, value: Any) -> Any:
    """Returns the structured member of the union (a section, a tuple) that `value` may belong to, else the union of its
    plain members."""
    members = typing.get_args(union)
    for member in members:
        if dataclasses.is_dataclass(member) and hasattr(value, "items"):
            return member
        if typing.get_origin(member) is tuple and isinstance(value, list | tuple):
            return member
    plain = [member for member in members if isinstance(member, type) and typing.get_origin(member) is None]
    return functools.reduce(operator.or_, plain)


def _convert_tuple(hint: Any, value: Any, path: str) -> tuple:
    if not isinstance(value, list | tuple):
        raise UserError(f"{path}={value!r} must be a list of values.")
    kinds = typing.get_args(hint)
    kinds = kinds[:1] * len(value) if kinds[-1] is Ellipsis else kinds
    if len(value) != len(kinds):
        raise UserError(f"{path}={value!r} must have {len(kinds)} values.")
    return tuple(_convert(kind, v, f"{path}[{i}]") for i, (kind, v) in enumerate(zip(kinds, value, strict=True)))
