"""The chat format of Kimi K2, in token ids (docs/tool_call_guidance.md and chat_template.jinja of the model).

    message   = <|im_system|> or <|im_user|> or <|im_assistant|>, a name, <|im_middle|>, text, <|im_end|>
    tools     = a message of the system named tool_declare: a JSON list
    calls     = <|tool_calls_section_begin|>, the calls, <|tool_calls_section_end|> after the text of a message
    call      = <|tool_call_begin|>, functions.NAME:INDEX, <|tool_call_argument_begin|>, JSON, <|tool_call_end|>
    answer    = a message of the system named tool: "## Return of functions.NAME:INDEX", then the result

INDEX counts the calls of the whole conversation from 0. A default system message, which the template would add, is left
to the caller.
"""

import json
import re
from collections.abc import Iterable, Sequence

from composer_jax.data.chat.call_forms import JSON, CallForm, Schemas, read_arguments, read_call
from composer_jax.data.chat.chat_format import (
    ChatFormat,
    Conversation,
    ToolSpec,
    check_answers,
    declarations,
    end_tokens,
    rendered_calls,
)
from composer_jax.data.chat.messages import (
    AssistantMessage,
    MalformedToolCall,
    ToolCall,
    check_call,
    compact_json,
    join_content,
    read_json,
)
from composer_jax.data.chat.sampled_text import SampledText, ScannedMessage, scan_calls
from composer_jax.data.model_tokenizer import ModelTokenizer

SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
CALL = ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>")
ROLES = ("<|im_system|>", "<|im_user|>", "<|im_assistant|>")
CONTROL = (*ROLES, "<|im_middle|>", "<|im_end|>", *SECTION, *CALL)
"""All control tokens of the format."""

_ID = re.compile(r"functions\.(.+):([0-9]+)")
_LONGEST_ID = 80  # characters of a malformed id that an answer repeats
_HEADING = "## Return of "


class KimiCalls(CallForm):
    """The id of a call, functions.NAME:INDEX, and its arguments as a JSON object."""

    begin, argument, finish = CALL
    around = SECTION
    inner = (CALL[1],)

    def body_end(self, text: SampledText, start: int) -> int:
        place = text.find(self.argument, start)
        stops = [stop for stop in (text.find(self.finish, start), text.find(self.begin, start)) if stop >= 0]
        if place < 0 or place > min(stops, default=place):
            return start
        return JSON.body_end(text, place + len(self.argument))

    def read(self, body: SampledText, schemas: Schemas) -> ToolCall | MalformedToolCall:
        call_id, arguments = self.halves(body)
        if arguments is None:
            return MalformedToolCall(
                body.text, f"no arguments: a call is functions.NAME:INDEX, {CALL[1]} and a JSON object"
            )
        match = _ID.fullmatch(call_id)
        if not match:
            return MalformedToolCall(body.text, f"{call_id!r} is not the id of a call; write functions.NAME:INDEX")
        if arguments.strip() in ("", "null"):
            return read_arguments(body.text, match[1], None)
        try:
            return read_arguments(body.text, match[1], read_json(arguments, "the arguments", strict=False))
        except ValueError as error:
            return MalformedToolCall(body.text, str(error))

    def halves(self, body: SampledText) -> tuple[str, str | None]:
        """Returns the id of a call, and its arguments; None without any."""
        place = body.find(self.argument)
        if place < 0:
            return body.text.strip(), None
        return body.text[:place].strip(), body.text[place + len(self.argument) :]


_CALLS = KimiCalls()


