"""The text with which tools are declared to a model whose chat template knows none."""

from composer_jax.data.hermes_calls import CALL

TOOLS_PLACE = "{tools}"
"""Stands for the declarations in a prompt: JSON objects, one a line."""

TOOL_PROMPT = f"""You work with tools. Each line below declares one as a JSON object:

<tools>
{TOOLS_PLACE}
</tools>

To call a tool, write a JSON object with its name and its arguments between these markers:

{CALL[0]}
{{"name": "NAME", "arguments": {{"KEY": "VALUE"}}}}
{CALL[1]}

The results come in the next message. A message may have several calls; a message without one ends your work."""
"""Our wording (not published), after the calls of Hermes, on which many open models were trained."""
