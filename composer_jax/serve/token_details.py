"""What answers say about tokens beside their text: log-probabilities, and the experts that computed them."""

import base64
import dataclasses
import io
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from composer_jax.data.chat.text_processor import TextProcessor
from composer_jax.sampler.policy import PromptLogprobs, Sample, TopLogprobs


def chat_logprobs(
    text: TextProcessor, tokens: Sequence[int], logprobs: Sequence[float], top: Sequence[TopLogprobs] | None
) -> list[dict[str, Any]]:
    """Returns log-probabilities at temperature 1 in the form of OpenAI's chat completions."""

    def row(token: int, logprob: float) -> dict[str, Any]:
        string = text.tokenizer.decode([token])
        # Part of a character has no text of its own.
        return {"token": string, "logprob": logprob, "bytes": None if "\ufffd" in string else list(string.encode())}

    return [
        row(token, logprob) | {"top_logprobs": [row(*pair) for pair in (top[i].items() if top else ())]}
        for i, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True))
    ]


def completion_logprobs(
    text: TextProcessor,
    tokens: Sequence[int],
    logprobs: Iterable[float | None],
    top: Sequence[TopLogprobs] | None,
) -> dict[str, Any]:
    """Returns log-probabilities at temperature 1 in the form of OpenAI's completions."""
    decode = text.tokenizer.decode
    rows = None
    if top is not None:
        # Of tokens with one text, such as parts of characters, the likeliest stays.
        rows = [{decode([i]): logprob for i, logprob in reversed(place.items())} or None for place in top]
    return {"tokens": [decode([token]) for token in tokens], "token_logprobs": list(logprobs), "top_logprobs": rows}


def cut_top(top: Sequence[TopLogprobs] | None, most: int) -> list[TopLogprobs] | None:
    """Returns the `most` likeliest tokens of each place; None where none are wanted."""
    if top is None or not most:
        return None
    return [dict(itertools.islice(place.items(), most)) for place in top]


def cut_prompt(prompt: PromptLogprobs, most: int) -> PromptLogprobs:
    """Returns a prompt's log-probabilities with the `most` likeliest tokens of each place."""
    return dataclasses.replace(prompt, top_logprobs=cut_top(prompt.top_logprobs, most) or [{} for _ in prompt.logprobs])


def prompt_logprobs(
    text: TextProcessor, tokens: Sequence[int], prompt: PromptLogprobs
) -> list[dict[str, dict[str, Any]] | None]:
    """Returns the log-probabilities of a prompt in vLLM's form: token id -> logprob and text, of each token."""
    rows: list[dict[str, dict[str, Any]] | None] = []
    for token, logprob, top in zip(tokens, prompt.logprobs, prompt.top_logprobs, strict=True):
        if logprob is None:
            rows.append(None)
            continue
        place = top | {token: logprob}
        rows.append(
            {str(i): {"logprob": value, "decoded_token": text.tokenizer.decode([i])} for i, value in place.items()}
        )
    return rows


def routed_experts(sample: Sample, start: int) -> str | None:
    """Returns the experts of a sample's tokens from `start` on as base64 of a .npy file, as vLLM and SGLang write them.

    The array is int32 [tokens of prompt and answer - 1 - start, expert layers, experts per token].
    """
    if sample.routing is None:
        return None
    file = io.BytesIO()
    np.save(file, sample.routing[max(0, start - sample.routing_start) :].astype(np.int32))
    return base64.b64encode(file.getvalue()).decode()


def read_routed_experts(text: str) -> np.ndarray:
    """Returns the array of `routed_experts`. Raises ValueError for another text."""
    return np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)
