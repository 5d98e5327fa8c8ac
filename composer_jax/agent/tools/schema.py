"""Checks of tool arguments against a JSON schema, with errors for the model.

It supports the part of JSON schema that tools use: type, properties, required, additionalProperties false, items,
enum, minimum, maximum, minLength, maxLength, maxItems. Arguments are JSON values; a number with a fraction is never an
integer.
"""

from collections.abc import Mapping
from typing import Any

_TYPES: Mapping[str, tuple[str, type]] = {
    "string": ("a string", str),
    "integer": ("an integer", int),
    "boolean": ("true or false", bool),
    "array": ("a list", list),
    "object": ("an object", dict),
}


class ToolError(Exception):
    """A tool call that failed; its text becomes the observation."""


def check(what: str, schema: Mapping[str, Any], value: Any) -> None:
    """Raises ToolError for the first violation of the schema. what: the name of the value in the error."""
    words, kind = _TYPES[schema["type"]]
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ToolError(f"{what} must be {words}")
    if "enum" in schema and value not in schema["enum"]:
        raise ToolError(f"{what} must be one of {', '.join(schema['enum'])}")
    if kind is dict:
        check_object(what, schema, value)
    elif kind is list:
        _check_size(what, "items", schema.get("minItems", 0), schema.get("maxItems"), len(value))
        for number, item in enumerate(value, 1):
            check(f"item {number} of {what}", schema["items"], item)
    elif kind is str:
        _check_size(what, "characters", schema.get("minLength", 0), schema.get("maxLength"), len(value))
        if any("\ud800" <= character <= "\udfff" for character in value):
            raise ToolError(f"{what} holds half of a surrogate pair, which no file can hold")
    elif kind is int:
        low, high = schema.get("minimum", value), schema.get("maximum", value)
        if value < low:
            raise ToolError(f"{what} must be at least {low}")
        if value > high:
            raise ToolError(f"{what} must be at most {high}")


def check_object(what: str, schema: Mapping[str, Any], value: Any) -> None:
    """As check, for an object; missing properties are reported first."""
    if not isinstance(value, dict):
        raise ToolError(f"{what} takes an object")
    properties = schema["properties"]
    for name in schema["required"]:
        if name not in value:
            raise ToolError(f"{what} needs {name}")
    for name, item in value.items():
        if name not in properties:
            raise ToolError(f"{what} takes no {_abbreviate(name)}")
        check(name, properties[name], item)


def _check_size(what: str, unit: str, low: int, high: int | None, size: int) -> None:
    if size < low:
        raise ToolError(f"{what} is empty" if low == 1 else f"{what} must have at least {low} {unit}")
    if high is not None and size > high:
        raise ToolError(f"{what} has {size} {unit}; at most {high} are taken")


def _abbreviate(name: str) -> str:
    return name if len(name) <= 40 else f"{name[:40]}..."
