"""Made-up conversations through a sampler, and what the learner's forward pass says about them."""

import asyncio
import dataclasses
from collections.abc import Sequence

import numpy as np

from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.sampler.policy import Sample
from composer_jax.sampler.request import Request
from composer_jax.sampler.sampler import Sampler
from tests.models.small import forward, rows, small

CONFIG = small(vocab_size=24, n_layers=2, n_mtp_modules=0)
END = 0


@dataclasses.dataclass
class Branch:
    """The final content of one context; `logprobs` is NaN for tokens that were not sampled."""

    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)

    def add(self, delta: list[int], sample: Sample) -> None:
        self.tokens += [*delta, *sample.tokens]
        self.logprobs += [*[np.nan] * len(delta), *sample.logprobs]


async def converse(
    sampler: Sampler, seed: int, *, turns: int = 3, branches: int = 2, longest: int = 11, max_tokens: int = 6
) -> list[Branch]:
    """A conversation that depends on `seed` and the sampler's weights alone: several turns, then a fresh branch."""
    rng = np.random.default_rng(seed)
    session = await sampler.open(seed)
    try:
        done = []
        for number in range(branches):
            branch = Branch()
            for _ in range(turns):
                delta = rng.integers(0, sampler.definition.config.vocab_size, rng.integers(1, longest + 1)).tolist()
                sample = await session.sample(branch.tokens + delta, SamplingParams(max_tokens), branch=number)
                branch.add(delta, sample)
                await asyncio.sleep(0.001 * rng.integers(0, 3))  # a tool runs meanwhile
            done.append(branch)
        return done
    finally:
        session.close()


def run_all(sampler: Sampler, seeds, **kwargs) -> list[list[Branch]]:
    """The conversations of all seeds at the same time, in the order of the seeds."""

    async def main():
        async with sampler.serving():
            return await asyncio.gather(*(converse(sampler, seed, **kwargs) for seed in seeds))

    return asyncio.run(asyncio.wait_for(main(), 300))


def learner_logprobs(config, weights, branches: list[Branch], length: int) -> list[np.ndarray]:
    """log p of every token of every branch after its first, from one pass over whole rows; NaN at the first."""
    out = []
    for start in range(0, len(branches), 8):
        part = branches[start : start + 8]
        batch = rows([[branch.tokens] for branch in part] + [[]] * (8 - len(part)), length)
        logits = np.asarray(forward(config)(*weights, batch)["logits"], np.float64)
        logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        chosen = np.take_along_axis(logprobs[:, :-1], batch["tokens"][:, 1:, None], axis=-1)[..., 0]
        out += [np.concatenate([[np.nan], chosen[row, : len(branch.tokens) - 1]]) for row, branch in enumerate(part)]
    return out


def assert_logprobs_of_learner(config, weights, branches: list[Branch]) -> None:
    for branch, expected in zip(branches, learner_logprobs(config, weights, branches, 64), strict=True):
        sampled = ~np.isnan(branch.logprobs)
        assert sampled.any()
        np.testing.assert_allclose(np.array(branch.logprobs)[sampled], expected[sampled], atol=1e-4)


def sample_requests(sampler: Sampler, requests: Sequence[Request]) -> list[Sample]:
    """What is sampled for requests that are submitted at the same time."""

    async def main():
        async with sampler.serving():
            return await asyncio.gather(*(sampler.submit(request).future for request in requests))

    return asyncio.run(asyncio.wait_for(main(), 300))


def flat(conversations: list[list[Branch]]) -> list[Branch]:
    return [branch for branches in conversations for branch in branches]


def assert_same(actual: list[list[Branch]], expected: list[list[Branch]]) -> None:
    """The same tokens, and log-probabilities that differ by rounding at most."""
    for a, b in zip(flat(actual), flat(expected), strict=True):
        assert a.tokens == b.tokens
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=2e-5)
