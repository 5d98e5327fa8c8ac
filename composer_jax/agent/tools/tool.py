"""What a tool is: a name, a JSON schema, and what a call does to the workspace."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from composer_jax.agent.tools.schema import check_object

FINISH = "finish"


@dataclass(frozen=True)
class Tool:
    """A tool.

    parameters: JSON schema of its arguments. call: given the workspace and the arguments by name; what it says is the
    observation. It may raise ToolError and SandboxFileError, with one sentence for the model.
    truncate: cuts an observation to what the tool's set allows.
    only_reads: whether calls of it leave everything as it is, so that several can be carried out at the same time.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    call: Callable[..., Awaitable[str]]
    truncate: Callable[[str], str]
    only_reads: bool = False

    def check(self, arguments: Any) -> dict[str, Any]:
        """The arguments, if they are what the schema names. Raises ToolError otherwise."""
        check_object(self.name, self.parameters, arguments)
        return arguments


def object_schema(required: tuple[str, ...] = (), /, **properties: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a tool's arguments."""
    return {
        "type": "object",
        "properties": {name: dict(schema) for name, schema in properties.items()},
        "required": list(required),
        "additionalProperties": False,
    }
