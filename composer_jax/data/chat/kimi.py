"""The chat format of Kimi K2, K2-Thinking and K2.5: what is special to them beside the template of the folder.

    message   = <|im_system|>, <|im_user|> or <|im_assistant|>, the author's name, <|im_middle|>, text, <|im_end|>
    calls     = <|tool_calls_section_begin|>, the calls, <|tool_calls_section_end|> after the text of a message
    call      = <|tool_call_begin|>, functions.NAME:INDEX, <|tool_call_argument_begin|>, JSON, <|tool_call_end|>
    answer    = a message of the system: "## Return of functions.NAME:INDEX", then the result

INDEX counts the calls of the whole conversation from 0 (docs/tool_call_guidance.md of Kimi K2). An answer repeats the
id as the model wrote it. Tools are declared with sorted keys, as the tokenizer of these models hands them to its
template; for a template that asks for TypeScript see typescript_tools.py.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from composer_jax.data.chat.call_forms import JSON, CallForm, Schemas, read_arguments
from composer_jax.data.chat.chat_format import ToolSpec
from composer_jax.data.chat.jinja_template import JinjaTemplate
from composer_jax.data.chat.messages import MalformedToolCall, ToolCall
from composer_jax.data.chat.sampled_text import SampledText
from composer_jax.data.chat.template_tools import TemplateToolsFormat
from composer_jax.data.model_tokenizer import ModelTokenizer

SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
CALL = ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>")
HEADING = ("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>")
"""Control tokens around the name of a message's author; the last one ends it."""

_ID = re.compile(r"functions\.(.+):([0-9]+)")
_LONGEST_ID = 80  # characters of a malformed id that an answer repeats


class KimiCalls(CallForm):
    """The id of a call, functions.NAME:INDEX, and its arguments as a JSON object. No arguments are an empty object."""

    begin, argument, finish = CALL
    around = SECTION
    inner = (CALL[1],)

    def call_id(self, name: str, number: int) -> str:
        return f"functions.{name}:{number}"

    def written_id(self, body: SampledText) -> str:
        return self._halves(body)[0][:_LONGEST_ID].replace("\n", " ")

    def body_end(self, text: SampledText, start: int) -> int:
        place = text.find(self.argument, start)
        stops = [stop for stop in (text.find(self.finish, start), text.find(self.begin, start)) if stop >= 0]
        if place < 0 or place > min(stops, default=place):
            return start
        return JSON.body_end(text, place + len(self.argument))

    def read(self, body: SampledText, schemas: Schemas) -> ToolCall | MalformedToolCall:
        call_id, arguments = self._halves(body)
        match = _ID.fullmatch(call_id)
        if not match:
            return MalformedToolCall(body.text, f"{call_id!r} is not the id of a call; write functions.NAME:INDEX")
        return read_arguments(body.text, match[1], arguments)

    def _halves(self, body: SampledText) -> tuple[str, str]:
        """Returns the id of a call and its arguments, as they are written."""
        place = body.find(self.argument)
        if place < 0:
            return body.text.strip(), ""
        return body.text[:place].strip(), body.text[place + len(self.argument) :]


KIMI = KimiCalls()


class KimiFormat(TemplateToolsFormat):
    """The format of a model whose template writes calls as KimiCalls reads them."""

    def __init__(self, tok: ModelTokenizer, template: JinjaTemplate, separator: str) -> None:
        """separator: that of `call_form`. Raises UserError as TemplateFormat, and if a token of HEADING is missing."""
        *openers, self._middle = (tok.id_of(name) for name in HEADING)
        self._openers = frozenset(openers)
        super().__init__(tok, template, KIMI, separator)

    def text(self, ids: Sequence[int]) -> str:
        kept: list[int] = []
        named: int | None = None  # where in `kept` the name of the message's author starts
        for i in ids:
            if i in self._openers:
                named = len(kept)
            elif i == self._middle and named is not None:
                del kept[named:]
                named = None
            else:
                kept.append(i)
        return self.tokenizer.decode(self.without_control(kept))

    def _declarations(self, tools: Iterable[ToolSpec]) -> list[dict[str, Any]]:
        return _sorted_keys(super()._declarations(tools))


def _sorted_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _sorted_keys(item) for key, item in sorted(value.items())}
    return [_sorted_keys(item) for item in value] if isinstance(value, list) else value
