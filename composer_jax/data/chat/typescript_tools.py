"""Declarations of tools as TypeScript, which the template of Kimi K2.5 gets as the variable `tools_ts_str`.

The tokenizer of that model writes them, not its template. A tool becomes

    // DESCRIPTION
    type NAME = (_: {
      // DESCRIPTION OF THE ARGUMENT
      // maximum: 9, minimum: 0
      // Default: 1
      count?: number
    }) => any;

with required arguments first, and an interface for each of its `$defs`.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

VARIABLE = "tools_ts_str"
"""Name of the variable in a template."""

_SCALARS = {"string": "string", "number": "number", "integer": "number", "boolean": "boolean", "null": "null"}
_UNION = {**_SCALARS, "object": "{}", "array": "Array<any>"}
_BOUNDS = {
    "string": ("maxLength", "minLength", "pattern"),
    "number": ("maximum", "minimum"),
    "integer": ("maximum", "minimum"),
    "array": ("maxItems", "minItems"),
}
_ROOT = "parameters"  # the interface of arguments that refer to themselves
_INDENT = "  "
_REFERENCE = re.compile(r"#/\$defs/([\w.\-\[\]]+)")  # no name that could form a control token with its neighbours


def typescript_declarations(tools: Sequence[Mapping[str, Any]]) -> str | None:
    """Returns the tools, as `chat_format.declarations` gives them, as TypeScript.

    Returns None when a schema has no form in it, such as a reference to another document; the templates then write
    JSON.
    """
    try:
        functions = "\n".join(_function(tool["function"]) for tool in tools)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):  # schemas are the user's
        return None
    return f"# Tools\n\n## functions\nnamespace functions {{\n{functions}\n}}\n"


def _function(function: Mapping[str, Any]) -> str:
    schema = function.get("parameters") or {}
    types = _Types(schema)
    arguments = types.object(schema, "")
    interfaces: list[str] = []
    if types.refers_to_root:
        fields = types.fields(schema, schema.get("properties") or {}, _INDENT)  # in this order, without others
        interfaces.append(f"interface {_ROOT} {_braced(fields, '')}")
        arguments = _ROOT
    for name, definition in types.definitions.items():
        interfaces.append(f"{_description(definition, '')}interface {name} {types.type(definition, '')}")
    return "\n".join([*interfaces, f"{_description(function, '')}type {function['name']} = (_: {arguments}) => any;"])


class _Types:
    """The types in the schema of a tool's arguments. Methods raise ValueError for a schema without a type."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self.definitions: Mapping[str, Any] = schema.get("$defs") or {}
        self.refers_to_root = False

    def type(self, schema: Any, indent: str) -> str:
        if isinstance(schema, bool):
            return "any" if schema else "null"
        if "$ref" in schema:
            return self._reference(schema["$ref"])
        if "anyOf" in schema:
            return " | ".join(self.type(option, indent) for option in schema["anyOf"])
        if "enum" in schema:
            return _enum(schema)
        kind = schema.get("type")
        if isinstance(kind, list):
            return " | ".join(_UNION[option] for option in kind)
        if kind == "object":
            return self.object(schema, indent)
        if kind == "array":
            return self._array(schema.get("items"), indent)
        if not schema:
            return "any"
        return _SCALARS[kind]

    def object(self, schema: Mapping[str, Any], indent: str) -> str:
        required = schema.get("required") or ()
        names = sorted(schema.get("properties") or {}, key=lambda name: (name not in required, name))
        fields = self.fields(schema, names, indent + _INDENT)
        others = schema.get("additionalProperties")
        if others is not None:
            kind = "never" if others is False else self.type(others, indent + _INDENT)
            fields.append(f"{indent}{_INDENT}[k: string]: {kind}")
        return _braced(fields, indent)

    def fields(self, schema: Mapping[str, Any], names: Iterable[str], indent: str) -> list[str]:
        required = schema.get("required") or ()
        return [self._field(name, schema["properties"][name], name in required, indent) for name in names]

    def _field(self, name: str, schema: Any, is_required: bool, indent: str) -> str:
        default = schema.get("default") if isinstance(schema, Mapping) else None
        comments = _comments(schema, indent)
        if default is not None:
            text = repr(default) if isinstance(default, int | float) else json.dumps(default, ensure_ascii=False)
            comments += f"{indent}// Default: {text}\n"
        return f"{comments}{indent}{name}{'' if is_required else '?'}: {self.type(schema, indent)}"

    def _array(self, item: Any, indent: str) -> str:
        if not item:
            return "Array<any>"
        comments = _comments(item, indent + _INDENT)
        if not comments:
            return f"Array<{self.type(item, indent)}>"
        return f"Array<\n{comments}{indent}{_INDENT}{self.type(item, indent + _INDENT)}\n{indent}>"

    def _reference(self, reference: str) -> str:
        if reference == "#":
            self.refers_to_root = True
            return _ROOT
        match = _REFERENCE.fullmatch(reference)
        if not match or match[1] not in self.definitions:
            raise ValueError(f"{reference!r} refers to no definition of the schema")
        return match[1]


def _braced(fields: Sequence[str], indent: str) -> str:
    lines = ",\n".join(fields)
    return f"{{\n{lines}\n{indent}}}" if fields else "{}"


def _enum(schema: Mapping[str, Any]) -> str:
    return " | ".join(f'"{value}"' if isinstance(value, str) else str(value) for value in schema["enum"])


def _comments(schema: Any, indent: str) -> str:
    """Lines of comment before a type: its description and its bounds."""
    if isinstance(schema, bool):
        return ""
    kind = schema.get("type")
    is_plain = isinstance(kind, str) and not {"$ref", "anyOf", "enum"} & schema.keys()
    bounds = [f"{name}: {schema[name]}" for name in _BOUNDS.get(kind, ()) if name in schema] if is_plain else []
    return _description(schema, indent) + (f"{indent}// {', '.join(bounds)}\n" if bounds else "")


def _description(schema: Mapping[str, Any], indent: str) -> str:
    text = schema.get("description") or ""
    return "".join(f"{indent}// {line}\n" if line else "\n" for line in text.split("\n")) if text else ""
