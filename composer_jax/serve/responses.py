"""POST /v1/responses: answers in the form of OpenAI's Responses API. Nothing is stored between two requests."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from composer_jax.sampler.policy import Sample
from composer_jax.serve.bodies import ResponsesBody
from composer_jax.serve.chat_completions import encode, event_text, new_id, new_stream, usage
from composer_jax.serve.errors import ApiError
from composer_jax.serve.message_stream import ParsedMessage
from composer_jax.serve.responses_input import ClientTool, messages_of, tool_rows
from composer_jax.serve.service import Choice, Client, Service

CALLED = {
    "function_call": ("arguments", "response.function_call_arguments"),
    "custom_tool_call": ("input", "response.custom_tool_call_input"),
}
"""Items of calls: the field with what the model wrote, and the events in which it is sent."""


async def submit(service: Service, body: ResponsesBody, client: Client) -> list[Choice]:
    """Queues a request; see Service.submit."""
    if body.n not in (None, 1):
        raise ApiError("a response has one answer; leave n out.", param="n")
    messages = await asyncio.to_thread(messages_of, body.instructions, body.input)  # there may be 100,000 items
    tools = tool_rows(body.client_tools)
    return service.submit([await encode(service, messages, tools)], body, client, new_id("resp"), tools)


async def complete(service: Service, body: ResponsesBody, choices: Sequence[Choice]) -> dict[str, Any]:
    """Returns the answer to a request that is not streamed."""
    (sample,) = await service.finish(choices)
    answer = new_stream(service, body, tool_rows(body.client_tools))
    answer.add(sample.tokens)
    _, message = answer.finish()
    items = [*_reasoning_items(message.reasoning), *_message_items(message, new_id("msg"), sample)]
    return _end(_new_response(service, body, choices), [*items, *_call_items(body, message)], sample, choices, body)


async def stream(service: Service, body: ResponsesBody, choices: Sequence[Choice]) -> AsyncIterator[str]:
    """Yields the events of a streamed answer. Reasoning is sent when it is complete."""
    response, number = _new_response(service, body, choices), 0

    def event(kind: str, **fields: Any) -> str:
        nonlocal number
        number += 1
        return event_text({"type": kind, "sequence_number": number - 1, **fields}, kind)

    yield event("response.created", response=response)
    yield event("response.in_progress", response=response)
    message_id, answer, is_open = new_id("msg"), new_stream(service, body, tool_rows(body.client_tools)), False
    reasoning, items, place = "", [], {}
    async for _, chunk in service.stream(choices):
        deltas = [answer.add(chunk.tokens)]
        is_last = chunk.finish_reason is not None
        if is_last:
            rest, message = answer.finish()
            deltas.append(rest)
        reasoning += "".join(delta.reasoning for delta in deltas)
        text = "".join(delta.content for delta in deltas)
        if not is_open and (text or (is_last and not message.calls)):
            is_open = True
            items = _reasoning_items(reasoning)
            for item in items:
                yield event("response.output_item.added", output_index=0, item={**item, "content": []})
                yield event("response.output_item.done", output_index=0, item=item)
            place = {"item_id": message_id, "output_index": len(items), "content_index": 0}
            item = {"id": message_id, "type": "message", "role": "assistant", "status": "in_progress", "content": []}
            yield event("response.output_item.added", output_index=len(items), item=item)
            yield event("response.content_part.added", **place, part=_part(""))
        if text:
            yield event("response.output_text.delta", **place, delta=text, logprobs=[])
    sample = choices[0].handle.future.result()
    items = [*(items or _reasoning_items(message.reasoning)), *_message_items(message, message_id, sample)]
    if is_open:
        yield event("response.output_text.done", **place, text=message.content, logprobs=[])
        yield event("response.content_part.done", **place, part=_part(message.content))
        yield event("response.output_item.done", output_index=len(items) - 1, item=items[-1])
    else:
        for item in items:
            yield event("response.output_item.added", output_index=0, item={**item, "content": []})
            yield event("response.output_item.done", output_index=0, item=item)
    calls = _call_items(body, message)
    for index, call in enumerate(calls, len(items)):
        field, kind = CALLED[call["type"]]
        opened = {**call, field: "", "status": "in_progress"}
        yield event("response.output_item.added", output_index=index, item=opened)
        at = {"item_id": call["id"], "output_index": index}
        yield event(f"{kind}.delta", **at, delta=call[field])
        yield event(f"{kind}.done", **at, name=call["name"], **{field: call[field]})
        yield event("response.output_item.done", output_index=index, item=call)
    whole = _end(response, [*items, *calls], sample, choices, body)
    yield event(f"response.{whole['status']}", response=whole)


def _new_response(service: Service, body: ResponsesBody, choices: Sequence[Choice]) -> dict[str, Any]:
    return {
        "id": choices[0].answer,
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "model": service.name,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "temperature": body.temperature,
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_p": body.top_p,
        "usage": None,
    }


def _end(
    response: dict[str, Any],
    items: list[dict[str, Any]],
    sample: Sample,
    choices: Sequence[Choice],
    body: ResponsesBody,
) -> dict[str, Any]:
    counts = usage(choices, [sample])
    whole = sample.finish_reason == "stop"
    reason = "max_output_tokens" if sample.finish_reason == "length" else "cancelled"
    ids = {"prompt_token_ids": choices[0].prompt, "token_ids": sample.tokens, "weight_versions": sample.versions}
    return {
        **response,
        "status": "completed" if whole else "incomplete",
        "incomplete_details": None if whole else {"reason": reason},
        "output": items,
        "usage": {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": counts["prompt_tokens_details"],
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": counts["total_tokens"],
        },
        **(ids if body.return_token_ids else {}),
    }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _message_items(message: ParsedMessage, key: str, sample: Sample) -> list[dict[str, Any]]:
    if not message.content and message.calls:
        return []
    part, status = _part(message.content), "completed" if sample.finish_reason == "stop" else "incomplete"
    return [{"id": key, "type": "message", "role": "assistant", "status": status, "content": [part]}]


def _reasoning_items(reasoning: str) -> list[dict[str, Any]]:
    if not reasoning:
        return []
    thought = [{"type": "reasoning_text", "text": reasoning}]
    return [{"id": new_id("rs"), "type": "reasoning", "summary": [], "content": thought}]


def _call_items(body: ResponsesBody, message: ParsedMessage) -> list[dict[str, Any]]:
    calls = message.calls[:1] if body.parallel_tool_calls is False else message.calls
    rows = []
    for call in calls:
        tool = body.client_tools.get(call.name) or ClientTool("function", call.name, None, {})
        kind = "fc" if tool.kind == "function" else "ctc"
        ids = {"id": new_id(kind), "status": "completed", "call_id": new_id("call")}
        rows.append(ids | tool.call_fields(call))
    return rows
