"""A TemplateFormat whose template writes tools and calls itself, in the style of Hermes and Qwen.

call = <tool_call>, {"name": NAME, "arguments": {...}}, </tool_call>; both are control tokens of the tokenizer
"""

from collections.abc import Iterable, Sequence
from typing import Any

from composer_jax.data.chat.chat_format import Conversation, ToolSpec, check_answers, declarations, rendered_calls
from composer_jax.data.chat.hermes_calls import CALL, parse_control_calls
from composer_jax.data.chat.jinja_template import JinjaTemplate
from composer_jax.data.chat.messages import AssistantMessage, CallTokens, ToolCall, check_call
from composer_jax.data.chat.template_format import Dicts, TemplateFormat
from composer_jax.data.model_tokenizer import ModelTokenizer
from composer_jax.errors import UserError

_WORD = "composer"


class HermesFormat(TemplateFormat):
    """The format of a model whose template writes calls between the control tokens CALL of its tokenizer."""

    def __init__(self, tok: ModelTokenizer, template: JinjaTemplate) -> None:
        """Raises UserError when the tokenizer lacks the control tokens; see also TemplateFormat."""
        begin, finish = (tok.id_of(name) for name in CALL)
        super().__init__(tok, template)
        self._call_tokens = CallTokens(begin, finish, frozenset(self.end_tokens))
        self._separator = _before_call(template).rpartition(_WORD)[2]

    def _dicts(
        self, messages: Conversation, tools: Iterable[ToolSpec], mark: str, calls_before: int = 0
    ) -> tuple[Dicts, Dicts]:
        declared = [{**tool, "function": self.control.broken(tool["function"], mark)} for tool in declarations(tools)]
        dicts: Dicts = []
        unanswered: list[tuple[str, str]] = []
        for message in messages:
            if isinstance(message, AssistantMessage):
                calls = rendered_calls(message)
                unanswered = [(f"call{number:05d}", call.name) for number, call in enumerate(calls, calls_before)]
                calls_before += len(calls)
                dicts.append({"role": "assistant", "content": self.control.guard_said(message.content, mark)})
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

    def _call(self, call: ToolCall, key: str, mark: str) -> dict[str, Any]:
        check_call(call)
        function = {"name": call.name, "arguments": self.control.guard(call.arguments, mark)}
        return {"id": key, "type": "function", "function": function}

    def _content(self, sampled: Sequence[int]) -> AssistantMessage:
        return parse_control_calls(self.tokenizer, sampled, self._call_tokens, self._separator)


def writes_calls(tok: ModelTokenizer, template: JinjaTemplate) -> bool:
    """Returns whether the template writes calls between control tokens CALL of the tokenizer."""
    if not all(token in tok.control and token in template.source for token in CALL):
        return False
    try:
        return _WORD in _before_call(template)
    except UserError:  # the template refuses calls
        return False


def _before_call(template: JinjaTemplate) -> str:
    """What the template writes before the call of a message; "" if it writes no call."""
    call = {"id": _WORD, "type": "function", "function": {"name": "call", "arguments": {}}}
    asked: dict[str, Any] = {"role": "user", "content": "ask"}
    text = template.text([asked, {"role": "assistant", "content": _WORD, "tool_calls": [call]}], (), False)
    before, found, _ = text.partition(CALL[0])
    return before if found else ""
