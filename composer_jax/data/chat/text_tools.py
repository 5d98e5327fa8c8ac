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
from typing import Any

from composer_jax.data.chat.call_forms import ANSWER, CALL, JSON
from composer_jax.data.chat.chat_format import Conversation, ToolSpec, check_answers, rendered_calls
from composer_jax.data.chat.jinja_template import JinjaTemplate
from composer_jax.data.chat.messages import AssistantMessage, check_call
from composer_jax.data.chat.template_format import Dicts, TemplateFormat
from composer_jax.data.chat.thinking import split_thinking
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
        self.form, self.separator = JSON, "\n"
        super().__init__(tok, template)

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
                    dicts.append(self._say(message, mark))
                    unanswered = len(message.calls)
                else:
                    dicts.append({"role": role, "content": self.control.guard(message.content, mark)})
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

    def _say(self, message: AssistantMessage, mark: str) -> dict[str, Any]:
        """A message of the model for the template. Raises ValueError if `parse` would not give it back."""
        if CALL[0] in split_thinking(message.content)[1] and CALL[0] not in self.tokenizer.control:
            raise ValueError(f"the content spells {CALL[0]}, which begins a call; write calls as tool calls")
        said = self._message(message, mark)
        parts = [said["content"]] if said["content"] else []
        for call in rendered_calls(message):
            check_call(call)
            written = json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)
            parts.append(f"{CALL[0]}\n{self.control.guard(written, mark)}\n{CALL[1]}")
        return {**said, "content": "\n".join(parts)}


def _escape(answer: str) -> str:
    return _ESCAPE.sub(lambda match: f"&amp;{match[1]}" if match[1] else "&lt;", answer)


def _unescape(text: str) -> str:
    return _UNESCAPE.sub(lambda match: f"&{match[1]}" if match[1] else "<", text)
