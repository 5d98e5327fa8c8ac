"""Tools: each is a name, a JSON schema, and an async function of the workspace.

A task names its tools: those of the compact set by their names ("read", "edit"), those of the repository set behind
the set's name ("repository/grep"), all of that set at once ("repository/*"), and a user's own by import path
("package.module:TOOL", an instance of Tool). The model sees `Tool.name`.
"""

from collections.abc import Iterator, Mapping, Sequence

from composer_jax.agent.tools import compact, repository
from composer_jax.agent.tools.execute import error_text, execute_call, execute_calls, is_finish
from composer_jax.agent.tools.tool import FINISH, Tool, object_schema
from composer_jax.errors import UserError
from composer_jax.extensions import import_object

__all__ = [
    "FINISH",
    "TOOLS",
    "Tool",
    "error_text",
    "execute_call",
    "execute_calls",
    "is_finish",
    "object_schema",
    "select_tools",
]

REPOSITORY = "repository/"
TOOLS: Mapping[str, Tool] = {
    **compact.TOOLS,
    **{f"{REPOSITORY}{name}": tool for name, tool in repository.TOOLS.items()},
}
"""Our tools by the name that tasks use."""


def select_tools(names: Sequence[str]) -> dict[str, Tool]:
    """The tools of a task, by the name that the model sees.

    Raises UserError for a name that is neither in TOOLS nor the import path of a Tool, and for two tools that the
    model would see by one name.
    """
    selected: dict[str, Tool] = {}
    for name in names:
        for tool in _resolve(name):
            if selected.setdefault(tool.name, tool) is not tool:
                raise UserError(f"a task asks for two tools that are called {tool.name!r}; leave one of them out")
    return selected


def _resolve(name: str) -> Iterator[Tool]:
    if name == f"{REPOSITORY}*":
        yield from repository.TOOLS.values()
    elif name in TOOLS:
        yield TOOLS[name]
    elif ":" in name:
        tool = import_object(name, "a task's tools")
        if not isinstance(tool, Tool):
            raise UserError(f"a task asks for the tool {name!r}, which is a {type(tool).__name__} and not a Tool")
        yield tool
    else:
        raise UserError(
            f"a task asks for the tool {name!r}; the tools are {', '.join(TOOLS)}, {REPOSITORY}*, and import paths of "
            "your own like 'package.module:TOOL'"
        )
