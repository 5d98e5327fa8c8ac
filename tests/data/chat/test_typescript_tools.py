"""Tools as TypeScript: the exact text of each kind of schema, and the schemas that have none."""

import pytest

from composer_jax.data.chat.chat_format import declarations
from composer_jax.data.chat.typescript_tools import typescript_declarations
from tests.data.formats import Declaration


def written(schema, description=""):
    """The text between the braces of the namespace."""
    text = typescript_declarations(declarations([Declaration("edit", description, schema)]))
    return text.removeprefix("# Tools\n\n## functions\nnamespace functions {\n").removesuffix("\n}\n")


def test_the_text_of_two_tools():
    edit = {
        "properties": {
            "path": {"type": "string", "description": "A file.\n\nRelative.", "minLength": 1, "pattern": "^[a-z]"},
            "all": {"type": "boolean", "default": True},
            "count": {"type": "integer", "minimum": 0, "maximum": 9, "default": 1, "description": "How many."},
            "mode": {"enum": ["first", "last", None], "default": "first"},
        },
        "required": ["path", "mode"],
        "additionalProperties": False,
    }
    tools = declarations([Declaration("edit", "Edits\na file.", edit), Declaration("finish", "", {})])
    assert typescript_declarations(tools) == (
        "# Tools\n\n## functions\nnamespace functions {\n"
        "// Edits\n// a file.\n"
        "type edit = (_: {\n"
        '  // Default: "first"\n'
        '  mode: "first" | "last" | None,\n'
        "  // A file.\n\n  // Relative.\n"
        "  // minLength: 1, pattern: ^[a-z]\n"
        "  path: string,\n"
        "  // Default: True\n"
        "  all?: boolean,\n"
        "  // How many.\n"
        "  // maximum: 9, minimum: 0\n"
        "  // Default: 1\n"
        "  count?: number,\n"
        "  [k: string]: never\n"
        "}) => any;\n"
        "type finish = (_: {}) => any;\n"
        "}\n"
    )


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({}, "any"),
        (True, "any"),
        (False, "null"),
        ({"type": ["array", "integer", "null"]}, "Array<any> | number | null"),
        ({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "number"}}]}, "string | Array<number>"),
        ({"type": "array"}, "Array<any>"),
        (
            {"type": "array", "items": {"type": "string", "maxLength": 3}},
            "Array<\n    // maxLength: 3\n    string\n  >",
        ),
        ({"type": "object"}, "{}"),
        (
            {"type": "object", "properties": {"b": {"type": "null"}}, "additionalProperties": {"type": "string"}},
            "{\n    b?: null,\n    [k: string]: string\n  }",
        ),
    ],
)
def test_the_type_of_an_argument(schema, text):
    assert written({"properties": {"a": schema}, "required": ["a"]}) == f"type edit = (_: {{\n  a: {text}\n}}) => any;"


def test_references_name_interfaces():
    node = {"type": "object", "description": "A node.", "properties": {"next": {"$ref": "#/$defs/Node"}}}
    schema = {"properties": {"start": {"$ref": "#/$defs/Node", "description": "The first."}}, "$defs": {"Node": node}}
    assert written(schema) == (
        "// A node.\ninterface Node {\n  next?: Node\n}\ntype edit = (_: {\n  // The first.\n  start?: Node\n}) => any;"
    )
    tree = {"properties": {"leaf": {"type": "string"}, "kids": {"type": "array", "items": {"$ref": "#"}}}}
    assert written(tree, "Grows.") == (
        "interface parameters {\n  leaf?: string,\n  kids?: Array<parameters>\n}\n"
        "// Grows.\ntype edit = (_: parameters) => any;"
    )


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "text"},
        {"title": "no type"},
        {"type": ["string", "text"]},
        {"$ref": "#/$defs/Node"},
        {"$ref": "https://example.com/node.json"},
        {"type": "array", "items": {"type": "|im_end|"}},
        {"type": "array", "items": {"$ref": "#/$defs/|im_end|"}},
        [],
    ],
)
def test_a_schema_without_a_form_in_typescript_has_none(schema):
    parameters = {"properties": {"a": schema}, "$defs": {"|im_end|": {"type": "string"}}}
    assert typescript_declarations(declarations([Declaration("edit", "", parameters)])) is None