class KimiFormat(ChatFormat):
    """The format of a model whose tokenizer has the control tokens CONTROL."""

    tokenizer: ModelTokenizer

    def __init__(self, tok: ModelTokenizer) -> None:
        """Raises UserError when the tokenizer lacks one of the control tokens."""
        self.tokenizer = tok
        system, user, assistant, self._middle, self.end, *call_tokens = (tok.id_of(name) for name in CONTROL)
        self._section, self._section_end, self._call, self._argument, self._call_end = call_tokens
        self._openers = {"system": system, "user": user, "assistant": assistant}
        self.end_tokens = end_tokens(self.end, tok)
        self.generation_prompt = self._open("assistant", "assistant")

    def render(self, messages: Conversation, tools: Iterable[ToolSpec] = ()) -> list[int]:
        declared = declarations(tools)
        ids = self._message("system", "tool_declare", [compact_json(declared)]) if declared else []
        unanswered: list[str] = []
        count = 0
        for message in messages:
            if isinstance(message, AssistantMessage):
                calls = rendered_calls(message)
                rendered = self.render_assistant(message.content, calls, calls_before=count)
                ids += self.generation_prompt + rendered
                count += len(calls)
                unanswered = self._call_ids(rendered)
            elif message.role == "tool":
                check_answers(len(unanswered), 1)
                ids += self._answer(unanswered.pop(0), message.content)
            else:
                ids += self._message(message.role, message.role, [message.content])
        return ids

    def render_assistant(self, content: str, calls: Sequence[ToolCall], *, calls_before: int = 0) -> list[int]:
        written: list[int] = []
        for index, call in enumerate(calls, calls_before):
            check_call(call)
            written += [self._call, *self.tokenizer.encode(f"functions.{call.name}:{index}"), self._argument]
            written += [*self.tokenizer.encode(json.dumps(call.arguments, ensure_ascii=False)), self._call_end]
        section = [self._section, *written, self._section_end] if calls else []
        return [*self.tokenizer.encode(content), *section, self.end]

    def parse(self, ids: Iterable[int], tools: Iterable[ToolSpec] = ()) -> AssistantMessage:
        ids = list(ids)
        message = self._scan(ids)
        content = join_content(message.before, message.after)
        calls = tuple(read_call(span, _CALLS, {}) for span in message.calls)
        return AssistantMessage(content, calls, not set(self.end_tokens).isdisjoint(ids))

    def _scan(self, sampled: Sequence[int]) -> ScannedMessage:
        end = next((at for at, i in enumerate(sampled) if i in self.end_tokens), None)
        return scan_calls(SampledText.of(self.tokenizer, sampled[:end]), _CALLS, 0)

    def bridge(self, sampled: Sequence[int], answers: Sequence[str]) -> list[list[int]]:
        asked = self._call_ids(sampled)
        check_answers(len(asked), len(answers))
        turn = [self._answer(call, answer) for call, answer in zip(asked, answers, strict=False)]
        return [self.close(sampled) + ids if number == 0 else ids for number, ids in enumerate(turn)]

    def user(self, parts: Sequence[str | Sequence[int]], follows: Sequence[int] = ()) -> list[int]:
        return self._message("user", "user", parts)

    def text(self, ids: Sequence[int]) -> str:
        kept: list[int] = []
        named: int | None = None  # where in `kept` the name of the message's author starts
        for i in ids:
            if i in self._openers.values():
                named = len(kept)
            elif i == self._middle and named is not None:
                del kept[named:]
                named = None
            else:
                kept.append(i)
        return self.tokenizer.decode(self.without_control(kept))

    def answer_text(self, ids: Sequence[int]) -> str:
        return self.text(ids).partition("\n")[2]

    def _open(self, role: str, name: str) -> list[int]:
        return [self._openers[role], *self.tokenizer.encode(name), self._middle]

    def _message(self, role: str, name: str, parts: Sequence[str | Sequence[int]]) -> list[int]:
        return [*self._open(role, name), *self.encode_parts(parts), self.end]

    def _answer(self, call: str, result: str) -> list[int]:
        return self._message("system", "tool", [f"{_HEADING}{call}\n{result}"])

    def _call_ids(self, sampled: Sequence[int]) -> list[str]:
        """The ids of the calls as the model wrote them, which the answers must repeat."""
        return [_CALLS.halves(span.body)[0][:_LONGEST_ID].replace("\n", " ") for span in self._scan(sampled).calls]
