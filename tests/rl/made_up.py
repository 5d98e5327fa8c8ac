"""Episodes made by hand."""

import numpy as np

from composer_jax.agent.episode import Episode
from composer_jax.agent.transcript import Transcript


def conversation(start: int, turns: int = 2, summaries: int = 0) -> Transcript:
    """A transcript whose sampled tokens are all different: start, start + 1, ... with logprob -token/1000.

    Each turn is a given token, three sampled tokens and an answer. A summary of two sampled tokens ends a branch.
    """
    transcript, token = Transcript(), start

    def say(kind, n, given):
        nonlocal token
        sampled = list(range(token, token + n))
        token += n
        transcript.append(kind, [given], sampled, [-t / 1000 for t in sampled], [0] * n)

    prompt = transcript.append("prompt", [1, 2, 3])
    for segment in range(summaries + 1):
        for _ in range(turns):
            say("assistant", 3, 5)
            transcript.append("tool", [6, 7, 8])
        if segment < summaries:
            transcript.append("summary_request", [4])
            say("summary", 2, 5)
            transcript.branch(prompt)
            transcript.append("carry", [9, 9])
    return transcript


def episode(reward: float | None, transcript: Transcript | None = None, **fields) -> Episode:
    values = dict(
        task_id="task",
        family="bugfix",
        split="train",
        seed=0,
        transcript=transcript or conversation(100),
        reward=reward,
        outcome="finished" if reward is not None else "infrastructure",
        turns=2,
    )
    return Episode(**(values | fields))


def sampled_tokens(transcript: Transcript) -> dict[int, float]:
    """Every sampled token of a conversation with its logprob."""
    out = {}
    for node in transcript.nodes:
        for token, logprob in zip(node.sampled_tokens.tolist(), node.logprobs, strict=True):
            assert token not in out
            out[token] = np.float32(logprob)
    return out
