"""A habit made on purpose: SFT teaches a policy to call a tool that does not exist (benchmarks/feedback.py).

The expert of the memory chain plays short chains, and at a read it first calls `open`, sees the error, and then calls
`read`. These wrong calls are trained. Some traces instead end at a read with the hint of rl.feedback before it, which
the expert follows at once: a network of this size has no other reason to heed a hint.
"""

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from composer_jax.agent.episode import Episode
from composer_jax.agent.episode_context import EpisodeLimits, EpisodeSettings
from composer_jax.agent.episode_spec import EpisodeSpec
from composer_jax.data.chat.chat_format import ChatFormat
from composer_jax.data.chat.compact import CompactFormat
from composer_jax.data.chat.messages import MalformedToolCall, ToolCall
from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.data.token_source import Trace
from composer_jax.demo import memory_chain
from composer_jax.demo.expert import ExpertSession
from composer_jax.demo.played_traces import Job, play_with_progress
from composer_jax.demo.tokenizer import require_own_tokenizer
from composer_jax.rl.feedback import FeedbackConfig, HintFinder
from composer_jax.sampler.policy import Sample
from composer_jax.seeds import hash_seed, seeded_random
from composer_jax.stages.trace_sources import SourceContext
from composer_jax.tasks.task import Split, Task

WRONG_TOOL = "open"
DETECTOR = "unknown_tool"
STEPS = 5
"""Messages of an agent without the habit: four reads and the answer."""
MAX_TURNS = 2 * STEPS
"""A wrong call before each read leaves one message, so that the habit costs little reward."""


class ShortChain:
    """The family of chains that ask for any of their three items, which the context still shows."""

    def generate(self, split: Split, seed: int, index: int) -> Task:
        """Returns task number `index` of the stream (split, seed)."""
        task = memory_chain.generate(split, seed, index, steps=STEPS, asked=None)
        return dataclasses.replace(task, max_turns=MAX_TURNS)


class HabitSession:
    """An expert that calls WRONG_TOOL before some of its reads, with the arguments of the read."""

    def __init__(self, expert: ExpertSession, chat: ChatFormat, rate: float, rng: random.Random):
        """rate: probability of a wrong call before a read."""
        self.max_model_len = expert.max_model_len
        self._expert, self._chat, self._rate, self._rng = expert, chat, rate, rng
        self._read: Sample | None = None  # what follows the wrong call

    async def sample(self, context: Sequence[int], params: SamplingParams, branch: int = 0) -> Sample:
        """See Session."""
        if self._read is not None:
            read, self._read = self._read, None
            return read
        sample = await self._expert.sample(context, params, branch)
        call = self._chat.parse(sample.tokens).calls[0]
        if isinstance(call, MalformedToolCall) or call.name != "read" or self._rng.random() >= self._rate:
            return sample
        self._read = sample
        tokens = self._chat.render_assistant("", [ToolCall(WRONG_TOOL, call.arguments)])
        return dataclasses.replace(sample, tokens=tokens, logprobs=[0.0] * len(tokens), versions=[-1] * len(tokens))

    def close(self) -> None:
        self._expert.close()


class HabitTraces:
    """The SFT source (stages/trace_sources.py: ConversationSource).

    Args:
      traces: number of traces.
      rate: probability of a wrong call before a read.
      hinted: probability that a trace is one of `hinted_traces` in place of a whole episode.
    """

    def __init__(self, context: SourceContext, traces: int, rate: float = 0.6, hinted: float = 0.3):
        self.context, self.count, self.rate, self.hinted = context, traces, rate, hinted
        self.chat = CompactFormat(require_own_tokenizer(context.tokenizer))
        self._hinted = 0

    def traces(self) -> list[Trace]:
        """Returns (tokens int32 [n], trained bool [n]) of every trace."""
        traces: list[Trace] = []
        self._hinted = 0
        for index, episode in enumerate(self.play()):
            rng = seeded_random("habit trace", self.context.seed, index)
            with_hint = hinted_traces(episode, self.chat)
            if with_hint and rng.random() < self.hinted:
                traces.append(rng.choice(with_hint))
                self._hinted += 1
            else:
                traces += [(row.tokens, row.trained) for row in episode.transcript.rows()]
        return traces

    def report(self) -> dict[str, Any]:
        """Returns {"hinted_traces": their number}."""
        return {"hinted_traces": self._hinted}

    def play(self) -> list[Episode]:
        """Plays one episode per trace, in sandboxes, with a progress bar."""
        context = self.context
        # SFT and RL draw from different streams of the training split, so RL repeats no task of SFT.
        stream = hash_seed("sft", context.seed, "habit")
        tasks = [ShortChain().generate("train", stream, index) for index in range(self.count)]
        compaction = context.agent.compaction("none", "agent.compactions")
        settings = EpisodeSettings(EpisodeLimits(MAX_TURNS, 10_000, 10_000))
        jobs: list[Job] = []
        for task in tasks:
            rng = seeded_random("habit", context.seed, task.id)
            expert = ExpertSession(task, self.chat.tokenizer, rng)
            jobs.append((EpisodeSpec(task, 0, compaction), HabitSession(expert, self.chat, self.rate, rng)))
        return play_with_progress(jobs, self.chat, settings, context.agent.concurrency)


def hinted_traces(episode: Episode, chat: ChatFormat) -> list[Trace]:
    """Returns, for each wrong call, what the teacher of rl.feedback reads before it, and then the expert's right call.

    Only the right call is trained: the message that follows the wrong one in the episode.
    """
    finder = HintFinder(FeedbackConfig(detectors=(DETECTOR,)), chat, longest_row=1 << 20)
    spans = episode.transcript.trained_spans()
    turns = episode.transcript.nodes_of_kind("assistant")
    following = {spans[turn.id].start: after for turn, after in zip(turns, turns[1:], strict=False)}
    traces: list[Trace] = []
    for hint in finder(episode).get(0, ()):  # an episode without compaction has one row
        right = following[hint.start].sampled_tokens
        tokens = np.concatenate([hint.context, right])
        traces.append((tokens, np.arange(len(tokens)) >= len(hint.context)))
    return traces
