"""The chat format of a published model with a Jinja template and tool calls in the style of Hermes and Qwen.

    call = <tool_call>, {"name": NAME, "arguments": {...}}, </tool_call>; both are control tokens of the tokenizer

The ids of a turn are those that the template appends to the conversation. A template that rewrites earlier messages
when a later one is added is refused: the model's context would not hold the ids that it sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any

from composer_jax.data.call_scanner import CallSpan, CallTokens, join_content, scan_calls
from composer_jax.data.chat import AssistantMessage, Malformed, ToolCall, check_call, is_tool_name, read_json
from composer_jax.data.chat_format import (
    ChatFormat,
    Conversation,
    Message,
    ToolSpec,
    check_answers,
    declarations,
    end_tokens,
    rendered_calls,
)
from composer_jax.data.control_text import ControlText
from composer_jax.data.jinja_template import JinjaTemplate
from composer_jax.data.model_tokenizer import ModelTokenizer
from composer_jax.errors import UserError

CALL = ("<tool_call>", "</tool_call>")
"""The control tokens around a call."""

_WORD = "composer"  # stands for any text, to find what the template writes around it
_ASK = {"role": "user", "content": _WORD}
_NO_MARK = "\0"  # for texts without guarded values


class TemplateFormat(ChatFormat):
    """The format of a model with a chat template whose tokenizer has the control tokens CALL."""

    tokenizer: ModelTokenizer

    def __init__(self, tok: ModelTokenizer, template: JinjaTemplate) -> None:
        """Raises UserError when the tokenizer lacks the control tokens, or the template is not prefix-stable."""
        self.tokenizer = tok
        self._template = template
        begin, finish = (tok.id_of(name) for name in CALL)
        self._control = ControlText(tok)
        asked, opened = self._text([_ASK]), self._text([_ASK], opened=True)
        self.generation_prompt = self._control.ids(self._added(asked, opened), _NO_MARK)
        message = self._added(opened, self._text([_ASK, {"role": "assistant", "content": _WORD}]))
        self.end, *self._tail = self._control.ids(message.partition(_WORD)[2], _NO_MARK) or [-1]
        if self.end not in tok.names:
            raise UserError(
                f"the chat template of {template.name} ends no message of the model with a control token; "
                f"use another template"
            )
        self.end_tokens = end_tokens(self.end, tok)
        self._call_tokens = CallTokens(begin, finish, frozenset(self.end_tokens))
        with_call = self._text([_ASK, *_as_dicts([AssistantMessage(_WORD, (ToolCall(_WORD, {}),), True)])])
        self._separator, call, _ = self._added(opened, with_call).partition(_WORD)[2].partition(CALL[0])
        if not call:
            raise UserError(
                f"the chat template of {template.name} writes no calls between {CALL[0]} and {CALL[1]}; "
                f"use a model whose template does"
            )
        self._check()

    def render(self, messages: Conversation, tools: Iterable[ToolSpec] = ()) -> list[int]:
        mark, guarded = self._guarded(messages, declared := declarations(tools))
        declared = [{**tool, "function": self._control.broken(tool["function"], mark)} for tool in declared]
        ids: list[int] = []
        tail: list[int] = []  # what follows the end token of the model's last message
        before = ""
        for count in _turn_ends(guarded):
            ids += tail
            text, tail = self._text(guarded[:count], declared), []
            if guarded[count - 1]["role"] == "assistant":
                opened = self._text(guarded[: count - 1], declared, opened=True)
                ids += self._control.ids(self._added(before, opened), mark)
                sampled, tail = self._split(self._control.ids(self._added(opened, text), mark))
                ids += sampled
            else:
                ids += self._control.ids(self._added(before, text), mark)
            before = text
        return ids

    def render_assistant(self, content: str, calls: Sequence[ToolCall], *, calls_before: int = 0) -> list[int]:
        mark, guarded = self._guarded([AssistantMessage(content, tuple(calls), True)], calls_before=calls_before)
        opened, text = self._text([_ASK], opened=True), self._text([_ASK, *guarded])
        return self._split(self._control.ids(self._added(opened, text), mark))[0]

    def parse(self, ids: Iterable[int]) -> AssistantMessage:
        message = scan_calls(ids, self._call_tokens)
        before = self.tokenizer.decode(message.before)
        if message.calls:
            before = before.removesuffix(self._separator)
        calls = tuple(self._parse_call(span) for span in message.calls)
        return AssistantMessage(join_content(before, self.tokenizer.decode(message.after)), calls, message.complete)

    def close(self, sampled: Sequence[int]) -> list[int]:
        return [*([] if self.end in sampled else [self.end]), *self._tail]

    def bridge(self, sampled: Sequence[int], answers: Sequence[str]) -> list[list[int]]:
        calls = self.parse(sampled).calls
        check_answers(len(calls), len(answers))
        names = [call.name if isinstance(call, ToolCall) else "invalid" for call in calls]
        turns = [self._answered(names[:count], answers[:count]) for count in range(1, len(answers) + 1)]
        pieces, at = [], 0
        for number, turn in enumerate(turns):
            # A template may put all answers of a turn into one message: an answer ends where the next one differs.
            end = max(at, _common_prefix(turn, turns[-1]))
            pieces.append([*(self.close(sampled) if number == 0 else []), *turns[-1][at:end]])
            at = end
        return pieces

    def user(self, parts: Sequence[str | Sequence[int]]) -> list[int]:
        head, foot = self._user_frame
        ids = list(head)
        for part in parts:
            ids += self.tokenizer.encode(part) if isinstance(part, str) else self.tokenizer.without_control(part)
        return [*ids, *foot]

    def text(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(self.tokenizer.without_control(ids))

    def answer_text(self, ids: Sequence[int]) -> str:
        text = self.tokenizer.decode(ids).removeprefix(self.tokenizer.names[self.end])
        for head, foot in self._answer_frames:
            if len(text) >= len(head) + len(foot) and text.startswith(head) and text.endswith(foot):
                return text[len(head) : len(text) - len(foot)]
        return self.text(ids)

    def _guarded(
        self, messages: Conversation, declared: Sequence[dict[str, Any]] = (), calls_before: int = 0
    ) -> tuple[str, list[dict[str, Any]]]:
        """Returns a mark, and the messages for the template with contents and arguments guarded by it."""
        mark = self._control.mark(_as_dicts(messages, calls_before), list(declared), self._template.source)
        return mark, _as_dicts(messages, calls_before, lambda value: self._control.guard(value, mark))

    def _text(
        self, messages: list[dict[str, Any]], declared: Sequence[dict[str, Any]] = (), opened: bool = False
    ) -> str:
        return self._template.text(messages, declared, opened)

    def _added(self, before: str, after: str) -> str:
        """The text that the template appended. Raises UserError if it rewrote the text before."""
        if not after.startswith(before):
            raise UserError(
                f"the chat template of {self._template.name} rewrites earlier messages when a later one comes, so "
                f"a model would not see what it sampled; use a template that only appends"
            )
        return after[len(before) :]

    def _split(self, ids: list[int]) -> tuple[list[int], list[int]]:
        """Splits a message of the model into the ids that it samples and those that follow."""
        if self.end not in ids:
            raise UserError(
                f"the chat template of {self._template.name} does not end every message of the model with "
                f"{self.tokenizer.names[self.end]}; use another template"
            )
        end = ids.index(self.end) + 1
        return ids[:end], ids[end:]

    def _answered(self, names: Sequence[str], answers: Sequence[str]) -> list[int]:
        """The ids of answers to calls of tools of these names."""
        calls = AssistantMessage("", tuple(ToolCall(name, {}) for name in names), True)
        mark, guarded = self._guarded([calls, *(Message("tool", answer) for answer in answers)])
        before, after = self._text([_ASK, guarded[0]]), self._text([_ASK, *guarded])
        return self._control.ids(self._added(before, after), mark)

    @cached_property
    def _user_frame(self) -> tuple[list[int], list[int]]:
        """The ids before and after the body of a user message."""
        calls = _as_dicts([AssistantMessage("", (ToolCall(_WORD, {}),), True), Message("tool", _WORD)])
        frames = []
        for before in ([_ASK], [_ASK, *calls]):
            head, _, foot = self._added(self._text(before), self._text([*before, _ASK])).partition(_WORD)
            frames.append((self._control.ids(head, _NO_MARK), self._control.ids(foot, _NO_MARK)))
        if frames[0] != frames[1]:
            raise UserError(
                f"the chat template of {self._template.name} writes a user message after another one differently than "
                f"after the answer of a tool; use another template"
            )
        return frames[0]

    @cached_property
    def _answer_frames(self) -> list[tuple[str, str]]:
        """The text around an answer: of a single answer, and of each of several."""
        frames = []
        for count in (1, 3):
            sampled = self.render_assistant("", [ToolCall(_WORD, {})] * count)
            for piece in self.bridge(sampled, [_WORD] * count):
                head, _, foot = self.tokenizer.decode(piece).partition(_WORD)
                frames.append((head, foot))
        return frames

    def _check(self) -> None:
        """Raises UserError unless a conversation has the same ids rendered whole and turn by turn."""
        calls = (ToolCall(_WORD, {_WORD: _WORD}), ToolCall(_WORD, {}))
        ask, answer = Message("user", _WORD), Message("tool", _WORD)
        whole: list[Message | AssistantMessage] = [ask]
        turns = [self.render(whole)]
        for calls_before in (0, len(calls)):
            sampled = self.render_assistant(_WORD, calls, calls_before=calls_before)
            turns += [self.generation_prompt, sampled, *self.bridge(sampled, [_WORD, _WORD])]
            whole += [AssistantMessage(_WORD, calls, True), answer, answer]
        turns += [self.generation_prompt, self.render_assistant(_WORD, ())]
        whole.append(AssistantMessage(_WORD, (), True))
        self.render([*whole, ask])
        if self.render(whole) != [i for turn in turns for i in turn]:
            raise UserError(
                f"the chat template of {self._template.name} writes a message differently depending on those before "
                f"it; use another template"
            )

    def _parse_call(self, span: CallSpan) -> ToolCall | Malformed:
        text = self.tokenizer.decode(span.ids)
        if not span.closed:
            return Malformed(text, f"the call does not end with {CALL[1]}")
        if self.tokenizer.without_control(span.ids) != span.ids:
            return Malformed(text, "a control token is inside the call")
        try:
            value = read_json(text, "the name and arguments")
        except ValueError as error:
            return Malformed(text, str(error))
        if not isinstance(value, dict) or value.keys() != {"name", "arguments"}:
            return Malformed(text, 'a call is a JSON object, like {"name": "tool", "arguments": {"key": "value"}}')
        if not isinstance(value["name"], str) or not is_tool_name(value["name"]):
            return Malformed(text, f"{value['name']!r} is not a tool name")
        if not isinstance(value["arguments"], dict):
            return Malformed(text, "the arguments are not a JSON object")
        return ToolCall(value["name"], value["arguments"])


def _as_dicts(
    messages: Conversation, calls_before: int = 0, guard: Callable[[Any], Any] = lambda value: value
) -> list[dict[str, Any]]:
    """The messages as dicts for a template; calls have ids, and answers name their call.

    guard: applied to contents and arguments.
    """
    dicts: list[dict[str, Any]] = []
    unanswered: list[tuple[str, str]] = []
    for message in messages:
        if isinstance(message, AssistantMessage):
            calls = rendered_calls(message)
            unanswered = [(f"call{number:05d}", call.name) for number, call in enumerate(calls, calls_before)]
            calls_before += len(calls)
            dicts.append({"role": "assistant", "content": guard(message.content)})
            if calls:
                keys = (key for key, _ in unanswered)
                dicts[-1]["tool_calls"] = [_call(call, key, guard) for call, key in zip(calls, keys, strict=True)]
        elif message.role == "tool":
            check_answers(len(unanswered), 1)
            key, name = unanswered.pop(0)
            dicts.append({"role": "tool", "content": guard(message.content), "name": name, "tool_call_id": key})
        else:
            dicts.append({"role": message.role, "content": guard(message.content)})
    return dicts


def _call(call: ToolCall, key: str, guard: Callable[[Any], Any]) -> dict[str, Any]:
    check_call(call)
    return {"id": key, "type": "function", "function": {"name": call.name, "arguments": guard(call.arguments)}}


def _turn_ends(messages: Sequence[dict[str, Any]]) -> list[int]:
    """Number of messages up to the end of each turn. Answers in a row are one turn; a system message ends none."""
    roles = [message["role"] for message in messages]
    return [
        count
        for count, (role, following) in enumerate(zip(roles, [*roles[1:], None], strict=True), 1)
        if following is None or not (role == "system" or role == following == "tool")
    ]


def _common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common prefix."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))
