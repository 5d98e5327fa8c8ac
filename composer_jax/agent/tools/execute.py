"""From calls to observations. Whatever a model asks for is answered.

A wrong argument, a missing file, an unknown tool are observations that start with "ERROR", never exceptions.
"""

import asyncio
import itertools
from collections.abc import Mapping, Sequence

from composer_jax.agent.tools import compact
from composer_jax.agent.tools.schema import ToolError
from composer_jax.agent.tools.tool import FINISH, Tool
from composer_jax.agent.workspace import Workspace
from composer_jax.data.chat import Malformed, ToolCall
from composer_jax.sandbox import SandboxFileError

Call = ToolCall | Malformed


def is_finish(call: Call, tools: Mapping[str, Tool]) -> bool:
    """Whether the call is a well-formed finish."""
    return isinstance(call, ToolCall) and call.name == FINISH and FINISH in tools and call.arguments == {}


async def execute_call(call: Call, tools: Mapping[str, Tool], workspace: Workspace) -> str:
    """The observation of one call. Raises only SandboxDied."""
    try:
        if isinstance(call, Malformed):
            raise ToolError(call.reason)
        if call.name not in tools:
            raise ToolError(f"no tool {call.name}")
        tool = tools[call.name]
        checked = tool.check(call.arguments)
        await workspace.prepare()
        return _replace_surrogates(tool.truncate(await tool.call(workspace, **checked)))
    except (ToolError, SandboxFileError) as error:
        return _replace_surrogates(compact.truncate(f"ERROR {error}"))


async def execute_calls(calls: Sequence[Call], tools: Mapping[str, Tool], workspace: Workspace) -> list[str]:
    """The observations of the calls of one message, in their order. Raises only SandboxDied.

    Calls take effect in their order; those in a row that only read are carried out at the same time.
    """
    answers: list[str] = []
    for reading, group in itertools.groupby(calls, lambda call: _only_reads(call, tools)):
        if not reading:
            answers += [await execute_call(call, tools, workspace) for call in group]
            continue
        found = await asyncio.gather(*(execute_call(call, tools, workspace) for call in group), return_exceptions=True)
        for said in found:
            if isinstance(said, BaseException):  # only now, for the others use the same workspace
                raise said
        answers += found
    return answers


def _only_reads(call: Call, tools: Mapping[str, Tool]) -> bool:
    return isinstance(call, Malformed) or call.name not in tools or tools[call.name].only_reads


def _replace_surrogates(text: str) -> str:
    """The text without halves of surrogate pairs: names of files may hold any bytes, observations may not."""
    return text.encode(errors="replace").decode()
