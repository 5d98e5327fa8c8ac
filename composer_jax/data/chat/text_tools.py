"""A TemplateFormat for templates without tools: our own form of them in the messages that every template has.

    tools   = the system message ends with TOOL_PROMPT, in which a line declares each tool
    call    = <tool_call>, {"name": NAME, "arguments": {...}}, </tool_call> in the text of the model's message
    answers = one user message with <tool_response>, the result, </tool_response> for each

The markers are control tokens where the tokenizer has them, else ordinary tokens. Text of users, tools and files never
becomes a control token, but it can spell a marker of ordinary tokens. That forges no call: only messages that the model
sampled are parsed. An answer cannot end early or contain another, because markers in it are escaped (`<` as `&lt;`).
What a text can do is to claim to be a marker, as it can claim anything else.
"""

import json
import re
from collections.abc import Iterable, Sequence
from itertools import groupby

from composer_jax.data.chat.chat_format import Conversation, ToolSpec, check_answers, rendered_calls
from composer_jax.data.chat.control_text import THINKING
from composer_jax.data.chat.hermes_calls import ANSWER, CALL, parse_control_calls, read_call
from composer_jax.data.chat.jinja_template import JinjaTemplate
from composer_jax.data.chat.messages import (
    AssistantMessage,
    CallTokens,
    MalformedToolCall,
    ToolCall,
    check_call,
    join_content,
)
from composer_jax.data.chat.template_format import Dicts, TemplateFormat
from composer_jax.data.chat.tool_prompt import (
    SIGNATURES,
    TOOL_PROMPT,
    TOOLS,
    check_tool_prompt,
    declaration,
    signature,
)
from composer_jax.data.model_tokenizer import ModelTokenizer

_MARKERS = "|".join(re.escape(text[1:]) for text in (*CALL, *ANSWER))
_ESCAPE = re.compile(rf"(?:<|&((?:amp;)*lt;))(?={_MARKERS})")
_UNESCAPE = re.compile(rf"&(?:lt;|amp;((?:amp;)*lt;))(?={_MARKERS})")


