"""POST /v1/completions: continues texts or token ids, in the form of OpenAI's completions."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from composer_jax.errors import UserError
from composer_jax.sampler.policy import Sample, SampleChunk
from composer_jax.serve.bodies import CompletionBody
from composer_jax.serve.chat_completions import details, event_text, finish_reason, new_id, usage
from composer_jax.serve.errors import ApiError
from composer_jax.serve.message_stream import TextStream
from composer_jax.serve.service import Choice, Client, Service
from composer_jax.serve.token_details import completion_logprobs, cut_prompt, cut_top

MOST_PROMPTS = 256


async def submit(service: Service, body: CompletionBody, client: Client) -> list[Choice]:
    """Queues the choices of a request; see Service.submit."""
    if body.best_of not in (None, body.n or 1):
        raise ApiError("best_of is not supported; leave it out.", param="best_of")
    many = isinstance(body.prompt, list) and body.prompt and not isinstance(body.prompt[0], int)
    prompts: list[Any] = list(body.prompt) if many else [body.prompt]
    if len(prompts) > MOST_PROMPTS:
        raise ApiError(f"there are {len(prompts)} prompts; send at most {MOST_PROMPTS}.", param="prompt")
    return service.submit([await _encode(service, prompt, body) for prompt in prompts], body, client, new_id("cmpl"))


async def complete(service: Service, body: CompletionBody, choices: Sequence[Choice]) -> dict[str, Any]:
    """Returns the answer to a request that is not streamed."""
    samples = await service.finish(choices)
    rows = [
        _row(service, body, choice, sample, _new_stream(service, body), is_first=True)
        for choice, sample in zip(choices, samples, strict=True)
    ]
    return {**_head(service, choices), "choices": rows, "usage": usage(choices, samples)}


async def stream(service: Service, body: CompletionBody, choices: Sequence[Choice]) -> AsyncIterator[str]:
    """Yields the events of a streamed answer."""
    head = _head(service, choices)
    texts = {choice.index: _new_stream(service, body) for choice in choices}
    begun: set[int] = set()
    async for choice, chunk in service.stream(choices):
        row = _row(service, body, choice, chunk, texts[choice.index], is_first=choice.index not in begun)
        begun.add(choice.index)
        yield event_text({**head, "choices": [row]})
    if body.stream_options is not None and body.stream_options.include_usage:
        samples = [choice.handle.future.result() for choice in choices]
        yield event_text({**head, "choices": [], "usage": usage(choices, samples)})
    yield "data: [DONE]\n\n"


def _row(
    service: Service, body: CompletionBody, choice: Choice, part: Sample | SampleChunk, text: TextStream, is_first: bool
) -> dict[str, Any]:
    """What an answer, or a part of one that is streamed, says of its choice."""
    piece = text.add(part.tokens) + ("" if part.finish_reason is None else text.finish())
    row: dict[str, Any] = {
        "index": choice.index,
        "text": (service.text.decode(choice.prompt) if body.echo and is_first else "") + piece,
        "finish_reason": part.finish_reason and finish_reason(part.finish_reason),
        "logprobs": _logprobs(service, body, choice, part, is_first),
    }
    if part.finish_reason is not None:
        row |= details(service, body, choice, choice.handle.future.result())
    if body.return_token_ids:
        row |= {"prompt_token_ids": choice.prompt} if is_first else {}
        row |= {"token_ids": part.tokens, "weight_versions": part.versions}
    return row


def _head(service: Service, choices: Sequence[Choice]) -> dict[str, Any]:
    head = {"id": choices[0].answer, "object": "text_completion"}
    return {**head, "created": int(time.time()), "model": service.name}


async def _encode(service: Service, prompt: str | list[int], body: CompletionBody) -> list[int]:
    try:
        return await asyncio.to_thread(service.text.encode_prompt, prompt, **body.encode_options())
    except UserError as error:
        raise service.prompt_error(error, "prompt") from error


def _new_stream(service: Service, body: CompletionBody) -> TextStream:
    return TextStream(service.text.decode, body.stop_texts)


def _logprobs(
    service: Service, body: CompletionBody, choice: Choice, part: Sample | SampleChunk, is_first: bool
) -> dict[str, Any] | None:
    """Log-probabilities of part of an answer, and of the prompt before the first part where it is echoed."""
    most = body.n_top_logprobs
    if most is None:
        return None
    tokens, logprobs, top = list(part.tokens), list(part.raw_logprobs or []), cut_top(part.top_logprobs, most)
    if is_first and body.scores_echo:
        prompt = choice.handle.prompt
        assert prompt is not None, "the request asks for the log-probabilities of its prompt"
        prompt = cut_prompt(prompt, most)
        tokens, logprobs = choice.prompt + tokens, prompt.logprobs + logprobs
        top = prompt.top_logprobs + (top or []) if most else None
    return completion_logprobs(service.text, tokens, logprobs, top)
