"""The harmony format of gpt-oss, in token ids (OpenAI's description of it, and chat_template.jinja of the model).

    user      = <|start|>user<|message|>, text, <|end|>
    prompt    = <|start|>assistant
    message   = parts, with <|end|><|start|>assistant between them, which the model samples too
    thinking  = <|channel|>analysis<|message|>, text
    text      = <|channel|>final<|message|>, text, <|return|>; before a call <|channel|>commentary<|message|>, text
    call      = to=functions.NAME<|channel|>commentary json<|message|>, a JSON object, <|call|>
    answer    = <|start|>functions.NAME to=assistant<|channel|>commentary<|message|>, a JSON string, <|end|>

A message has at most one call. The template writes the beginning of a conversation: the system message with the day and
the effort, and the developer message with instructions and tools. The headings of calls and answers are the template's.

`render` drops what the template drops: the thinking of messages that do not end the conversation, except of those with
a call after which no message without a call comes. It writes <|end|> instead of <|return|> where the conversation goes
on. Turn by turn, thinking and <|return|> stay as they were sampled.

Two things differ from the published template. It writes the content of a message with a call as thinking, and refuses
it beside thinking; here it is the commentary that OpenAI describes, and stays. The template leaves out system messages
after the first; here they are refused.

Thinking that spells </think> cannot be told from its end in AssistantMessage.content.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from composer_jax.data.chat.call_forms import read_arguments
from composer_jax.data.chat.chat_format import (
    ChatFormat,
    Conversation,
    Message,
    ToolSpec,
    check_answers,
    declarations,
    end_tokens,
    rendered_calls,
)
from composer_jax.data.chat.content_reader import ContentReader
from composer_jax.data.chat.control_text import ControlText
from composer_jax.data.chat.harmony_parts import CONTROL, HarmonyPart, HarmonyReader, Kind, PartReader, divide
from composer_jax.data.chat.jinja_template import JinjaTemplate
from composer_jax.data.chat.messages import (
    THINKING,
    AssistantMessage,
    MalformedToolCall,
    ToolCall,
    check_call,
    is_tool_name,
)
from composer_jax.data.chat.thinking import split_thinking, with_thinking
from composer_jax.data.model_tokenizer import ModelTokenizer
from composer_jax.errors import UserError

_ANCHOR, _TOOL, _ANSWER = "composeranchor", "composertool", "composeranswer"  # to find what is written around them
_NO_MARK = "\0"  # for texts without guarded values
_FUNCTIONS = "functions."
_USER = f"<|start|>user<|message|>{_ANCHOR}<|end|>"


class HarmonyFormat(ChatFormat):
    """The format of a model whose tokenizer has the control tokens CONTROL."""

    tokenizer: ModelTokenizer
    reads_thinking = True

    def __init__(self, tok: ModelTokenizer, template: JinjaTemplate) -> None:
        """Raises UserError for a tokenizer without the control tokens, and for a template of another format."""
        self.tokenizer, self.template = tok, template
        self._start, self._channel, self._message, _, self._end, self.end, self._call = map(tok.id_of, CONTROL)
        self.end_tokens = tuple(dict.fromkeys((self.end, self._call, *end_tokens(self.end, tok))))
        self.generation_prompt = [self._start, *tok.encode("assistant")]
        self.control = ControlText(tok)
        called = {"role": "assistant", "content": "", "tool_calls": [_call_dict(ToolCall(_TOOL, {}))]}
        written = self._after([called])
        answered = self._after([called, {"role": "tool", "content": _ANSWER}]).removeprefix(written)
        heading, _, end = written.removeprefix("<|start|>assistant").partition("{}")
        head, _, foot = answered.partition(_ANSWER)
        self._quotes = head.endswith('"') and foot.startswith('"')
        if self._quotes:
            head, foot = head[:-1], foot[1:]
        name = _FUNCTIONS + _TOOL
        if (end, foot) != ("<|call|>", "<|end|>") or name not in heading or name not in head:
            raise self._refused("it writes calls or their answers in another way")
        self._call_heading, self._answer_heading = heading.split(name, 1), head.split(name, 1)
        self._prove()

    def render(self, messages: Conversation, tools: Iterable[ToolSpec] = ()) -> list[int]:
        system, rest = None, [*messages]
        if rest and isinstance(rest[0], Message) and rest[0].role == "system":
            system = rest.pop(0).content
        ids = self._beginning(system, declarations(tools))
        unanswered: list[str] = []
        answers = (at for at, message in enumerate(rest) if isinstance(message, AssistantMessage) and not message.calls)
        last_answer = max(answers, default=-1)
        for at, message in enumerate(rest):
            if isinstance(message, AssistantMessage):
                calls = rendered_calls(message)
                unanswered = [_FUNCTIONS + call.name for call in calls]
                is_last = at == len(rest) - 1
                thinks = is_last or (calls and at > last_answer)
                content = message.content if thinks else _without_thinking(message.content)
                ids += [*self.generation_prompt, *self.render_assistant(content, calls)]
                if not calls and not is_last:
                    ids[-1] = self._end
            elif message.role == "tool":
                check_answers(len(unanswered), 1)
                ids += self._answer(unanswered.pop(0), message.content)
            elif message.role == "user":
                ids += self.user([message.content])
            else:
                raise ValueError("a system message comes after the first message; put its text into the first one")
        return ids

    def render_assistant(self, content: str, calls: Sequence[ToolCall], *, calls_before: int = 0) -> list[int]:
        if len(calls) > 1:
            names = ", ".join(call.name for call in calls)
            raise ValueError(f"a message has {len(calls)} calls ({names}), and this format has one; divide the message")
        thought, said = split_thinking(content)
        if not thought:
            _require_no_thinking(said)
        begun = content.lstrip()
        unfinished = not calls and begun.startswith(THINKING[0]) and THINKING[1] not in begun
        if unfinished:
            thought, said = begun.removeprefix(THINKING[0]).removeprefix("\n"), ""
        parts = [self._part("analysis", thought)] if thought else []
        if calls:
            check_call(calls[0])
            before, after = self._call_heading
            heading = self.control.ids(f"{before}{_FUNCTIONS}{calls[0].name}{after}", _NO_MARK)
            written = self.tokenizer.encode(json.dumps(calls[0].arguments, ensure_ascii=False))
            parts += [self._part("commentary", said)] if said else []
            parts.append([*heading, *written])
        elif not (unfinished and thought):
            parts.append(self._part("final", said))
        ids = parts[0]
        for part in parts[1:]:
            ids = [*ids, self._end, *self.generation_prompt, *part]
        return [*ids, self._call if calls else self.end]

    def parse(self, ids: Iterable[int], tools: Iterable[ToolSpec] = ()) -> AssistantMessage:
        parts = self._divide(ids)
        texts: dict[Kind, list[str]] = {"thinking": [], "text": []}
        for kind, _, part in parts:
            shown = part.heading if part.body is None else part.body
            if kind in texts and shown:
                texts[kind].append(self.tokenizer.decode(shown))
        thought, said = "\n".join(texts["thinking"]), "\n".join(texts["text"])
        calls = tuple(self._read_call(recipient, part) for kind, recipient, part in parts if kind == "call")
        kind, _, last = parts[-1] if parts else ("heading", "", HarmonyPart(opened=False))
        content = with_thinking(thought, said) if thought else said
        if kind == "thinking" and last.end != self._end and thought and not (said or calls):
            content = f"{THINKING[0]}\n{thought}"
        return AssistantMessage(content, calls, last.end in self.end_tokens)

    def content_reader(self, is_thinking: Callable[[], bool]) -> ContentReader:
        return HarmonyReader(PartReader(self.tokenizer, self.end_tokens))

    def close(self, sampled: Sequence[int]) -> list[int]:
        """See ChatFormat.close. After <|return|> and <|call|> nothing is missing; a call is closed with <|call|>."""
        parts = self._divide(sampled)
        kind, _, last = parts[-1] if parts else ("heading", "", HarmonyPart(opened=False))
        if last.end is not None:
            return [] if last.end in (self._end, self.end, self._call) else [self._end]
        end = self._call if kind == "call" else self._end
        return [end] if last.body is not None else [self._message, end]

    def bridge(self, sampled: Sequence[int], answers: Sequence[str]) -> list[list[int]]:
        asked = [recipient for kind, recipient, _ in self._divide(sampled) if kind == "call"]
        check_answers(len(asked), len(answers))
        turn = [self._answer(author, answer) for author, answer in zip(asked, answers, strict=False)]
        return [self.close(sampled) + ids if number == 0 else ids for number, ids in enumerate(turn)]

    def user(self, parts: Sequence[str | Sequence[int]], follows: Sequence[int] = ()) -> list[int]:
        return [self._start, *self.tokenizer.encode("user"), self._message, *self.encode_parts(parts), self._end]

    def encode_parts(self, parts: Sequence[str | Sequence[int]]) -> list[int]:
        bodies = ([part] if isinstance(part, str) else self._bodies(part) for part in parts)
        return super().encode_parts([body for several in bodies for body in several])

    def without_thinking(self, sampled: Sequence[int]) -> list[int]:
        kept: list[int] = []
        at = 0
        for kind, _, part in self._divide(sampled):
            if not (kind == "thinking" and part.end == self._end):
                kept += sampled[at : at + part.length]
            at += part.length
        return kept

    def thinking_length(self, sampled: Sequence[int]) -> int:
        length = 0
        for kind, _, part in self._divide(sampled):
            if kind != "thinking":
                break
            length += part.length
        return length

    def text(self, ids: Sequence[int]) -> str:
        """See ChatFormat.text. Every part begins a line."""
        texts = (self.tokenizer.decode(self.without_control(body)) for body in self._bodies(ids))
        return "\n".join(text for text in texts if text)

    def answer_text(self, ids: Sequence[int]) -> str:
        start = len(ids) - [*ids][::-1].index(self._message)
        text = self.tokenizer.decode(ids[start : ids.index(self._end, start)])
        return json.loads(text) if self._quotes else text

    def _divide(self, ids: Iterable[int]) -> list[tuple[Kind, str, HarmonyPart]]:
        return divide(self.tokenizer, self.end_tokens, ids)

    def _bodies(self, ids: Iterable[int]) -> list[list[int]]:
        """The ids after each <|message|> of messages, or of a piece of one."""
        reader = PartReader(self.tokenizer, self.end_tokens)
        parts: list[HarmonyPart] = []
        for i in ids:
            part = reader.add(i)
            if not parts or part is not parts[-1]:
                parts.append(part)
        loose = (part.heading if part.body is None and reader.read(part)[0] == "text" else part.body for part in parts)
        return [body for body in loose if body]

    def _part(self, channel: str, text: str) -> list[int]:
        encode = self.tokenizer.encode
        return [self._channel, *encode(channel), self._message, *encode(text)]

    def _answer(self, author: str, answer: str) -> list[int]:
        before, after = self._answer_heading
        name = author if is_tool_name(author) else f"{_FUNCTIONS}invalid"
        text = json.dumps(answer, ensure_ascii=False) if self._quotes else answer
        heading = self.control.ids(f"{before}{name}{after}", _NO_MARK)
        return [*heading, *self.tokenizer.encode(text), self._end]

    def _read_call(self, recipient: str, part: HarmonyPart) -> ToolCall | MalformedToolCall:
        ids = [*part.heading, *([] if part.body is None else [self._message, *part.body])]
        text, body = self.tokenizer.decode(ids).removeprefix("assistant").lstrip(), part.body or []
        if part.end != self._call:
            return MalformedToolCall(text, "the call does not end with <|call|>")
        if part.body is None:
            return MalformedToolCall(text, "no arguments: a call is a heading, <|message|> and a JSON object")
        if any(self.tokenizer.names.get(i, THINKING[0]) not in THINKING for i in body):
            return MalformedToolCall(text, "a control token is inside the call")
        return read_arguments(text, recipient.removeprefix(_FUNCTIONS), self.tokenizer.decode(body))

    def _beginning(self, system: str | None, tools: list[dict[str, Any]]) -> list[int]:
        """The messages of the system and the developer."""
        mark = self.control.mark(system, tools, self.template.source)
        dicts = [] if system is None else [{"role": "system", "content": self.control.guard(system, mark)}]
        declared = [{**tool, "function": self.control.broken(tool["function"], mark)} for tool in tools]
        text = self.template.text([*dicts, {"role": "user", "content": _ANCHOR}], declared, False)
        if not text.endswith(_USER):
            raise self._refused("it writes messages of users in another way")
        return self.control.ids(text.removesuffix(_USER), mark)

    def _after(self, dicts: list[dict[str, Any]]) -> str:
        """The text of messages that follow a message of the user."""
        text = self.template.text([{"role": "user", "content": _ANCHOR}, *dicts], (), False)
        _, user, after = text.partition(_USER)
        if not user:
            raise self._refused("it writes messages of users in another way")
        return after

    def _refused(self, reason: str) -> UserError:
        return UserError(
            f"the chat template of {self.template.name} does not write the harmony format of its tokenizer: {reason}; "
            f"use the published template of the model"
        )

    def _prove(self) -> None:
        """Raises UserError unless `render` writes what the template writes, and `parse` reads it."""
        for message in _PROOF:
            if isinstance(message, AssistantMessage):
                read = self.parse(self.render_assistant(message.content, rendered_calls(message)))
                if read != message:
                    raise self._refused(f"a message is read as {read} instead of {message}")
        for count in range(1, len(_PROOF) + 1):
            messages = _PROOF[:count]
            dicts = [_message_dict(message) for message in messages]
            theirs = self.control.ids(self.template.text(dicts, (), False), _NO_MARK)
            ours = self.render(messages)[len(self._beginning(None, [])) :]  # the beginning can name the time
            if ours != theirs[-len(ours) :]:
                raise self._refused(f"it writes a conversation of {count} messages in another way")


def _without_thinking(content: str) -> str:
    """The content without thinking, even if that was cut off."""
    begun = content.lstrip()
    if begun.startswith(THINKING[0]) and THINKING[1] not in begun:
        return ""
    said = split_thinking(content)[1]
    _require_no_thinking(said)
    return said


def _require_no_thinking(said: str) -> None:
    """Raises ValueError for what would be read as thinking, because nothing was thought before it."""
    if said.lstrip().startswith(THINKING[0]):
        raise ValueError(
            f"the answer after the thinking begins with {THINKING[0]}, which would be read as thinking; keep one"
        )


def _call_dict(call: ToolCall) -> dict[str, Any]:
    """A call as the template takes it."""
    return {"id": "call", "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _message_dict(message: Message | AssistantMessage) -> dict[str, Any]:
    """A message of `_PROOF` as the template takes it."""
    if isinstance(message, Message):
        return {"role": message.role, "content": message.content}
    thought, said = split_thinking(message.content)
    row: dict[str, Any] = {"role": "assistant", "content": said}
    if thought:
        row["thinking"] = thought
    if message.calls:
        row["tool_calls"] = [_call_dict(call) for call in rendered_calls(message)]
    return row


def _say(content: str, *calls: ToolCall) -> AssistantMessage:
    return AssistantMessage(content, calls, True)


_PROOF: tuple[Message | AssistantMessage, ...] = (
    Message("user", "Go."),
    _say("<think>\nI look.\n</think>\n\n", ToolCall("read", {"path": "a \u00e9.py", "lines": [1, 2.5, None, True]})),
    Message("tool", 'x = "1"\n'),
    _say("", ToolCall("run_tests", {})),
    Message("tool", "ok"),
    _say("<think>\nIt is x.\n</think>\n\nIt is x."),
    Message("user", "More."),
    _say("<think>\nAgain.\n</think>\n\n", ToolCall("read", {})),
    Message("tool", ""),
    _say("Done."),
)
"""A conversation of which every beginning is written as the template writes it."""