class TextToolsFormat(TemplateFormat):
    """The format of a model whose template has system, user and assistant messages, and no tools that we can read."""

    def __init__(self, tok: ModelTokenizer, template: JinjaTemplate, tool_prompt: str = TOOL_PROMPT) -> None:
        """tool_prompt: declares the tools, which replace {tools} or {signatures} in it (data/chat/tool_prompt.py).

        Raises UserError for a prompt with neither, and as TemplateFormat.
        """
        check_tool_prompt(tool_prompt, "the prompt that declares tools")
        self._tool_prompt = tool_prompt
        super().__init__(tok, template)
        begin, finish = (tok.control.get(marker) for marker in CALL)
        self._call_tokens = begin and finish and CallTokens(begin.id, finish.id, frozenset(self.end_tokens))

    def _dicts(
        self, messages: Conversation, tools: Iterable[ToolSpec], mark: str, calls_before: int = 0
    ) -> tuple[Dicts, Dicts]:
        dicts: Dicts = []
        unanswered = 0
        for role, group in groupby(messages, lambda message: getattr(message, "role", "assistant")):
            if role == "tool":
                answers = [self.control.guard(_escape(message.content), mark) for message in group]
                check_answers(unanswered, len(answers))
                unanswered -= len(answers)
                written = "\n".join(f"{ANSWER[0]}\n{answer}\n{ANSWER[1]}" for answer in answers)
                dicts.append({"role": "user", "content": written})
                continue
            for message in group:
                if isinstance(message, AssistantMessage):
                    content, unanswered = self._say(message, mark), len(message.calls)
                else:
                    content = self.control.guard(message.content, mark)
                dicts.append({"role": role, "content": content})
        if declared := list(tools):
            prompt = self._tool_prompt
            for place, write in ((TOOLS, declaration), (SIGNATURES, signature)):
                if place in self._tool_prompt:
                    lines = "\n".join(self.control.guard(write(tool), mark) for tool in declared)
                    prompt = prompt.replace(place, lines)
            if dicts and dicts[0]["role"] == "system":
                dicts[0]["content"] += f"\n\n{prompt}"
            else:
                dicts.insert(0, {"role": "system", "content": prompt})
        return dicts, []

    def answer_text(self, ids: Sequence[int]) -> str:
        return _unescape(super().answer_text(ids))

    def _say(self, message: AssistantMessage, mark: str) -> str:
        """The text of a message of the model, for the template. Raises ValueError if `parse` would not give it back."""
        if CALL[0] in message.content and CALL[0] not in self.tokenizer.control:
            raise ValueError(f"the content spells {CALL[0]}, which begins a call; write calls as tool calls")
        parts = [self.control.guard_said(message.content, mark)] if message.content else []
        for call in rendered_calls(message):
            check_call(call)
            written = json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)
            parts.append(f"{CALL[0]}\n{self.control.guard(written, mark)}\n{CALL[1]}")
        return "\n".join(parts)

    def _content(self, sampled: Sequence[int]) -> AssistantMessage:
        if self._call_tokens:
            return parse_control_calls(self.tokenizer, sampled, self._call_tokens, "\n")
        end = next((at for at, i in enumerate(sampled) if i in self.end_tokens), None)
        text, control = self._decode(sampled[:end])
        outside: list[str] = []
        calls: list[ToolCall | MalformedToolCall] = []
        at = 0
        begin = text.find(CALL[0], self._after_thinking(text))
        while begin >= 0:
            outside.append(text[at:begin])
            start = begin + len(CALL[0])
            stop, at = _call_end(text, start)
            calls.append(_read(text[start:stop], at > stop, any(start <= place < stop for place in control)))
            begin = text.find(CALL[0], at)
        first, *later = [*outside, text[at:]]
        content = join_content(first.removesuffix("\n") if calls else first, "".join(later))
        return AssistantMessage(content, tuple(calls), end is not None)

    def _after_thinking(self, text: str) -> int:
        """Where calls may begin: after what the model thought, which may speak of calls."""
        if THINKING[0] not in self._opening and not text.lstrip().startswith(THINKING[0]):
            return 0
        end = text.find(THINKING[1])
        return end + len(THINKING[1]) if end >= 0 else len(text)

    def _decode(self, ids: Sequence[int]) -> tuple[str, list[int]]:
        """The text of ids, and where control tokens begin in it."""
        text, places = "", []
        for name, run in groupby(ids, self.tokenizer.names.get):
            for part in [list(run)] if name is None else ([i] for i in run):
                if name is not None:
                    places.append(len(text))
                text += self.tokenizer.decode(part)
        return text, places


def _call_end(text: str, start: int) -> tuple[int, int]:
    """Returns where the call that begins at `start` ends, without and with the marker after it.

    A marker in a string of the call's JSON ends nothing; another call, and the end of the text, leave it open.
    """
    body = start + len(text[start:]) - len(text[start:].lstrip())
    try:
        _, json_end = json.JSONDecoder().raw_decode(text, body)
    except (ValueError, RecursionError):  # read_call says what is wrong
        json_end = start
    close, following = text.find(CALL[1], json_end), text.find(CALL[0], json_end)
    if close >= 0 and (following < 0 or close < following):
        return close, close + len(CALL[1])
    stop = following if following >= 0 else len(text)
    return stop, stop


def _read(text: str, closed: bool, has_control: bool) -> ToolCall | MalformedToolCall:
    if has_control:
        return MalformedToolCall(text, "a control token is inside the call")
    return read_call(text) if closed else MalformedToolCall(text, f"the call does not end with {CALL[1]}")


def _escape(answer: str) -> str:
    return _ESCAPE.sub(lambda match: f"&amp;{match[1]}" if match[1] else "&lt;", answer)


def _unescape(text: str) -> str:
    return _UNESCAPE.sub(lambda match: f"&{match[1]}" if match[1] else "<", text)
