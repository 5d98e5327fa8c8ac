"""The class of tools: a name, a JSON schema, and a call on the workspace."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from composer_jax.agent.tools.schema import check_object
from composer_jax.agent.tools.truncate import truncate_middle

FINISH = "finish"
PATH: Mapping[str, Any] = {"type": "string", "description": "path relative to the workspace"}
"""The schema of a path in the arguments of a tool."""
UNDER: Mapping[str, Any] = {"type": "string", "description": "only in this file or folder"}
"""The schema of a file or folder that restricts a search."""


@dataclass(frozen=True)
class Tool:
    """A tool.

    parameters: JSON schema of its arguments (see object_schema). call: takes the workspace and the arguments by name
      and returns the observation; may raise ToolError and SandboxFileError with one sentence for the model.
    truncate: cuts an observation to what the tool's set allows.
    read_only: whether its calls change nothing, so that several run at the same time.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    call: Callable[..., Awaitable[str]]
    truncate: Callable[[str], str] = truncate_middle
    read_only: bool = False

    def check(self, arguments: Any) -> dict[str, Any]:
        """The arguments as a dict. Raises ToolError where they do not match the schema."""
        check_object(self.name, self.parameters, arguments)
        return arguments


async def _finish(workspace: Any) -> str:
    return "done"


def object_schema(required: tuple[str, ...] = (), /, **properties: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON schema of an object with these properties and no others; `required` are names among them."""
    return {
        "type": "object",
        "properties": {name: dict(schema) for name, schema in properties.items()},
        "required": list(required),
        "additionalProperties": False,
    }


FINISH_TOOL = Tool(FINISH, "Say that the work is done.", object_schema(), _finish)
