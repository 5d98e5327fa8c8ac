"""Detectors of mistakes: a finished episode -> hints, each of which names a turn and tells what would have avoided it.

Composer 2.5 writes such hints by hand for known patterns (the blog post of 18 May 2026 names "Tool not found", answered
by the list of tools); its detectors and texts are not published, and these are ours. A detector is a pure function. It
reads what the policy wrote and what the tools answered, and no reward: a mistake in a solved episode is a mistake, too.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from composer_jax.agent.episode import Episode
from composer_jax.agent.tools import Tool, error_text, select_tools
from composer_jax.agent.turns import Turn, find_turns
from composer_jax.data.chat.chat_format import ChatFormat
from composer_jax.data.chat.messages import MalformedToolCall, ToolCall, compact_json

LONGEST_QUOTE = 400
"""Characters of an error, or of a call, that a hint repeats."""


@dataclasses.dataclass(frozen=True)
class Hint:
    """What the policy should have known before it wrote a message."""

    turn: int
    """Number of the message in ParsedEpisode.turns."""
    text: str
    """Of the message that the teacher reads before it predicts this turn; it is encoded as text."""


@dataclasses.dataclass(frozen=True)
class ParsedEpisode:
    """A finished episode as detectors read it."""

    episode: Episode
    chat: ChatFormat
    """In which the episode was written."""
    tools: Mapping[str, Tool]
    """Those of the task, by the name that the model sees; {} where the record of the episode has none."""
    turns: Sequence[Turn]
    """The messages of the model, oldest first."""

    @classmethod
    def of(cls, episode: Episode, chat: ChatFormat) -> "ParsedEpisode":
        """Parses the messages of an episode.

        Raises UserError for a tool of the task that this process cannot import.
        """
        available = select_tools(episode.tools)
        return cls(episode, chat, available, find_turns(episode.transcript, chat, available.values()))


Detector = Callable[[ParsedEpisode], Iterable[Hint]]
"""Returns the hints of one kind; several for one turn are joined."""


def malformed_call(parsed: ParsedEpisode) -> Iterable[Hint]:
    """Hints at the form of a call, in messages with a call that could not be parsed."""
    for number, turn in enumerate(parsed.turns):
        bad = next((call for call in turn.message.calls if isinstance(call, MalformedToolCall)), None)
        if bad is not None:
            example = example_call(parsed.chat, parsed.tools, bad.text)
            form = f" Write every call in exactly this form: {example}" if example else ""
            yield Hint(number, f"Reminder: a call that cannot be read is not executed ({_quote(bad.reason)}).{form}")


def unknown_tool(parsed: ParsedEpisode) -> Iterable[Hint]:
    """Hints at the available tools, in messages that call another one; none where the tools are not known."""
    if not parsed.tools:
        return
    for number, turn in enumerate(parsed.turns):
        unknown = [c.name for c in turn.message.calls if isinstance(c, ToolCall) and c.name not in parsed.tools]
        if unknown:
            names = ", ".join(dict.fromkeys(map(_quote, unknown)))
            yield Hint(number, f"Reminder: there is no tool {names}. Available tools: {', '.join(parsed.tools)}.")


def failed_call(parsed: ParsedEpisode) -> Iterable[Hint]:
    """Hints at what a tool answers, in messages with a call that its tool refused: arguments against its schema, a file
    that does not exist, a text to replace that is not there."""
    for number, turn in enumerate(parsed.turns):
        for call, answer in zip(turn.message.calls, turn.answers, strict=False):
            error = error_text(answer)
            if error is None or isinstance(call, MalformedToolCall) or (parsed.tools and call.name not in parsed.tools):
                continue
            arguments = _quote(compact_json(call.arguments))
            yield Hint(number, f"Reminder: {call.name} fails with the arguments {arguments}: {_quote(error)}.")
            break  # the first one, because later calls often fail for the same reason


DETECTORS: Mapping[str, Detector] = {
    "malformed_call": malformed_call,
    "unknown_tool": unknown_tool,
    "failed_call": failed_call,
}
"""Detectors by the name in rl.feedback.detectors."""


def example_call(chat: ChatFormat, tools: Mapping[str, Tool], text: str = "") -> str:
    """Returns a call as the model would write it, as text; "" without tools.

    The tool is the one that `text` names, else the first one that needs arguments.
    """
    if not tools:
        return ""
    named = [name for name in tools if name in text]
    needy = [name for name, tool in tools.items() if tool.parameters["required"]]
    name = max(named, key=len) if named else (needy or list(tools))[0]
    schema = tools[name].parameters
    arguments = {key: _example_value(schema["properties"][key]) for key in schema["required"]}
    ids = chat.without_thinking(chat.render_assistant("", [ToolCall(name, arguments)]))
    return chat.tokenizer.decode([i for i in ids if i not in chat.end_tokens]).strip()


def _example_value(schema: Mapping[str, Any]) -> Any:
    if "enum" in schema:
        return schema["enum"][0]
    kind = schema["type"]
    if kind == "array":
        return [_example_value(schema["items"])]
    if kind == "object":
        return {key: _example_value(schema["properties"][key]) for key in schema["required"]}
    return {"string": "...", "integer": schema.get("minimum", 1), "boolean": True}[kind]


def _quote(text: str) -> str:
    return text if len(text) <= LONGEST_QUOTE else f"{text[:LONGEST_QUOTE]}..."
