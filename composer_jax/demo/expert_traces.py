"""ExpertTraces: the SFT source that lets the scripted experts play training tasks."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from composer_jax.agent.episode import Episode
from composer_jax.agent.episode_context import EpisodeLimits, EpisodeSettings
from composer_jax.data.chat.compact import CompactFormat
from composer_jax.demo import bugfix, memory_chain, notes
from composer_jax.demo.expert import expert_jobs
from composer_jax.demo.lookups import LOOKUPS
from composer_jax.demo.notes import OneBug, TwoBugs
from composer_jax.demo.played_traces import PlayedTraces, play_with_progress
from composer_jax.demo.tokenizer import require_own_tokenizer
from composer_jax.errors import UserError
from composer_jax.seeds import hash_seed
from composer_jax.stages.trace_sources import SourceContext
from composer_jax.tasks.task import Task


class ExpertTraces(PlayedTraces):
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
        super().__init__(context, "traces.npz")
        self.counts, self.chain_steps = dict(traces), chain_steps

    def report(self) -> dict[str, Any]:
        """Returns {"expert_reward": kind of trace -> mean reward}."""
        with np.load(self.path) as file:
            return {
                "expert_reward": {kind: float(file[key]) for kind in self.KINDS if (key := f"reward_{kind}") in file}
            }

    def play(self) -> list[tuple[Task, Episode]]:
        """See PlayedTraces.play."""
        seed, agent, tok = self.context.seed, self.context.agent, require_own_tokenizer(self.context.tokenizer)
        tasks, compactions = [], []
        for kind, count in sorted(self.counts.items()):
            _, compaction = self.KINDS[kind]
            # SFT and RL draw from different streams of the training split, so RL repeats no task of SFT.
            tasks += [self.generate(kind, hash_seed("sft", seed, kind), i) for i in range(count)]
            compactions += [agent.compaction(compaction, "agent.compactions")] * count
        # Room for slips, whose tokens are not targets.
        settings = EpisodeSettings(EpisodeLimits(3 * agent.limits.max_turns, 10_000, 10_000))
        jobs = expert_jobs(tasks, compactions, tok, seed)
        episodes = play_with_progress(jobs, CompactFormat(tok), settings, agent.concurrency)
        return list(zip(tasks, episodes, strict=True))

    def mean_rewards(self, episodes: list[Episode]) -> dict[str, np.float32]:
        """See PlayedTraces.mean_rewards; one for each kind of trace."""
        rewards, first = {}, 0
        for kind, count in sorted(self.counts.items()):
            graded = [e.reward for e in episodes[first : first + count] if e.reward is not None]
            if graded:
                rewards[f"reward_{kind}"] = np.float32(np.mean(graded))
            first += count
        return rewards

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
