"""POST /v1/chat/completions: answers in the form of OpenAI's chat completions, with vLLM's token ids.

The other endpoints share its identifiers, events and refusals.
"""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from composer_jax.data.chat.conversations import read_tools
from composer_jax.data.chat.messages import ToolCall
from composer_jax.errors import UserError
from composer_jax.sampler.policy import Sample, TopLogprobs
from composer_jax.serve.bodies import ChatBody, DetailedBody, SamplingBody
from composer_jax.serve.message_stream import MessageStream, ParsedMessage
from composer_jax.serve.service import Choice, Client, Service
from composer_jax.serve.token_details import chat_logprobs, cut_prompt, cut_top, prompt_logprobs, routed_experts

MOST_MESSAGES = 4096
"""Of a conversation; the time that a chat template takes can grow with their square."""


async def encode(service: Service, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[int]:
    """Returns the prompt of a conversation.

    Raises ApiError for a conversation or tools that the model cannot answer, or that do not fit.
    """
    if len(messages) > MOST_MESSAGES:
        raise service.context_error(
            f"the conversation has {len(messages)} messages, and the server reads {MOST_MESSAGES}", "messages"
        )
    try:
        return await asyncio.to_thread(service.text.encode_chat, messages, tools)
    except UserError as error:
        raise service.prompt_error(error, "messages") from error


async def submit(service: Service, body: ChatBody, client: Client) -> list[Choice]:
    """Queues the choices of a request; see Service.submit."""
    tools = declared_tools(body)
    prompt = await encode(service, body.messages, tools)
    return service.submit([prompt], body, client, new_id("chatcmpl"), tools)


async def complete(service: Service, body: ChatBody, choices: Sequence[Choice]) -> dict[str, Any]:
    """Returns the answer to a request that is not streamed."""
    samples = await service.finish(choices)
    rows = []
    for choice, sample in zip(choices, samples, strict=True):
        stream = new_stream(service, body, declared_tools(body))
        stream.add(sample.tokens)
        _, message = stream.finish()
        calls = message.calls[:1] if body.parallel_tool_calls is False else message.calls
        row: dict[str, Any] = {
            "index": choice.index,
            "message": _message_row(message, calls),
            "finish_reason": finish_reason(sample.finish_reason, calls),
            "logprobs": _logprobs(service, body, sample.tokens, sample.raw_logprobs or [], sample.top_logprobs),
            **details(service, body, choice, sample),
        }
        if body.return_token_ids:
            row |= {"token_ids": sample.tokens, "weight_versions": sample.versions}
        rows.append(row)
    answer = {
        "id": choices[0].answer,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": service.name,
        "choices": rows,
        "usage": usage(choices, samples),
    }
    return answer | ({"prompt_token_ids": choices[0].prompt} if body.return_token_ids else {})


async def stream(service: Service, body: ChatBody, choices: Sequence[Choice]) -> AsyncIterator[str]:
    """Yields the events of a streamed answer."""
    head = {
        "id": choices[0].answer,
        "object": "chat.completion.chunk",
        "created": int(time.time()),
        "model": service.name,
    }

    def event(index: int, delta: dict[str, Any], reason: str | None = None, **more: Any) -> str:
        row = {"index": index, "delta": delta, "finish_reason": reason, "logprobs": None, **more}
        return event_text({**head, "choices": [row]})

    first = {"prompt_token_ids": choices[0].prompt} if body.return_token_ids else {}
    for choice in choices:
        row = {"index": choice.index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        yield event_text({**head, **first, "choices": [{**row, "logprobs": None}]})
        first = {}
    messages = {choice.index: new_stream(service, body, declared_tools(body)) for choice in choices}
    async for choice, chunk in service.stream(choices):
        message = messages[choice.index]
        piece = message.add(chunk.tokens)
        more: dict[str, Any] = {}
        if body.logprobs and chunk.tokens:
            more["logprobs"] = _logprobs(service, body, chunk.tokens, chunk.raw_logprobs, chunk.top_logprobs)
        if body.return_token_ids and chunk.tokens:
            more |= {"token_ids": chunk.tokens, "weight_versions": chunk.versions}
        if piece.content or piece.reasoning or more:
            yield event(choice.index, _delta(piece.content, piece.reasoning), **more)
        if chunk.finish_reason is not None:
            rest, whole = message.finish()
            if rest.content or rest.reasoning:
                yield event(choice.index, _delta(rest.content, rest.reasoning))
            calls = whole.calls[:1] if body.parallel_tool_calls is False else whole.calls
            if calls:
                rows = [{"index": i, **row} for i, row in enumerate(call_rows(calls))]
                yield event(choice.index, {"tool_calls": rows})
            last = details(service, body, choice, choice.handle.future.result())
            yield event(choice.index, {}, finish_reason(chunk.finish_reason, calls), **last)
    if body.stream_options is not None and body.stream_options.include_usage:
        samples = [choice.handle.future.result() for choice in choices]
        yield event_text({**head, "choices": [], "usage": usage(choices, samples)})
    yield "data: [DONE]\n\n"


def declared_tools(body: ChatBody) -> list[dict[str, Any]]:
    """The tools that the model may call."""
    return [] if body.tool_choice == "none" else body.tools or []


def new_stream(service: Service, body: SamplingBody, tools: list[dict[str, Any]]) -> MessageStream:
    """Returns a reader of the answer to a chat in which these tools were declared, in OpenAI's form."""
    return MessageStream(service.text.chat_format, body.stop_texts, read_tools(tools))


def usage(choices: Sequence[Choice], samples: Sequence[Sample]) -> dict[str, Any]:
    """Returns the tokens of a request: each prompt counts once."""
    prompts = {id(choice.prompt): len(choice.prompt) for choice in choices}
    prompt, sampled = sum(prompts.values()), sum(len(sample.tokens) for sample in samples)
    cached = prompts.copy()  # by prompt, of the answer that found least
    for choice, sample in zip(choices, samples, strict=True):
        cached[id(choice.prompt)] = min(cached[id(choice.prompt)], sample.cached)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": sum(cached.values())},
    }


def details(service: Service, body: DetailedBody, choice: Choice, sample: Sample) -> dict[str, Any]:
    """Returns what a choice says about its tokens when it has ended, as far as the request asks for it."""
    rows: dict[str, Any] = {}
    if body.prompt_logprobs is not None and sample.prompt is not None:
        prompt = cut_prompt(sample.prompt, body.prompt_logprobs)
        rows["prompt_logprobs"] = prompt_logprobs(service.text, choice.prompt, prompt)
    if body.return_routed_experts:
        rows["routed_experts"] = routed_experts(sample, body.routed_experts_prompt_start)
    return rows


def _logprobs(
    service: Service,
    body: ChatBody,
    tokens: Sequence[int],
    logprobs: Sequence[float],
    top: Sequence[TopLogprobs] | None,
) -> dict[str, Any] | None:
    if body.n_top_logprobs is None:
        return None
    return {"content": chat_logprobs(service.text, tokens, logprobs, cut_top(top, body.n_top_logprobs))}


def finish_reason(reason: str, calls: Sequence[ToolCall] = ()) -> str:
    """Returns OpenAI's word for the end of a message."""
    if reason == "cancelled":
        return "abort"
    return "tool_calls" if calls and reason == "stop" else reason


def call_rows(calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    """Returns tool calls in OpenAI's form, each with an id of its own."""
    return [
        {
            "id": new_id("call"),
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
        }
        for call in calls
    ]


def new_id(kind: str) -> str:
    """Returns an identifier that nobody can guess, such as "call_5f0a..."."""
    return f"{kind}-{secrets.token_hex(12)}" if kind in ("chatcmpl", "cmpl") else f"{kind}_{secrets.token_hex(12)}"


def event_text(value: dict[str, Any], name: str = "") -> str:
    """Returns a server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(value, ensure_ascii=False)}\n\n"


def _message_row(message: ParsedMessage, calls: Sequence[ToolCall]) -> dict[str, Any]:
    row: dict[str, Any] = {"role": "assistant", "content": message.content or (None if calls else "")}
    if message.reasoning:
        row["reasoning_content"] = message.reasoning
    if calls:
        row["tool_calls"] = call_rows(calls)
    return row


def _delta(content: str, reasoning: str) -> dict[str, Any]:
    delta = {"content": content} if content else {}
    return delta | ({"reasoning_content": reasoning} if reasoning else {})
