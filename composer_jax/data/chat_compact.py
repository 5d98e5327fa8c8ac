"""Our own compact format (composer_jax.data.chat) as a ChatFormat.

Tools are not declared, because models of this format learn them in training; calls are not numbered.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from composer_jax.data import chat
from composer_jax.data.chat import AssistantMessage, ToolCall
from composer_jax.data.chat_format import ChatFormat, Conversation, ToolSpec, check_answers, rendered_calls
from composer_jax.data.tokenizer import SPECIAL, Tokenizer
from composer_jax.errors import UserError


class CompactFormat(ChatFormat):
    """The format of models that were trained from scratch with our own Tokenizer."""

    tokenizer: Tokenizer

    def __init__(self, tok: Tokenizer) -> None:
        """Raises UserError for the tokenizer of a published model, which lacks the control tokens."""
        if not isinstance(tok, Tokenizer):
            raise UserError('data.chat_format="compact" needs our own tokenizer; leave it empty in a run with a base.')
        self.end = tok.end
        self.end_tokens = (tok.end,)
        self.generation_prompt = [tok.assistant]
        self.tokenizer = tok

    def render(self, messages: Conversation, tools: Iterable[ToolSpec] = ()) -> list[int]:
        ids, unanswered = [self.tokenizer.bos], 0
        for message in messages:
            if isinstance(message, AssistantMessage):
                calls = rendered_calls(message)
                ids += [*self.generation_prompt, *self.render_assistant(message.content, calls)]
                unanswered = len(calls)
                continue
            if message.role == "tool":
                check_answers(unanswered, 1)
                unanswered -= 1
            ids += chat.render_message(self.tokenizer, message.role, message.content)
        return ids

    def render_assistant(self, content: str, calls: Sequence[ToolCall], *, calls_before: int = 0) -> list[int]:
        return chat.render_assistant(self.tokenizer, content, calls)

    def parse(self, ids: Iterable[int]) -> AssistantMessage:
        return chat.parse_assistant(self.tokenizer, ids)

    def close(self, sampled: Sequence[int]) -> list[int]:
        return [] if self.end in sampled else [self.end]

    def bridge(self, sampled: Sequence[int], answers: Sequence[str]) -> list[list[int]]:
        check_answers(len(self.parse(sampled).calls), len(answers))
        turn = [chat.render_message(self.tokenizer, "tool", answer) for answer in answers]
        return [self.close(sampled) + ids if number == 0 else ids for number, ids in enumerate(turn)]

    def user(self, parts: Sequence[str | Sequence[int]]) -> list[int]:
        return chat.splice(self.tokenizer, "user", parts)

    def text(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(i for i in ids if i >= len(SPECIAL))

    def answer_text(self, ids: Sequence[int]) -> str:
        return self.text(ids)
