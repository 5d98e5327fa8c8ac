"""The chat format of a published model with a Jinja template: the template's frames around text and sampled ids.

A frame is what the template writes around a message: the ids before its content and those after it. An episode takes
only the frames of new messages from the template. Its history stays as it was sampled, even where the template would
rewrite earlier messages (Qwen3 drops the thinking of earlier turns). Frames are found by rendering short conversations
with an anchor, a word that occurs nowhere else, in the last message of the history. A given conversation (`render`) is
what the template makes of it.

How tools are declared, called and answered is up to the subclasses in hermes.py and text_tools.py.
"""

from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import cached_property
from os.path import commonprefix
from typing import Any

from composer_jax.data.chat.chat_format import (
    ChatFormat,
    Conversation,
    Message,
    ToolSpec,
    check_answers,
    end_tokens,
)
from composer_jax.data.chat.control_text import THINKING, ControlText
from composer_jax.data.chat.jinja_template import JinjaTemplate
from composer_jax.data.chat.messages import AssistantMessage, ToolCall
from composer_jax.data.model_tokenizer import ModelTokenizer
from composer_jax.errors import UserError

_WORD = "composer"  # stands for any text, to find what the template writes around it
_ANCHOR = "composeranchor"  # marks the end of a history
_NO_MARK = "\0"  # for texts without guarded values

Dicts = list[dict[str, Any]]
"""Messages, or declarations of tools, as a template takes them."""


