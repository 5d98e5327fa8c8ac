"""A TemplateFormat whose template declares tools and writes calls itself, in one of the forms of call_forms.py."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from composer_jax.data.chat.call_forms import CallForm, read_call
from composer_jax.data.chat.chat_format import Conversation, ToolSpec, check_answers, declarations, rendered_calls
from composer_jax.data.chat.control_text import ControlText
from composer_jax.data.chat.jinja_template import JinjaTemplate
from composer_jax.data.chat.messages import AssistantMessage, ToolCall, check_call
from composer_jax.data.chat.sampled_text import SampledText, scan_calls
from composer_jax.data.chat.template_format import Dicts, TemplateFormat
from composer_jax.data.model_tokenizer import ModelTokenizer
from composer_jax.errors import UserError

_WORD = "composer"


@dataclass(frozen=True)
class _AnsweredCall(ToolCall):
    """A call that an answer belongs to. `id`: as the model wrote it; None in forms without ids."""

    id: str | None


class TemplateToolsFormat(TemplateFormat):
    """The format of a model whose template writes calls between control tokens of its tokenizer."""

    def __init__(self, tok: ModelTokenizer, template: JinjaTemplate, form: CallForm, separator: str) -> None:
        """form, separator: those of `call_form`. Raises UserError as TemplateFormat."""
        self.form, self.separator = form, separator
        super().__init__(tok, template)

    def _dicts(
        self, messages: Conversation, tools: Iterable[ToolSpec], mark: str, calls_before: int = 0
    ) -> tuple[Dicts, Dicts]:
        declared = [
            {**tool, "function": self.control.broken(tool["function"], mark)} for tool in self._declarations(tools)
        ]
        dicts: Dicts = []
        unanswered: list[tuple[str, str]] = []
        for message in messages:
            if isinstance(message, AssistantMessage):
                calls = rendered_calls(message)
                unanswered = [
                    (self._call_id(call, number, mark), call.name) for number, call in enumerate(calls, calls_before)
                ]
                calls_before += len(calls)
                dicts.append(self._message(message, mark))
                if calls:
                    keys = (key for key, _ in unanswered)
                    dicts[-1]["tool_calls"] = [self._call(*pair, mark) for pair in zip(calls, keys, strict=True)]
                continue
            dicts.append({"role": message.role, "content": self.control.guard(message.content, mark)})
            if message.role == "tool":
                check_answers(len(unanswered), 1)
                key, name = unanswered.pop(0)
                dicts[-1] |= {"name": name, "tool_call_id": key}
        return dicts, declared

    def _declarations(self, tools: Iterable[ToolSpec]) -> list[dict[str, Any]]:
        """The tools as the template declares them."""
        return declarations(tools)

    def _asked(self, sampled: Sequence[int]) -> list[ToolCall]:
        bodies = [span.body for span in self._scan(sampled).calls]
        calls = zip(super()._asked(sampled), bodies, strict=True)
        return [_AnsweredCall(call.name, {}, self.form.written_id(body)) for call, body in calls]

    def _call_id(self, call: ToolCall, number: int, mark: str) -> str:
        if isinstance(call, _AnsweredCall) and call.id is not None:
            return self.control.guard(call.id, mark)
        return self.form.call_id(call.name, number)

    def _call(self, call: ToolCall, key: str, mark: str) -> dict[str, Any]:
        check_call(call)
        function = {"name": call.name, "arguments": self.control.guard(call.arguments, mark)}
        return {"id": key, "type": "function", "function": function}


def call_form(tok: ModelTokenizer, template: JinjaTemplate, forms: Iterable[CallForm]) -> tuple[CallForm, str] | None:
    """Returns (form in which the template writes calls, what it writes before them); None for another form, or none."""
    found = ((form, _separator(tok, template, form)) for form in forms)
    return next(((form, separator) for form, separator in found if separator is not None), None)


def _separator(tok: ModelTokenizer, template: JinjaTemplate, form: CallForm) -> str | None:
    """What the template writes between the content of a message and its calls; None if not in this form."""
    if not {form.begin, form.finish} <= tok.control.keys():
        return None
    call = ToolCall("call", {_WORD: _WORD})
    written = {
        "id": form.call_id(call.name, 0),
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
    asked: dict[str, Any] = {"role": "user", "content": "ask"}
    said = {"role": "assistant", "content": _WORD, "tool_calls": [written]}
    try:
        text = template.text([asked, said], (), False)
    except UserError:  # the template refuses calls
        return None
    text = text[text.find(_WORD) + len(_WORD) :]
    message = scan_calls(SampledText.of(tok, ControlText(tok).ids(text, "\0")), form, 0)
    if _WORD in message.before or [read_call(span, form, {}) for span in message.calls] != [call]:
        return None
    return message.before
