"""The tools: a name, a JSON schema, and what a call does to the workspace.

There are two sets. A task names the tools of the compact set by their names ("read", "edit"), and those of the
repository set with the set's name before theirs ("repository/grep"), or all of them at once ("repository/*"). The model
sees the name without the set.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from composer_jax.agent.tools import compact, repository
from composer_jax.agent.tools.execute import execute_call, execute_calls, is_finish
from composer_jax.agent.tools.tool import FINISH, Tool
from composer_jax.errors import UserError

__all__ = ["TOOLS", "FINISH", "Tool", "execute_call", "execute_calls", "is_finish", "select_tools"]

REPOSITORY = "repository/"
TOOLS: Mapping[str, Tool] = {
    **compact.TOOLS,
    **{f"{REPOSITORY}{name}": tool for name, tool in repository.TOOLS.items()},
}
"""Every tool, by the name that tasks use."""


def select_tools(names: Sequence[str]) -> dict[str, Tool]:
    """The tools of a task, by the name that the model sees. Raises UserError for a name that no tool has, and for two
    tools that the model would see by one name."""
    chosen: dict[str, Tool] = {}
    for wanted in names:
        all_of_set = wanted == f"{REPOSITORY}*"
        for name in [name for name in TOOLS if name.startswith(REPOSITORY)] if all_of_set else [wanted]:
            if name not in TOOLS:
                raise UserError(f"a task asks for the tool {name!r}; the tools are {', '.join(TOOLS)}, {REPOSITORY}*")
            tool = TOOLS[name]
            if chosen.setdefault(tool.name, tool) is not tool:
                raise UserError(f"a task asks for two tools that are called {tool.name!r}; leave one of them out")
    return chosen
