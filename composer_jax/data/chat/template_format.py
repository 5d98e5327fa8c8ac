"""The chat format of a published model with a Jinja template: the template's frames around text and sampled ids.

A frame is what the template writes around a message: the ids before its content and those after it. An episode takes
only the frames of new messages from the template. Its history stays as it was sampled, even where the template would
rewrite earlier messages (Qwen3 drops the thinking of earlier turns). Frames are found by rendering short conversations
with an anchor, a word that occurs nowhere else, in the last message of the history. A given conversation (`render`) is
what the template makes of it.

Some templates end no message: the next one ends it with its first control token (GLM-4.5: <|user|>, or <|observation|>
after calls). A model samples that token, and the frame of the next message then lacks it. If it samples another one
than the message that follows begins with, both stay: sampled ids are never changed.

How tools are declared, called and answered is up to the subclasses in template_tools.py and text_tools.py.
"""

import re
from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import pairwise
from os.path import commonprefix
from typing import Any

from composer_jax.data.chat.call_forms import CallForm, Schemas, read_call, schemas_of
from composer_jax.data.chat.chat_format import (
    ChatFormat,
    Conversation,
    Message,
    ToolSpec,
    check_answers,
    end_tokens,
)
from composer_jax.data.chat.control_text import ControlText
from composer_jax.data.chat.jinja_template import JinjaTemplate
from composer_jax.data.chat.messages import (
    THINKING,
    AssistantMessage,
    ToolCall,
    check_call,
    join_content,
)
from composer_jax.data.chat.sampled_text import SampledText, ScannedMessage, scan_calls
from composer_jax.data.chat.thinking import split_thinking, with_thinking
from composer_jax.data.model_tokenizer import ModelTokenizer
from composer_jax.errors import UserError

_WORD = "composer"  # stands for any text, to find what the template writes around it
_ANCHOR = "composeranchor"  # marks the end of a history
_NO_MARK = "\0"  # for texts without guarded values
_THOUGHT, _SAID = "composerthought", "composersaid"
_FRAME = re.compile(rf"{THINKING[0]}(\s*){_THOUGHT}(\s*){THINKING[1]}(\s*){_SAID}")
_BLANK = re.compile(rf"{THINKING[0]}(\s*){THINKING[1]}(\s*){_WORD}")
_CANONICAL = ("\n", "\n", "\n\n")  # white space around the thinking of AssistantMessage.content

Dicts = list[dict[str, Any]]
"""Messages, or declarations of tools, as a template takes them."""


