"""Log-probabilities of likeliest tokens and of prompts, and routed experts, as OpenAI, vLLM and SGLang write them."""

import base64
import io

import httpx2 as httpx
import numpy as np
import openai
import pytest

from tests.stages.base_model import NETWORK

ASK = [{"role": "user", "content": "What is in a.py?"}]


@pytest.fixture(scope="module")
def client(network_url):
    return openai.OpenAI(base_url=f"{network_url}/v1", api_key="none", max_retries=0)


def test_a_chat_has_the_likeliest_tokens_at_once_and_in_pieces(client):
    options = dict(model="small", messages=ASK, max_tokens=12, seed=5, logprobs=True, top_logprobs=4)
    rows = client.chat.completions.create(**options).choices[0].logprobs.content
    assert all(len(row.top_logprobs) == 4 for row in rows)
    for row in rows:
        values = [top.logprob for top in row.top_logprobs]
        assert values == sorted(values, reverse=True) and row.logprob <= values[0]
    assert any(row.token in [top.token for top in row.top_logprobs] for row in rows)
    deltas = [c.choices[0] for c in client.chat.completions.create(**options, stream=True) if c.choices]
    assert [row for delta in deltas if delta.logprobs for row in delta.logprobs.content] == rows


def test_an_echoed_prompt_is_scored_as_evaluation_harnesses_need_it(client, text):
    ids = text.encode_prompt("def add(a, b):")
    options = dict(model="small", prompt=ids, max_tokens=1, temperature=0, echo=True, logprobs=2)
    choice = client.completions.create(**options).choices[0]
    scores = choice.logprobs
    assert len(scores.tokens) == len(scores.token_logprobs) == len(scores.top_logprobs) == len(ids) + 1
    assert scores.token_logprobs[0] is None and scores.top_logprobs[0] is None
    for logprob, top in zip(scores.token_logprobs[1:], scores.top_logprobs[1:], strict=True):
        assert logprob <= max(top.values()) <= 0 and len(top) <= 2
    assert scores.token_logprobs[-1] == max(scores.top_logprobs[-1].values()), "greedy"
    # Each prompt token has the log-probability that it has when it is sampled.
    pieces = list(client.completions.create(**options, stream=True))
    assert pieces[0].choices[0].logprobs.token_logprobs == scores.token_logprobs
    longer = client.completions.create(**options | {"prompt": [*ids, ids[0]]}).choices[0].logprobs
    np.testing.assert_allclose(longer.token_logprobs[1 : len(ids)], scores.token_logprobs[1:-1], atol=1e-5)


def test_prompt_logprobs_are_keyed_by_token_id(network_url, text):
    ids = text.encode_prompt("def add(a, b):")
    body = {"prompt": ids, "max_tokens": 2, "prompt_logprobs": 1, "seed": 3}
    choice = httpx.post(f"{network_url}/v1/completions", json=body).json()["choices"][0]
    assert choice["logprobs"] is None and choice["prompt_logprobs"][0] is None
    for token, place in zip(ids[1:], choice["prompt_logprobs"][1:], strict=True):
        assert 1 <= len(place) <= 2
        assert place[str(token)]["decoded_token"] == text.tokenizer.decode([token])


@pytest.mark.parametrize("start", [0, 5])
def test_routed_experts_come_as_a_numpy_file(network_url, text, start):
    body = {"messages": ASK, "max_tokens": 8, "return_routed_experts": True, "return_token_ids": True, "seed": 2}
    body |= {"routed_experts_prompt_start": start}
    answer = httpx.post(f"{network_url}/v1/chat/completions", json=body).json()
    choice = answer["choices"][0]
    routing = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])))
    n = len(answer["prompt_token_ids"]) + len(choice["token_ids"]) - 1 - start
    assert routing.dtype == np.int32 and routing.shape == (n, NETWORK.n_moe_layers, NETWORK.experts_per_token)
    assert routing.min() >= 0 and routing.max() < NETWORK.n_experts and len(np.unique(routing)) > 1
    with httpx.stream("POST", f"{network_url}/v1/chat/completions", json=body | {"stream": True}) as stream:
        last = [line for line in stream.iter_lines() if "routed_experts" in line]
    assert len(last) == 1 and choice["routed_experts"] in last[0]
