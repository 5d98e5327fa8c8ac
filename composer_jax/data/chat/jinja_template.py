"""The chat template of a published model: Jinja in a sandbox.

The environment is the one that the transformers library documents: trimmed blocks, loop controls, `tojson` without
HTML escapes, `raise_exception`, `strftime_now`, and {% generation %} (a marker for training; without effect here).
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from composer_jax.data.chat.typescript_tools import VARIABLE, typescript_declarations
from composer_jax.errors import UserError


class JinjaTemplate:
    """Messages -> text. Jinja's sandbox keeps a template from doing anything else."""

    def __init__(self, source: str, variables: Mapping[str, str], name: str, *, tool_source: str = "") -> None:
        """
        variables: further variables of the template, such as bos_token.
        tool_source: the template of conversations with tools, if they have one of their own.
        name: where the template comes from, for error messages.

        Raises UserError if `source` is not valid Jinja.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self.source = source + tool_source
        self.name = name
        self._variables = dict(variables)
        try:
            self._template = environment.from_string(source)
            self._tool_template = environment.from_string(tool_source) if tool_source else self._template
        except jinja2.TemplateError as error:
            raise UserError(f"the chat template of {name} is not valid Jinja ({error}); download it again") from error

    def text(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], opened: bool) -> str:
        """Renders a conversation; `opened` adds the generation prompt.

        Raises UserError when the template refuses the conversation.
        """
        has_tools = tools or any(message["role"] == "tool" or message.get("tool_calls") for message in messages)
        variables = dict(self._variables)
        if tools and VARIABLE in self.source and (written := typescript_declarations(tools)):
            variables[VARIABLE] = written
        try:
            return (self._tool_template if has_tools else self._template).render(
                messages=messages, tools=tools or None, add_generation_prompt=opened, **variables
            )
        except Exception as error:  # a template may raise anything
            roles = ", ".join(message["role"] for message in messages)
            raise UserError(
                f"the chat template of {self.name} refuses a conversation of {roles} ({error}); use another template"
            ) from error


class _Generation(Extension):
    """{% generation %}...{% endgeneration %}: renders its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(reason: str) -> NoReturn:
    raise jinja2.TemplateError(reason)
