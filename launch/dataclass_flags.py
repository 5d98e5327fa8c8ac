"""Flags for the fields of a flat dataclass: the name, default and meaning of each are those of the field."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar, get_args, get_type_hints

from absl import flags as absl_flags

from composer_jax.schema.field_docs import field_texts

T = TypeVar("T")


def define_fields(values: absl_flags.FlagValues, cls: Any) -> None:
    """Defines one flag per field, which has a default and is a float, an int, a str, a Literal of or a tuple of str."""
    texts, hints = field_texts(cls), get_type_hints(cls)
    for field in dataclasses.fields(cls):
        name, meaning, hint = field.name, " ".join(texts[field.name].split()), hints[field.name]
        default: Any = field.default
        if hint is float:
            absl_flags.DEFINE_float(name, default, meaning, flag_values=values)
        elif hint is int:
            absl_flags.DEFINE_integer(name, default, meaning, flag_values=values)
        elif hint is str:
            absl_flags.DEFINE_string(name, default, meaning, flag_values=values)
        elif hint == tuple[str, ...]:
            absl_flags.DEFINE_list(name, list(default), meaning, flag_values=values)
        else:
            absl_flags.DEFINE_enum(name, default, get_args(hint), meaning, flag_values=values)


def read_fields(values: Any, cls: type[T]) -> T:
    """Returns the dataclass with the values of its flags; several strings are a tuple."""
    given = {field.name: getattr(values, field.name) for field in dataclasses.fields(cls)}  # pyright: ignore
    return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()})
