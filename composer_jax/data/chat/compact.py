"""Our own compact chat format in token ids.

    message   = role id, text, <|end|>
    assistant = <|assistant|>, text, then for each tool call <|call|>, name, JSON object, and at last <|end|>

Text is encoded once, when it enters the conversation; sampled tokens stay the ids that were sampled. Text cannot forge
a message, because only this module writes control tokens. Tools are not declared, because models of this format learn
them in training; calls are not numbered.
"""

from collections.abc import Iterable, Sequence

from composer_jax.data.chat.chat_format import ChatFormat, Conversation, ToolSpec, check_answers, rendered_calls
from composer_jax.data.chat.messages import (
    AssistantMessage,
    MalformedToolCall,
    ToolCall,
    check_call,
    compact_json,
    is_tool_name,
    read_json,
)
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
            ids += self.message(message.role, [message.content])
        return ids

    def render_assistant(self, content: str, calls: Sequence[ToolCall], *, calls_before: int = 0) -> list[int]:
        ids = self.tokenizer.encode(content)
        for call in calls:
            check_call(call)
            ids += [self.tokenizer.call, *self.tokenizer.encode(call.name + compact_json(call.arguments))]
        return [*ids, self.end]

    def parse(self, ids: Iterable[int], tools: Iterable[ToolSpec] = ()) -> AssistantMessage:
        parts: list[list[int]] = [[]]
        complete = False
        for i in ids:
            if i == self.end:
                complete = True
                break
            if i == self.tokenizer.call:
                parts.append([])
            else:
                parts[-1].append(i)
        content, *bodies = parts
        calls = tuple(_parse_call(self.tokenizer, body) for body in bodies)
        return AssistantMessage(self.tokenizer.decode(content), calls, complete)

    def bridge(self, sampled: Sequence[int], answers: Sequence[str]) -> list[list[int]]:
        check_answers(len(self.parse(sampled).calls), len(answers))
        turn = [self.message("tool", [answer]) for answer in answers]
        return [self.close(sampled) + ids if number == 0 else ids for number, ids in enumerate(turn)]

    def user(self, parts: Sequence[str | Sequence[int]], follows: Sequence[int] = ()) -> list[int]:
        return self.message("user", parts)

    def message(self, role: str, parts: Sequence[str | Sequence[int]]) -> list[int]:
        """Returns a message of `role` ("system", "user", "tool" or "assistant") with a body as `user` takes it."""
        tok = self.tokenizer
        roles = {"system": tok.system, "user": tok.user, "assistant": tok.assistant, "tool": tok.tool}
        if role not in roles:
            raise ValueError(f"{role!r} is not a role; use one of {', '.join(roles)}")
        return [roles[role], *self.encode_parts(parts), tok.end]


def _parse_call(tok: Tokenizer, ids: list[int]) -> ToolCall | MalformedToolCall:
    text = tok.decode(ids)
    control = next((SPECIAL[i] for i in ids if 0 <= i < len(SPECIAL)), None)
    if control:
        return MalformedToolCall(text, f"the control token {control} is inside the call")
    name, brace, rest = text.partition("{")
    name = name.strip()
    if not brace:
        return MalformedToolCall(text, 'no arguments: a call is a name and a JSON object, like name{"key":"value"}')
    if not is_tool_name(name):
        return MalformedToolCall(text, f"{name!r} is not a tool name")
    try:
        return ToolCall(name, read_json(brace + rest, "the arguments"))
    except ValueError as error:
        return MalformedToolCall(text, str(error))
