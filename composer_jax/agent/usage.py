"""EpisodeUsage: what an episode used, counted from its transcript, its plan and its changes when it ends.

Rewards charge for these counts (rl/rewards.py, rl/penalties.py), and the metrics of RL show them.
"""

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from composer_jax.agent.base_folder import is_vcs_path
from composer_jax.agent.comment_lines import count_added_lines
from composer_jax.agent.shell_duplicates import duplicates_tool
from composer_jax.agent.todos import Todo
from composer_jax.agent.tools import Tool
from composer_jax.agent.tools.schema import ToolError
from composer_jax.agent.transcript import Transcript
from composer_jax.data.chat.chat_format import ChatFormat
from composer_jax.data.chat.messages import MalformedToolCall, ToolCall
from composer_jax.sandbox import Change
from composer_jax.tasks.grading.hack_monitor import original_bytes
from composer_jax.tasks.task import Task

SHELL = "shell"
"""The name of the tool that runs commands, as the model sees it."""
_CACHES = (".pyc", ".pyo", ".egg-info", "__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache")
_CODE = re.compile(r"```.*?(?:```|\Z)|`[^`\n]*`", re.DOTALL)
_QUESTION = re.compile(r"\?(?=[\s\"')*_]|\Z)")


@dataclass(frozen=True)
class EpisodeUsage:
    """Counts of one episode. Every sampled token is in one of thinking, call, final and summary tokens
    (Episode.summary_tokens)."""

    thinking_tokens: int = 0
    """Tokens of the model's messages before their calls, without the text of the last message: what it thinks between
    the markers of its chat format, and what it writes beside a call. Thinking before a summary is in summary_tokens."""
    call_tokens: int = 0
    """Tokens from the first call of a message to the end of the message."""
    output_tokens: int = 0
    """Tokens of the tools' answers, not sampled."""
    final_tokens: int = 0
    """Tokens of the text of the message that ended the episode, without its thinking and its calls."""
    calls: Mapping[str, int] = field(default_factory=dict)
    """Tool -> calls whose arguments fit its schema; those after `finish` count as well."""
    malformed_calls: int = 0
    """Calls that no tool could execute: not parsable, to an unknown tool, or with arguments against its schema."""
    shell_duplicates: int = 0
    """Calls of the shell that only do what another tool of the task does (agent/shell_duplicates.py)."""
    todos: int = 0
    """Items of the plan at the end."""
    unfinished_todos: int = 0
    """Items of it that are not done."""
    changed_files: int = 0
    """Files that the agent made, changed or deleted; caches and version control do not count."""
    added_lines: int = 0
    """Lines added to source code (agent/comment_lines.py)."""
    comment_lines: int = 0
    """Those of them that are only comments."""
    asked_question: bool = False
    """Whether the text of the message that ended the episode asks a question, outside of code."""

    @property
    def total_calls(self) -> int:
        """All calls that the model wrote, the malformed ones included."""
        return sum(self.calls.values()) + self.malformed_calls


def measure_usage(
    transcript: Transcript,
    chat: ChatFormat,
    tools: Mapping[str, Tool],
    has_final_message: bool,
    todos: Sequence[Todo],
    task: Task,
    changes: Mapping[str, Change],
) -> EpisodeUsage:
    """Returns the usage of an episode that has ended.

    Args:
      tools: those of the task, by the name that the model sees.
      has_final_message: whether the last message ended the episode (by `finish`, or by no call), instead of a limit.
      todos: the plan at the end.
      task: its repository is the folder below the workspace.
      changes: of the workspace at the end (Workspace.changes).
    """
    thinking = in_calls = final = malformed = duplicates = 0
    calls: Counter[str] = Counter()
    has_question = False
    nodes = transcript.nodes_of_kind("assistant")
    for node in nodes:
        ids = node.sampled_tokens.tolist()
        thought, text, called = split_message(chat, ids)
        in_calls += called
        if has_final_message and node is nodes[-1]:
            thinking, final = thinking + thought, text
            has_question = asks_question(chat.text(ids[thought : thought + text]))
        else:
            thinking += thought + text
        for call in chat.parse(ids, tools.values()).calls:
            if isinstance(call, MalformedToolCall) or not _is_valid(call, tools):
                malformed += 1
                continue
            calls[call.name] += 1
            duplicates += call.name == SHELL and duplicates_tool(call.arguments.get("command", ""), tools)
    return EpisodeUsage(
        thinking_tokens=thinking,
        call_tokens=in_calls,
        final_tokens=final,
        calls=dict(calls),
        malformed_calls=malformed,
        shell_duplicates=duplicates,
        asked_question=has_question,
        output_tokens=sum(len(node.tokens) for node in transcript.nodes_of_kind("tool")),
        todos=len(todos),
        unfinished_todos=sum(todo.status != "done" for todo in todos),
        **_count_changes(task, changes),
    )


def split_message(chat: ChatFormat, sampled: Sequence[int]) -> tuple[int, int, int]:
    """Returns the numbers of tokens (thinking, text, calls) of a sampled message; they add up to its length.

    The calls begin with the token that completes the marker of the first call, and last to the end of the message.
    """
    ids = list(sampled)
    start = len(ids)
    if chat.parse(ids).calls:
        start = bisect_left(range(1, len(ids)), True, key=lambda count: bool(chat.parse(ids[:count]).calls))
    thinking = min(chat.thinking_length(ids), start)
    return thinking, start - thinking, len(ids) - start


def asks_question(text: str) -> bool:
    """Returns whether a question mark ends a word of the text, outside of code in backticks."""
    return _QUESTION.search(_CODE.sub(" ", text)) is not None


def _is_valid(call: ToolCall, tools: Mapping[str, Tool]) -> bool:
    if call.name not in tools:
        return False
    try:
        tools[call.name].check(call.arguments)
    except ToolError:
        return False
    return True


def _count_changes(task: Task, changes: Mapping[str, Change]) -> dict[str, int]:
    files = added = comments = 0
    for path, change in changes.items():
        is_cache = any(part.endswith(_CACHES) for part in path.split("/"))
        if change.kind == "folder" or is_cache or is_vcs_path(path):
            continue
        before = original_bytes(task, path)
        if change.kind == "file" and change.data == before:  # one of the task's own files
            continue
        files += 1
        if change.kind == "file":
            lines = count_added_lines(path, before or b"", change.data)
            added, comments = added + lines[0], comments + lines[1]
    return {"changed_files": files, "added_lines": added, "comment_lines": comments}