class TemplateFormat(ChatFormat):
    """The format of a model with a chat template. A control token ends its messages, or begins the one after them."""

    tokenizer: ModelTokenizer
    reads_thinking = True
    form: CallForm
    """How the model writes calls."""
    separator: str
    """What is written between the content of a message and its calls."""

    def __init__(self, tok: ModelTokenizer, template: JinjaTemplate) -> None:
        """Raises UserError for a template of which the frames of new messages cannot be isolated."""
        self.tokenizer = tok
        self.template = template
        self.control = ControlText(tok)
        asked, self._prompt = self._before_and_added([Message("user", _ANCHOR)], (), opened=True)
        self.generation_prompt = self._ids(self._prompt, asked)
        self._prompted = asked + self._prompt  # the end of the text before a message of the model
        newest = self._added([Message("user", _ANCHOR)], [_say(_WORD)])
        # What every message of the model begins with. The generation prompt may go on, for instance with <think>.
        self._head = commonprefix([self._prompt, newest])
        # The thinking that the generation prompt begins and leaves open.
        begun = self._prompt.rpartition(THINKING[0])
        self._opening = "".join(begun[1:]) if begun[1] and THINKING[1] not in begun[2] else ""
        # What the model is to write before every content, apart from thinking: at least the tokenizer's own space.
        written = self._before_word(newest[len(self._prompt) :] if newest.startswith(self._prompt) else _WORD)
        has_thinking = any(marker in written for marker in THINKING)
        self._written = self._before_word(_WORD) if has_thinking else written
        self.lead = "" if self._written.strip() else self._written
        self._find_thinking(newest)
        self._find_ends()
        self.end_tokens = tuple(dict.fromkeys((self.end, self._end_of_calls, *end_tokens(self.end, tok))))
        self._check()
        self._prove()

    def _find_thinking(self, newest: str) -> None:
        """Finds the white space around the thinking of a message. newest: a message that says _WORD."""
        thoughtful = self._added([Message("user", _ANCHOR)], [_say(with_thinking(_THOUGHT, _SAID))])
        kept = _FRAME.search(thoughtful.replace(_NO_MARK, ""))
        blank = None if kept else _BLANK.search(newest.replace(_NO_MARK, ""))
        # Whether the place of the thinking is empty at once (Kimi K2-Thinking, in messages without calls).
        self._drops_thinking = blank is not None
        self._frame = kept.groups() if kept else _CANONICAL
        if blank:
            inside, after = blank.groups()
            self._frame = (inside[: len(inside) // 2], inside[len(inside) // 2 :], after)

    def _before_word(self, text: str) -> str:
        """What is decoded before _WORD in a text that follows the generation prompt."""
        return self.tokenizer.decode(self._ids(text, self._prompted)).partition(_WORD)[0]

    def _find_ends(self) -> None:
        """Finds the ids that end messages of the model, and those between such an id and the next message."""
        history: Conversation = [Message("user", _WORD), _say(_ANCHOR)]
        called: Conversation = [Message("user", _WORD), _say(_ANCHOR, ToolCall(_WORD, {}))]
        after = self._ids(self._rest(history))
        self._has_end = bool(after)
        if self._has_end:
            self.end, *self._tail = after
            self._end_of_calls = self.end
        else:
            following = [
                self._ids(self._added(history, [Message("user", _WORD)])),
                self._ids(self._added(called, [Message("tool", _WORD)])),
            ]
            self.end, self._end_of_calls = (ids[0] if ids else -1 for ids in following)
            self._tail = []
        if not {self.end, self._end_of_calls} <= self.tokenizer.names.keys():
            raise UserError(
                f"the chat template of {self.template.name} ends no message of the model with a control token; "
                f"use another template"
            )

    def _message(self, message: AssistantMessage, mark: str) -> dict[str, Any]:
        """A message of the model for the template, without its calls.

        The thinking has a field of its own where the template has one: a template that looks for the markers in the
        content may cut it at others that are mentioned.
        """
        thought, said = split_thinking(message.content)
        # A template that got thinking without an end would end it.
        ends = said != message.content and THINKING[1] in message.content
        if ends and "reasoning_content" in self.template.source:
            guarded = {
                "content": self.control.guard(said, mark),
                "reasoning_content": self.control.guard(thought, mark),
            }
            return {"role": "assistant", **guarded}
        return {"role": "assistant", "content": self.control.guard_said(message.content, mark)}

    @abstractmethod
    def _dicts(
        self, messages: Conversation, tools: Iterable[ToolSpec], mark: str, calls_before: int = 0
    ) -> tuple[Dicts, Dicts]:
        """Returns the messages and the tools for the template, with everything that is not ours guarded by `mark`."""

    def render(self, messages: Conversation, tools: Iterable[ToolSpec] = ()) -> list[int]:
        tools = list(tools)
        mark = self._mark(messages, tools)
        dicts, declared = self._dicts(messages, tools, mark)
        self._check_system(dicts, declared)
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
                added, before = self.control.ids(step[len(before) :], mark, before), step
                ids += added
            if len(steps) > 1:
                length = len(ids) - len(added)
                sampled, tail = self._split(added)
                ids[length:] = sampled
        return [*ids, *self._last_end(dicts)]

    def _check_system(self, dicts: Dicts, declared: Dicts) -> None:
        """Raises ValueError if the template leaves out a message of the system where there are several, as many do."""
        anchors = {at: f"{_ANCHOR}{at}x" for at, message in enumerate(dicts) if message["role"] == "system"}
        if not any(anchors):  # there is none, or only one at the beginning
            return
        anchored = [{**message, "content": anchors.get(at, message["content"])} for at, message in enumerate(dicts)]
        text = self.template.text(anchored, declared, False)
        for at, anchor in anchors.items():
            if anchor not in text:
                raise ValueError(
                    f"the chat template of {self.template.name} leaves out the message of the system "
                    f"{dicts[at]['content'][:60]!r}; put its text into the first message, or into one of the user"
                )

    def _last_end(self, dicts: Dicts) -> list[int]:
        """The id that ends a conversation whose last message is the model's, if the template ends no message."""
        if self._has_end or dicts[-1]["role"] != "assistant":
            return []
        return [self._end_of_calls if dicts[-1].get("tool_calls") else self.end]

    def render_assistant(self, content: str, calls: Sequence[ToolCall], *, calls_before: int = 0) -> list[int]:
        history, message = Message("user", _ANCHOR), AssistantMessage(content, tuple(calls), True)
        for call in calls:
            check_call(call)
        mark = self._mark([message])
        text = self._added([history], [message], mark=mark, calls_before=calls_before)
        drops = self._drops_thinking and bool(split_thinking(content)[0])
        if text.startswith(self._prompt) and not drops:
            written = text[len(self._prompt) :]
        else:
            # The generation prompt goes beyond what the template writes before a message of a history, or the template
            # drops the thinking, so the content continues the prompt instead of being what the template makes of it.
            anchored = AssistantMessage(_ANCHOR, message.calls, True)
            try:
                after = self._rest([history, anchored], mark=mark, calls_before=calls_before, anchors=2)
            except UserError as error:  # it looks for the end of thinking in the text of a call
                raise ValueError(f"the chat template of {self.template.name} changes the calls {calls}") from error
            written = self._continued(content, mark) + after
        ids, _ = self._split(self.control.ids(written, mark, self._prompted))
        if not self._has_end:
            ids.append(self._end_of_calls if calls else self.end)
        self._check_read_back(ids, content, calls)
        return ids

    def _continued(self, content: str, mark: str) -> str:
        """The content of a message after the generation prompt. Raises ValueError if the thinking cannot follow it."""
        thought, said = split_thinking(content)
        if not self._opening and THINKING[1] in self._prompt:
            if thought:
                raise ValueError(
                    f"the message thinks, and the generation prompt of {self.template.name} ends the thinking; leave "
                    f"the thinking out, or use the template that thinks"
                )
            return self.control.guard_said(said, mark)
        if not self._opening and not self._drops_thinking:
            return self.control.guard_said(content, mark)
        inside, before, after = self._frame
        begun = "" if self._opening else f"{THINKING[0]}{inside}"
        guard = self.control.guard if thought else self.control.guard_said
        return f"{begun}{guard(thought, mark)}{before}{THINKING[1]}{after}{guard(said, mark)}"

    def _check_read_back(self, ids: Sequence[int], content: str, calls: Sequence[ToolCall]) -> None:
        """Raises ValueError unless `parse` finds the calls, and the content apart from white space."""
        read = self._parse(ids, _strings_in(calls))
        if read.calls != tuple(calls):
            raise ValueError(f"the calls would be read back as {read.calls}; they cannot be written in this format")
        thought, said = split_thinking(content)
        if [*map(_words, split_thinking(read.content))] != [_words(thought), _words(said)]:
            raise ValueError(f"the chat template of {self.template.name} changes the content {content[:80]!r}")

    def parse(self, ids: Iterable[int], tools: Iterable[ToolSpec] = ()) -> AssistantMessage:
        return self._parse(ids, schemas_of(tools))

    def _parse(self, ids: Iterable[int], schemas: Schemas) -> AssistantMessage:
        ids = list(ids)
        message = self._scan(ids)
        calls = tuple(read_call(span, self.form, schemas) for span in message.calls)
        content = self._content(message.before, self.separator if calls else "")
        complete = not set(self.end_tokens).isdisjoint(ids)
        return AssistantMessage(join_content(content, message.after), calls, complete)

    def _scan(self, ids: Sequence[int]) -> ScannedMessage:
        end = next((at for at, i in enumerate(ids) if i in self.end_tokens), None)
        text = SampledText.of(self.tokenizer, ids[:end])
        return scan_calls(text, self.form, self._after_thinking(text))

    def _after_thinking(self, text: SampledText) -> int:
        """Where calls may begin: after what the model thought, which may speak of calls."""
        if not (self._opening + text.text).lstrip().startswith(THINKING[0]):
            return 0
        end = text.find(THINKING[1])
        return end + len(THINKING[1]) if end >= 0 else len(text.text)

    def _content(self, text: str, separator: str) -> str:
        """The content of a message from its text before the calls; an empty thinking is not content."""
        inside, before, after = self._frame
        begun = text.lstrip()
        if self._opening:
            has_begun = begun.startswith(THINKING[0])
            thinking = begun.removeprefix(THINKING[0]) if has_begun else text.removeprefix(self._written)
        elif begun.startswith(THINKING[0]):
            thinking = begun.removeprefix(THINKING[0]).removeprefix(inside)
        else:
            return text.removeprefix(self._written).removesuffix(separator)
        thought, closed, said = thinking.partition(THINKING[1])
        if not closed:
            return f"{THINKING[0]}\n{thought}"
        thought, said = thought.removesuffix(before), said.removeprefix(after).removesuffix(separator)
        if not thought.strip() and not said.lstrip().startswith(THINKING[0]):
            return said.lstrip("\n")
        return with_thinking(thought, said)

    def without_thinking(self, sampled: Sequence[int]) -> list[int]:
        ids = list(sampled)
        length = self.thinking_length(ids)
        return ids[length:] if THINKING[1] in self._opening + self.tokenizer.decode(ids) else ids

    def thinking_length(self, sampled: Sequence[int]) -> int:
        ids = list(sampled)
        begun = self._opening + self.tokenizer.decode(ids)
        if not begun.lstrip().startswith(THINKING[0]):
            return 0
        if THINKING[1] not in begun:
            return len(ids)
        is_finished = lambda count: THINKING[1] in self.tokenizer.decode(ids[:count])  # noqa: E731
        return bisect_left(range(len(ids)), True, key=is_finished)

    def close(self, sampled: Sequence[int]) -> list[int]:
        return [*super().close(sampled), *self._tail] if self._has_end else []

    def bridge(self, sampled: Sequence[int], answers: Sequence[str]) -> list[list[int]]:
        asked = self._asked(sampled)
        check_answers(len(asked), len(answers))
        turns = [self._answered(asked[:count], answers[:count]) for count in range(1, len(answers) + 1)]
        pieces, at = [], 0
        for turn in turns:
            # A template may put all answers of a turn into one message: an answer ends where the next one differs.
            end = max(at, len(commonprefix([turn, turns[-1]])))
            pieces.append(turns[-1][at:end])
            at = end
        if pieces:
            pieces[0] = [*self.close(sampled), *self._without_end(pieces[0], sampled)]
        return pieces

    def user(self, parts: Sequence[str | Sequence[int]], follows: Sequence[int] = ()) -> list[int]:
        head, space, foot = self._user_frame
        first, *others = parts or [""]
        if not isinstance(first, str):
            has_space = self.tokenizer.decode(first).startswith(space)
            begin = [*([] if has_space else self.tokenizer.encode(space)), *self.encode_parts([first])]
        elif head and head[-1] in self.tokenizer.names:
            begin = self.tokenizer.encode_after_control(space + first)
        else:
            begin = self.tokenizer.encode(space + first)
        return [*self._without_end(head, follows), *begin, *self.encode_parts(others), *foot]

    def _without_end(self, frame: list[int], before: Sequence[int]) -> list[int]:
        """The ids of a frame, without the first one if the model sampled it as the end of its message."""
        return frame[1:] if not self._has_end and [*before[-1:]] == frame[:1] else frame

    def user_body(self, ids: Sequence[int]) -> list[int]:
        head, _, foot = self._user_frame
        is_whole = self._has_end or [*ids[:1]] == head[:1]  # else the model sampled its first id
        return list(ids[len(head) - (not is_whole) : len(ids) - len(foot)])

    def user_text(self, ids: Sequence[int]) -> str:
        before, text = super().user_text(self.user([_WORD])).partition(_WORD)[0], super().user_text(ids)
        return text[len(commonprefix([before, text])) :]

    def answer_text(self, ids: Sequence[int]) -> str:
        text = self.tokenizer.decode(ids).removeprefix(self.tokenizer.names[self._end_of_calls])
        for frame in self._answer_frames:
            if match := frame.fullmatch(text):
                return match["answer"]
        return self.text(ids)

    def _mark(self, messages: Conversation, tools: Iterable[ToolSpec] = ()) -> str:
        """A mark that occurs in nothing that is rendered."""
        return self.control.mark(self._dicts(messages, tools, _NO_MARK), self.template.source)

    def _ids(self, text: str, before: str = _ANCHOR) -> list[int]:
        return self.control.ids(text, _NO_MARK, before)

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
        return self._before_and_added(history, new, opened=opened, mark=mark, calls_before=calls_before)[1]

    def _before_and_added(
        self,
        history: Conversation,
        new: Conversation,
        *,
        opened: bool = False,
        mark: str = _NO_MARK,
        calls_before: int = 0,
    ) -> tuple[str, str]:
        """The end of the text of the history, from its anchor on, and the text of the new messages, as `_added`."""
        before = self._rest(history, mark=mark, calls_before=calls_before)
        after = self._rest([*history, *new], opened=opened, mark=mark, calls_before=calls_before)
        if not after.startswith(before):
            raise self._not_isolated("it rewrites the end of a message when a later one comes")
        return _ANCHOR + before, after[len(before) :]

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
        ids = self.control.ids(pieces[0], mark, "")
        for before, piece in pairwise(pieces):
            ids += [*self._ids(self._head, before), *self.control.ids(piece, mark, before + self._head)]
        if self._has_end and dicts[-1]["role"] == "assistant" and self.end in ids:
            del ids[len(ids) - ids[::-1].index(self.end) :]
        return [*ids, *self._last_end(dicts)]

    def _split(self, ids: list[int]) -> tuple[list[int], list[int]]:
        """Splits a message of the model into the ids that it samples and those that follow."""
        if not self._has_end:
            return ids, []
        if self.end not in ids:
            raise UserError(
                f"the chat template of {self.template.name} does not end every message of the model with "
                f"{self.tokenizer.names[self.end]}; use another template"
            )
        end = ids.index(self.end) + 1
        return ids[:end], ids[end:]

    def _prove(self) -> None:
        """Raises UserError unless `parse` gives back what `render_assistant` writes.

        Thinking may be refused: then `render_assistant` says so for a message that has it.
        """
        for message in _PROOFS:
            calls = [call for call in message.calls if isinstance(call, ToolCall)]
            try:
                read = self._parse(self.render_assistant(message.content, calls), _strings_in(calls))
            except ValueError as error:
                if THINKING[0] in message.content:
                    continue
                raise UserError(f"the chat template of {self.template.name} cannot be used: {error}") from error
            if read != message:
                raise UserError(
                    f"the chat template of {self.template.name} cannot be used: a message is written so that it is "
                    f"read as {read} instead of {message}"
                )

    def _asked(self, sampled: Sequence[int]) -> list[ToolCall]:
        """The calls of a sampled message as far as answers depend on them."""
        calls = self.parse(sampled).calls
        return [ToolCall(call.name if isinstance(call, ToolCall) else "invalid", {}) for call in calls]

    def _answered(self, asked: Sequence[ToolCall], answers: Sequence[str]) -> list[int]:
        """The ids of answers to calls."""
        calls = AssistantMessage(_ANCHOR, tuple(asked), True)
        new = [Message("tool", answer) for answer in answers]
        mark = self._mark([calls, *new])
        before, added = self._before_and_added([Message("user", _WORD), calls], new, mark=mark)
        return self.control.ids(added, mark, before)

    @cached_property
    def _user_frame(self) -> tuple[list[int], str, list[int]]:
        """The ids before a user message's body, a space that becomes a part of its first word, the ids after it."""
        call = ToolCall(_WORD, {})
        histories: list[Conversation] = [
            [Message("user", _WORD), _say(_ANCHOR)],
            [Message("user", _WORD), _say(_WORD, call), Message("tool", _ANCHOR)],
        ]
        frames: list[tuple[str, str]] = []
        for history in histories:
            try:
                frames.append(self._before_and_added(history, [Message("user", _WORD)]))
            except UserError:
                if not frames:
                    raise
                continue  # the template refuses a user after an answer, for instance because both are the user's there
        (before, added), (_, other) = frames[0], frames[-1]
        if self._ids(added) != self._ids(other):
            raise UserError(
                f"the chat template of {self.template.name} writes a user message after a message of the model "
                f"differently than after the answer of a tool; use another template"
            )
        head, _, foot = added.partition(_WORD)
        space = head[len(head.rstrip(" ")) :] if self.tokenizer.joins_spaces else ""
        if self._ids(head, before) == (ids := self._ids(head.removesuffix(space), before)):
            space = ""  # a control token absorbs it
        return ids, space, self._ids(foot)

    @cached_property
    def _answer_frames(self) -> list[re.Pattern[str]]:
        """Match a single answer, and each of several. A frame may hold the name and the id of the call."""
        frames = []
        for count in (1, 3):
            sampled = self.render_assistant("", [ToolCall(_WORD, {})] * count)
            for number, piece in enumerate(self.bridge(sampled, [_SAID] * count)):
                head, _, foot = self.tokenizer.decode(piece).partition(_SAID)
                parts = re.split(f"{re.escape(self.form.call_id(_WORD, number))}|{_WORD}", head)
                before = "[^\n]*?".join(map(re.escape, parts))
                frames.append(re.compile(f"{before}(?P<answer>.*){re.escape(foot)}", re.DOTALL))
        return frames

    def _check(self) -> None:
        """Raises UserError unless the frames of new messages are the same early and late in a conversation."""
        calls = (ToolCall(_WORD, {_WORD: _WORD}), ToolCall(_WORD, {}))
        answers = [Message("tool", _WORD), Message("tool", _WORD)]

        def frames(history: Conversation, last: Message, calls_before: int) -> list[str]:
            said = AssistantMessage(_ANCHOR, calls, True)
            return [
                self._added([*history, Message(last.role, _ANCHOR)], (), opened=True),
                self._added([*history, Message(last.role, _ANCHOR)], [_say(_WORD)]),
                self._rest([*history, last, said], calls_before=calls_before),
                self._added([*history, last, said], answers, calls_before=calls_before),
            ]

        ask = Message("user", _WORD)
        early = frames([], ask, len(calls))  # the same calls have the same ids
        late = frames([ask, AssistantMessage(_WORD, calls, True), answers[0]], answers[1], 0)
        if early != late:
            raise UserError(
                f"the chat template of {self.template.name} writes a message differently depending on those before "
                f"it; use another template"
            )


def _words(text: str) -> str:
    return "".join(text.split())


def _strings_in(calls: Sequence[ToolCall]) -> Schemas:
    """Schemas that say which arguments are strings, for forms that do not."""
    schemas: dict[str, dict[str, Any]] = {}
    for call in calls:
        properties = schemas.setdefault(call.name, {"properties": {}})["properties"]
        properties |= {key: {"type": "string"} for key, value in call.arguments.items() if isinstance(value, str)}
    return schemas


def _say(content: str, *calls: ToolCall) -> AssistantMessage:
    return AssistantMessage(content, calls, True)


_PROOFS = (
    _say("It is x."),
    _say("<think>\nI look at a.py.\n</think>\n\nIt is x."),
    _say("", ToolCall("read", {"path": "a.py"})),
    _say("I read.", ToolCall("read", {"path": "a.py", "start": 3}), ToolCall("run_tests", {})),
    _say(
        "<think>\nNow <tool_call> it.\n</think>\n\n",
        ToolCall("edit", {"old": "</tool_call>", "new": 'a = "\u00e9\U0001f600"\n'}),
    ),
    _say("Two.", ToolCall("run", {"cmd": ["ls", "-l"], "env": {"A": None}, "quiet": True}), ToolCall("finish", {})),
)


def _turn_ends(messages: Dicts) -> list[int]:
    """Number of messages up to the end of each turn. Answers in a row are one turn; a system message ends none."""
    roles = [message["role"] for message in messages]
    return [
        count
        for count, (role, following) in enumerate(zip(roles, [*roles[1:], None], strict=True), 1)
        if following is None or not (role == "system" or role == following == "tool")
    ]
