"""The text with which tools are declared to a model whose chat template knows none."""

import json
from collections.abc import Iterable
from typing import Any

from composer_jax.data.chat.call_forms import CALL
from composer_jax.data.chat.chat_format import ToolSpec
from composer_jax.errors import UserError

TOOLS, SIGNATURES = "{tools}", "{signatures}"
"""Stand for the tools in a prompt, one a line: JSON objects with name, description and parameters, or signatures like
read_file(path: string, start?: integer): Show a file."""

_CALLS = f"""To call a tool, write a JSON object with its name and its arguments between these markers:

{CALL[0]}
{{"name": "NAME", "arguments": {{"KEY": "VALUE"}}}}
{CALL[1]}

The results come in the next message. A message may have several calls; a message without one ends your work."""

TOOL_PROMPT = f"""You work with tools. Each line below declares one as a JSON object:

<tools>
{TOOLS}
</tools>

{_CALLS}"""
"""Our wording (not published), after the calls of Hermes, on which many open models were trained."""

SHORT_TOOL_PROMPT = f"""You work with these tools:

{SIGNATURES}

{_CALLS}"""
"""The same with signatures instead of JSON schemas, in less than half as many tokens: for small contexts."""


def check_tool_prompt(prompt: str, place: str) -> None:
    """Raises UserError for a prompt in which nothing stands for the tools; `place` says where the prompt is from."""
    if TOOLS not in prompt and SIGNATURES not in prompt:
        raise UserError(f"{place} lacks {TOOLS} or {SIGNATURES}, which stand for the declared tools; add one of them.")


def declaration(tool: ToolSpec) -> str:
    """Returns a tool as a JSON object in one line."""
    declared = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return json.dumps(declared, ensure_ascii=False)


def signature(tool: ToolSpec) -> str:
    """Returns a tool as a signature in one line, with the type of each parameter, and a ? after optional ones."""
    properties: dict[str, Any] = tool.parameters.get("properties", {})
    required: Iterable[str] = tool.parameters.get("required", ())
    parameters = [
        f"{name}{'' if name in required else '?'}: {schema.get('type', 'any')}" for name, schema in properties.items()
    ]
    return f"{tool.name}({', '.join(parameters)}): {' '.join(tool.description.split())}"
