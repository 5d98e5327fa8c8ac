"""ExpertTraces: the SFT source that lets the scripted experts play training tasks."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from composer_jax.agent.config import AgentConfig
from composer_jax.agent.episode import Episode
from composer_jax.agent.episode_context import EpisodeLimits
from composer_jax.agent.summary import Compaction
from composer_jax.atomic_write import write_atomically
from composer_jax.data.token_source import Trace
from composer_jax.demo import bugfix, memory_chain, notes
from composer_jax.demo.expert import make_traces
from composer_jax.demo.lookups import LOOKUPS
from composer_jax.demo.notes import OneBug, TwoBugs
from composer_jax.demo.tokenizer import require_own_tokenizer
from composer_jax.errors import UserError
from composer_jax.event_loop import EventLoop
from composer_jax.observe.progress import Progress
from composer_jax.sandbox import LocalSandboxPool
from composer_jax.seeds import hash_seed
from composer_jax.stages.trace_sources import SourceContext
from composer_jax.tasks.task import Task


class ExpertTraces:
    """Traces of the experts, played in sandboxes once per run and then read from DIR/data/traces.npz.

    traces: number of traces of each of KINDS. chain_steps: steps of the chains, except of those of "chain_start".
    """

    KINDS: Mapping[str, tuple[str, str]] = {
        "bugfix": (bugfix.FAMILY, "none"),
        "one_bug": (OneBug.FAMILY, "none"),
        "two_bugs": (TwoBugs.FAMILY, "none"),
        "chain": (memory_chain.FAMILY, "short"),
        "chain_long": (memory_chain.FAMILY, "long"),
        "chain_whole": (memory_chain.FAMILY, "none"),
        "chain_start": (memory_chain.FAMILY, "none"),
        **{family: (family, "none") for family in LOOKUPS},
    }
    """Kind of trace -> (task family, compaction of agent.compactions)."""
    START_STEPS = 5
    """Steps of "chain_start", a chain that ends early and asks for what the context shows, which teaches to look it up;
    in a chain with short summaries five items of six are forgotten by then."""
    system_prompt = ""  # the experts are played without one

    def __init__(self, context: SourceContext, traces: Mapping[str, int], chain_steps: int = memory_chain.STEPS):
        unknown = sorted(set(traces) - set(self.KINDS))
        if unknown:
            known = ", ".join(self.KINDS)
            raise UserError(f"the option traces of ExpertTraces names {unknown[0]!r}; use {known}.")
        self.context, self.counts, self.chain_steps = context, dict(traces), chain_steps
        self.path = context.folder / "traces.npz"

    def traces(self) -> list[Trace]:
        """Returns every branch of every episode as (tokens int32 [n], trained bool [n]).

        Process 0 plays the episodes; the others need no sandbox.
        """
        with np.load(self.context.make_shared(self._write)) as file:
            ends = np.cumsum(file["lengths"])[:-1]
            tokens, trained = file["tokens"].astype(np.int32), file["trained"]
            return list(zip(np.split(tokens, ends), np.split(trained, ends), strict=True))

    def report(self) -> dict[str, Any]:
        """Returns {"expert_reward": kind of trace -> mean reward}."""
        with np.load(self.path) as file:
            return {
                "expert_reward": {kind: float(file[key]) for kind in self.KINDS if (key := f"reward_{kind}") in file}
            }

    def play(self) -> list[tuple[Task, Episode]]:
        """Plays all episodes, in sandboxes, with a progress bar; returns the tasks with their episodes."""
        seed, agent = self.context.seed, self.context.agent
        tasks, compactions = [], []
        for kind, count in sorted(self.counts.items()):
            _, compaction = self.KINDS[kind]
            # SFT and RL draw from different streams of the training split, so RL repeats no task of SFT.
            tasks += [self.generate(kind, hash_seed("sft", seed, kind), i) for i in range(count)]
            compactions += [agent.compaction(compaction, "agent.compactions")] * count
        return list(zip(tasks, play_experts(tasks, compactions, self.context), strict=True))

    def generate(self, kind: str, seed: int, index: int) -> Task:
        """Returns task number `index` of the training stream `seed` for a kind of trace.

        The end of a chain asks for any of its items, and anybody's notes are right.
        """
        if kind == "bugfix":
            return bugfix.generate("train", seed, index)
        if kind in ("one_bug", "two_bugs"):
            family, bugs = self.KINDS[kind][0], 1 if kind == "one_bug" else 2
            return notes.generate(family, bugs, "train", seed, index, reliable=None)
        if kind in LOOKUPS:
            return LOOKUPS[kind].generate("train", seed, index)
        steps = self.START_STEPS if kind == "chain_start" else self.chain_steps
        return memory_chain.generate("train", seed, index, steps=steps, asked=None)

    def _write(self) -> Path:
        if self.path.exists():
            return self.path
        episodes = [episode for _, episode in self.play()]
        return write_atomically(self.path, _npz_bytes(_arrays(episodes, self.counts)))


def play_experts(tasks, compactions: list[Compaction], context: SourceContext) -> list[Episode]:
    """Plays one expert episode per task, in sandboxes, with a progress bar."""
    agent: AgentConfig = context.agent

    async def play(progress: Progress) -> list[Episode]:
        async with LocalSandboxPool(size=agent.concurrency) as pool:
            return await make_traces(
                tasks,
                lambda task, index: compactions[index],
                pool,
                require_own_tokenizer(context.tokenizer),
                # Room for slips, whose tokens are not targets.
                limits=EpisodeLimits(3 * agent.limits.max_turns, 10_000, 10_000),
                seed=context.seed,
                concurrency=agent.concurrency,
                on_done=lambda episode: progress.update(1),
            )

    with EventLoop() as loop, Progress(len(tasks), "trace", "expert traces") as progress:
        return loop.run(play(progress))


def _arrays(episodes: list[Episode], counts: Mapping[str, int]) -> dict[str, np.ndarray]:
    """The rows of all episodes end to end, their lengths, and the mean reward of each kind of trace."""
    rows = [row for episode in episodes for row in episode.transcript.rows()]
    rewards, first = {}, 0
    for kind, count in sorted(counts.items()):
        graded = [e.reward for e in episodes[first : first + count] if e.reward is not None]
        if graded:
            rewards[f"reward_{kind}"] = np.float32(np.mean(graded))
        first += count
    return {
        "tokens": np.concatenate([row.tokens for row in rows]),
        "trained": np.concatenate([row.trained for row in rows]),
        "lengths": np.array([len(row.tokens) for row in rows], np.int32),
        **rewards,
    }


def _npz_bytes(arrays: Mapping[str, Any]) -> bytes:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    return buffer.getvalue()
