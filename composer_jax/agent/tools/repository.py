"""The table of the repository set of tools, for capable models on real repositories."""

from collections.abc import Mapping

from composer_jax.agent.tools.apply_patch import APPLY_PATCH
from composer_jax.agent.tools.browse import GLOB, LIST_DIR, READ_FILE
from composer_jax.agent.tools.edit_file import EDIT_FILE
from composer_jax.agent.tools.grep import GREP
from composer_jax.agent.tools.semantic_search import SEMANTIC_SEARCH
from composer_jax.agent.tools.shell import SHELL
from composer_jax.agent.tools.todo_write import TODO_WRITE
from composer_jax.agent.tools.tool import FINISH_TOOL, Tool

_TOOLS = (
    READ_FILE,
    LIST_DIR,
    GLOB,
    GREP,
    SEMANTIC_SEARCH,
    EDIT_FILE,
    APPLY_PATCH,
    SHELL,
    TODO_WRITE,
    FINISH_TOOL,
)
TOOLS: Mapping[str, Tool] = {tool.name: tool for tool in _TOOLS}
"""The tools by the name that the model sees; a new one is its own file and one line here."""