class TemplateFormat(ChatFormat):
    """The format of a model with a chat template whose messages end with a control token."""

    tokenizer: ModelTokenizer

    def __init__(self, tok: ModelTokenizer, template: JinjaTemplate) -> None:
        """Raises UserError for a template of which the frames of new messages cannot be isolated."""
        self.tokenizer = tok
        self.template = template
        self.control = ControlText(tok)
        opened = self._added([Message("user", _ANCHOR)], (), opened=True)
        self.generation_prompt = self._ids(opened)
        newest = self._added([Message("user", _ANCHOR)], [_say(_WORD)])
        # What every message of the model begins with. The generation prompt may go on, for instance with <think>.
        self._head = commonprefix([opened, newest])
        self._opening = opened[len(self._head) :]
        # What the model is to write before a content without thinking.
        self._written = newest[len(opened) :].partition(_WORD)[0].replace(_NO_MARK, "")
        if self._opening:
            self._written = f"\n{THINKING[1]}\n\n" if THINKING[0] in self._opening else ""
        self.end, *self._tail = self._ids(self._rest([Message("user", _WORD), _say(_ANCHOR)])) or [-1]
        if self.end not in tok.names:
            raise UserError(
                f"the chat template of {template.name} ends no message of the model with a control token; "
                f"use another template"
            )
        self.end_tokens = end_tokens(self.end, tok)
        self._check()

    @abstractmethod
    def _dicts(
        self, messages: Conversation, tools: Iterable[ToolSpec], mark: str, calls_before: int = 0
    ) -> tuple[Dicts, Dicts]:
        """Returns the messages and the tools for the template, with everything that is not ours guarded by `mark`."""

    @abstractmethod
    def _content(self, sampled: Sequence[int]) -> AssistantMessage:
        """Parses a message of the model; `_written` may still be in front of its content."""

    def render(self, messages: Conversation, tools: Iterable[ToolSpec] = ()) -> list[int]:
        tools = list(tools)
        mark = self._mark(messages, tools)
        dicts, declared = self._dicts(messages, tools, mark)
        ids: list[int] = []
        tail: list[int] = []  # what follows the end token of the model's last message
        before = ""
        for count in _turn_ends(dicts):
            ids += tail
            text, tail = self.template.text(dicts[:count], declared, False), []
            steps = [text]
            if dicts[count - 1]["role"] == "assistant":
                steps = [self.template.text(dicts[: count - 1], declared, True), text]
            for step in steps:
                if not step.startswith(before):
                    return self._render_whole(dicts, declared, mark)
                added, before = self.control.ids(step[len(before) :], mark), step
                ids += added
            if len(steps) > 1:
                length = len(ids) - len(added)
                sampled, tail = self._split(added)
                ids[length:] = sampled
        return ids

    def render_assistant(self, content: str, calls: Sequence[ToolCall], *, calls_before: int = 0) -> list[int]:
        history, message = Message("user", _ANCHOR), AssistantMessage(content, tuple(calls), True)
        mark = self._mark([message])
        text = self._added([history], [message], mark=mark, calls_before=calls_before)
        if not self._opening:
            return self._split(self.control.ids(text[len(self._head) :], mark))[0]
        # The generation prompt goes beyond what the template writes before a message of a history, so the content
        # continues it instead of being what the template makes of it.
        anchored = AssistantMessage(_ANCHOR, message.calls, True)
        after = self._rest([history, anchored], mark=mark, calls_before=calls_before, anchors=2)
        unthinking = "" if THINKING[1] in content else self._written
        guarded = self.control.guard_said(unthinking + content.removeprefix(self._opening), mark)
        return self._split(self.control.ids(guarded + after, mark))[0]

    def parse(self, ids: Iterable[int]) -> AssistantMessage:
        message = self._content(list(ids))
        return AssistantMessage(message.content.removeprefix(self._written), message.calls, message.complete)

    def without_thinking(self, sampled: Sequence[int]) -> list[int]:
        ids = list(sampled)
        length = self.thinking_length(ids)
        return ids[length:] if THINKING[1] in self._opening + self.tokenizer.decode(ids) else ids

    def thinking_length(self, sampled: Sequence[int]) -> int:
        ids = list(sampled)
        begun = self._opening + self.tokenizer.decode(ids)
        if not begun.lstrip().startswith(THINKING[0]) or THINKING[1] in self._opening:
            return 0
        if THINKING[1] not in begun:
            return len(ids)
        is_finished = lambda count: THINKING[1] in self.tokenizer.decode(ids[:count])  # noqa: E731
        return bisect_left(range(len(ids)), True, key=is_finished)

    def close(self, sampled: Sequence[int]) -> list[int]:
        return [*super().close(sampled), *self._tail]

    def bridge(self, sampled: Sequence[int], answers: Sequence[str]) -> list[list[int]]:
        calls = self.parse(sampled).calls
        check_answers(len(calls), len(answers))
        names = [call.name if isinstance(call, ToolCall) else "invalid" for call in calls]
        turns = [self._answered(names[:count], answers[:count]) for count in range(1, len(answers) + 1)]
        pieces, at = [], 0
        for number, turn in enumerate(turns):
            # A template may put all answers of a turn into one message: an answer ends where the next one differs.
            end = max(at, len(commonprefix([turn, turns[-1]])))
            pieces.append([*(self.close(sampled) if number == 0 else []), *turns[-1][at:end]])
            at = end
        return pieces

    def user(self, parts: Sequence[str | Sequence[int]]) -> list[int]:
        head, foot = self._user_frame
        return [*head, *self.encode_parts(parts), *foot]

    def answer_text(self, ids: Sequence[int]) -> str:
        text = self.tokenizer.decode(ids).removeprefix(self.tokenizer.names[self.end])
        for head, foot in self._answer_frames:
            if len(text) >= len(head) + len(foot) and text.startswith(head) and text.endswith(foot):
                return text[len(head) : len(text) - len(foot)]
        return self.text(ids)

    def _mark(self, messages: Conversation, tools: Iterable[ToolSpec] = ()) -> str:
        """A mark that occurs in nothing that is rendered."""
        return self.control.mark(self._dicts(messages, tools, _NO_MARK), self.template.source)

    def _ids(self, text: str) -> list[int]:
        return self.control.ids(text, _NO_MARK)

    def _rest(
        self,
        messages: Conversation,
        *,
        opened: bool = False,
        mark: str = _NO_MARK,
        calls_before: int = 0,
        anchors: int = 1,
    ) -> str:
        """The text that the template writes after the anchor; after the last of several `anchors`."""
        dicts, _ = self._dicts(messages, (), mark, calls_before)
        _, *rest = self.template.text(dicts, (), opened).split(_ANCHOR, anchors)
        if len(rest) < anchors:
            raise self._not_isolated("it leaves out or changes an earlier message when a later one comes")
        return rest[-1]

    def _added(
        self,
        history: Conversation,
        new: Conversation,
        *,
        opened: bool = False,
        mark: str = _NO_MARK,
        calls_before: int = 0,
    ) -> str:
        """The text that the template writes for new messages, after a history whose last message has the anchor."""
        before = self._rest(history, mark=mark, calls_before=calls_before)
        after = self._rest([*history, *new], opened=opened, mark=mark, calls_before=calls_before)
        if not after.startswith(before):
            raise self._not_isolated("it rewrites the end of a message when a later one comes")
        return after[len(before) :]

    def _not_isolated(self, reason: str) -> UserError:
        return UserError(
            f"the chat template of {self.template.name} does not let the frames of new messages be isolated: {reason}; "
            f"use another template"
        )

    def _render_whole(self, dicts: Dicts, declared: Dicts, mark: str) -> list[int]:
        """Renders a conversation in which the template rewrites earlier messages.

        As elsewhere, the content of a message of the model is encoded apart from what is before it.
        """
        text = self.template.text(dicts, declared, False)
        pieces = text.split(self._head) if any(i in self.tokenizer.names for i in self._ids(self._head)) else [text]
        ids = self.control.ids(pieces[0], mark)
        for piece in pieces[1:]:
            ids += [*self._ids(self._head), *self.control.ids(piece, mark)]
        if dicts[-1]["role"] == "assistant" and self.end in ids:
            del ids[len(ids) - ids[::-1].index(self.end) :]
        return ids

    def _split(self, ids: list[int]) -> tuple[list[int], list[int]]:
        """Splits a message of the model into the ids that it samples and those that follow."""
        if self.end not in ids:
            raise UserError(
                f"the chat template of {self.template.name} does not end every message of the model with "
                f"{self.tokenizer.names[self.end]}; use another template"
            )
        end = ids.index(self.end) + 1
        return ids[:end], ids[end:]

    def _answered(self, names: Sequence[str], answers: Sequence[str]) -> list[int]:
        """The ids of answers to calls of tools of these names."""
        calls = AssistantMessage(_ANCHOR, tuple(ToolCall(name, {}) for name in names), True)
        new = [Message("tool", answer) for answer in answers]
        mark = self._mark([calls, *new])
        return self.control.ids(self._added([Message("user", _WORD), calls], new, mark=mark), mark)

    @cached_property
    def _user_frame(self) -> tuple[list[int], list[int]]:
        """The ids before and after the body of a user message."""
        call = ToolCall(_WORD, {})
        histories: list[Conversation] = [
            [Message("user", _WORD), _say(_ANCHOR)],
            [Message("user", _WORD), _say(_WORD, call), Message("tool", _ANCHOR)],
        ]
        frames = []
        for history in histories:
            head, _, foot = self._added(history, [Message("user", _WORD)]).partition(_WORD)
            frames.append((self._ids(head), self._ids(foot)))
        if frames[0] != frames[1]:
            raise UserError(
                f"the chat template of {self.template.name} writes a user message after a message of the model "
                f"differently than after the answer of a tool; use another template"
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
        """Raises UserError unless the frames of new messages are the same early and late in a conversation."""
        calls = (ToolCall(_WORD, {_WORD: _WORD}), ToolCall(_WORD, {}))
        answers = [Message("tool", _WORD), Message("tool", _WORD)]

        def frames(history: Conversation, last: Message) -> list[str]:
            said = AssistantMessage(_ANCHOR, calls, True)
            return [
                self._added([*history, Message(last.role, _ANCHOR)], (), opened=True),
                self._added([*history, Message(last.role, _ANCHOR)], [_say(_WORD)]),
                self._rest([*history, last, said]),
                self._added([*history, last, said], answers),
            ]

        ask = Message("user", _WORD)
        early = frames([], ask)
        late = frames([ask, AssistantMessage(_WORD, calls, True), answers[0]], answers[1])
        if early != late:
            raise UserError(
                f"the chat template of {self.template.name} writes a message differently depending on those before "
                f"it; use another template"
            )


def _say(content: str, *calls: ToolCall) -> AssistantMessage:
    return AssistantMessage(content, calls, True)


def _turn_ends(messages: Dicts) -> list[int]:
    """Number of messages up to the end of each turn. Answers in a row are one turn; a system message ends none."""
    roles = [message["role"] for message in messages]
    return [
        count
        for count, (role, following) in enumerate(zip(roles, [*roles[1:], None], strict=True), 1)
        if following is None or not (role == "system" or role == following == "tool")
    ]
