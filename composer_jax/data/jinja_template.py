"""The chat template of a published model: Jinja in a sandbox, with what such templates may use.

The environment is the one that the transformers library documents: blocks trimmed, loop controls, `tojson` without
HTML escapes, `raise_exception`, `strftime_now`, and {% generation %}, which marks text for training and is plain here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from composer_jax.errors import UserError


class JinjaTemplate:
    """Messages -> text. Nothing a template does reaches beyond the text that it gives."""

    def __init__(self, source: str, variables: Mapping[str, str], name: str) -> None:
        """variables: what else the template may name, such as bos_token. name: where it is from, for messages.

        Raises UserError when it is no template.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self.source = source
        self.name = name
        self._variables = dict(variables)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise UserError(f"the chat template of {name} is not valid Jinja ({error}); download it again") from error

    def text(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], opened: bool) -> str:
        """The conversation as text. opened: with what opens an answer of the model at the end.

        Raises UserError when the template refuses it.
        """
        try:
            return self._template.render(
                messages=messages, tools=tools or None, add_generation_prompt=opened, **self._variables
            )
        except Exception as error:  # whatever foreign code raises is how it refuses
            roles = ", ".join(message["role"] for message in messages)
            raise UserError(
                f"the chat template of {self.name} refuses a conversation of {roles} ({error}); use another template"
            ) from error


class _Generation(Extension):
    """{% generation %}...{% endgeneration %}: only what is inside."""

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
