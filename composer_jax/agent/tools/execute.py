"""Execution of tool calls. Every call that a model makes gets an observation.

A wrong argument, a missing file and an unknown tool give observations that start with "ERROR", not exceptions.
"""

import asyncio
import itertools
from collections.abc import Mapping, Sequence

from composer_jax.agent.tools.schema import ToolError
from composer_jax.agent.tools.tool import FINISH, Tool
from composer_jax.agent.tools.truncate import truncate_end
from composer_jax.agent.workspace import Workspace
from composer_jax.data.chat.messages import MalformedToolCall, ToolCall
from composer_jax.sandbox import SandboxFileError

Call = ToolCall | MalformedToolCall
ERROR = "ERROR "
"""Begins the observation of a call that failed."""


def is_finish(call: Call, tools: Mapping[str, Tool]) -> bool:
    """Whether the call is a well-formed finish."""
    return isinstance(call, ToolCall) and call.name == FINISH and FINISH in tools and call.arguments == {}


async def execute_call(call: Call, tools: Mapping[str, Tool], workspace: Workspace) -> str:
    """The observation of one call. Raises only SandboxDied and its SandboxKilled."""
    try:
        if isinstance(call, MalformedToolCall):
            raise ToolError(call.reason)
        if call.name not in tools:
            raise ToolError(f"no tool {call.name}")
        tool = tools[call.name]
        checked = tool.check(call.arguments)
        await workspace.prepare()
        return replace_surrogates(tool.truncate(await tool.call(workspace, **checked)))
    except (ToolError, SandboxFileError) as error:
        return replace_surrogates(truncate_end(f"{ERROR}{error}"))


async def execute_calls(calls: Sequence[Call], tools: Mapping[str, Tool], workspace: Workspace) -> list[str]:
    """The observations of the calls of one message, in their order. Raises only SandboxDied.

    Calls take effect in their order; consecutive read-only calls run at the same time.
    """

    def is_read_only(call: Call) -> bool:
        return isinstance(call, MalformedToolCall) or call.name not in tools or tools[call.name].read_only

    answers: list[str] = []
    for read_only, group in itertools.groupby(calls, is_read_only):
        if not read_only:
            answers += [await execute_call(call, tools, workspace) for call in group]
            continue
        results = await asyncio.gather(
            *(execute_call(call, tools, workspace) for call in group), return_exceptions=True
        )
        for result in results:  # raised after all have ended, because they share the workspace
            if isinstance(result, BaseException):
                raise result
            answers.append(result)
    return answers


def error_text(observation: str) -> str | None:
    """The error that an observation tells; None for that of a call that succeeded.

    The output of a tool that itself begins with ERROR, such as a file that does, cannot be told from an error.
    """
    return observation.removeprefix(ERROR) if observation.startswith(ERROR) else None


def replace_surrogates(text: str) -> str:
    """The text with "?" for halves of surrogate pairs, which file names may hold and observations may not."""
    return text.encode(errors="replace").decode()
