"""Orchestrator: Tasks -> Episodes -> Groups -> Batches -> Params. The only place where the roles meet.

This one takes turns on one set of devices: roll out with the newest weights, train on what came back, repeat.
"""

import dataclasses
import random
import time
from collections.abc import Callable, Sequence

import numpy as np

from composer_jax.agent.episode import Episode
from composer_jax.agent.summary import Compaction
from composer_jax.event_loop import EventLoop
from composer_jax.observe.compilations import count_compilations
from composer_jax.rl.algorithm import GroupAdvantage
from composer_jax.rl.batch import Group, empty_batch, learner_batches, weighted_rows
from composer_jax.rl.rewards import RewardConfig, episode_reward
from composer_jax.rl.rollout import Environment, Job, Rollout, roll_out
from composer_jax.sampler.policy import TrainablePolicy
from composer_jax.seeds import hash_seed
from composer_jax.tasks.source import TaskSource
from composer_jax.tasks.task import Task
from composer_jax.train.learner import Learner, TrainState


@dataclasses.dataclass(frozen=True)
class OrchestratorConfig:
    groups: dict[str, int]
    """Task family -> groups of it in every step."""
    group_size: int
    """G, episodes per task (Composer 2: a fixed group size; the number is not published)."""
    trigger: tuple[int, int]
    """The summary trigger of a group is drawn uniformly from this range, in tokens."""
    compacted_families: tuple[str, ...]
    """Families whose context is compacted; others run with the whole window."""
    uncompacted_share: float
    """Share of the groups of those families that run with the whole window all the same."""
    max_segments: int
    max_summary_tokens: int
    tokens_per_episode: float
    """The loss is divided by episodes * this: Dr. GRPO's constant normaliser. Only its product with the rate
    matters."""
    batches: tuple[tuple[int, int], ...]
    reward: RewardConfig
    seed: int


class Orchestrator:
    """One RL run. A step is `roll_out`, which changes nothing and may be interrupted, then `learn`, which uses up the
    state; together a function of (state, seed): a task is used once, and a resumed run repeats none."""

    def __init__(
        self,
        config: OrchestratorConfig,
        tasks: TaskSource,
        learner: Learner,
        sampler: TrainablePolicy,
        environment: Environment,
    ):
        self.config, self.tasks = config, tasks
        self.learner, self.sampler, self.environment = learner, sampler, environment
        self.algorithm = GroupAdvantage()
        self.warm, self.compiled = False, count_compilations()

    def jobs(self, step: int) -> list[Job]:
        """The jobs of one step, the G episodes of a task beside each other."""
        config, jobs = self.config, []
        for family, n in sorted(config.groups.items()):
            for number in range(n):
                task = self.tasks.task(family, step * n + number)
                compaction = self.compaction(task)
                jobs += [
                    Job(task, hash_seed("rl", config.seed, task.id, i), compaction) for i in range(config.group_size)
                ]
        return jobs

    def compaction(self, task: Task) -> Compaction:
        """Drawn once per group, so that its episodes differ by what the policy does only."""
        config, rng = self.config, random.Random(hash_seed("trigger", self.config.seed, task.id))
        if task.family not in config.compacted_families or rng.random() < config.uncompacted_share:
            return Compaction(None)
        return Compaction(rng.randint(*config.trigger), "short", config.max_segments, config.max_summary_tokens)

    def roll_out(self, state: TrainState, loop: EventLoop, on_done: Callable[[Episode], None] | None = None) -> Rollout:
        """The episodes of the next step, with the weights of `state`."""
        number = int(state.step)
        self.compiled = count_compilations()
        self.sampler.update(state.params, state.router_bias, number)
        return loop.run(roll_out(self.jobs(number), self.sampler, self.environment, on_done))

    def learn(self, state: TrainState, rollout: Rollout) -> tuple[TrainState, dict[str, float | None]]:
        """The state after one step on these episodes, and its metrics. Groups of equal rewards are dropped before
        they cost a training token; with none left the step is taken with a zero gradient: its tasks are used up."""
        began = time.perf_counter()
        groups = self.groups(rollout.episodes)
        rows = weighted_rows(groups, self.algorithm)
        batches = learner_batches(rows, self.config.batches)
        if not self.warm or not batches:
            # Once, every shape is compiled here; later an empty batch stands for "no group had anything to teach".
            batches += [empty_batch(*shape) for shape in self.config.batches]
            self.warm = True
        normaliser = len(rollout.jobs) * self.config.tokens_per_episode
        state, learned = self.learner.step(state, batches, normaliser)
        train_s = time.perf_counter() - began
        row = {
            **episode_metrics(rollout.episodes),
            **learning_metrics(learned),
            "groups_used": sum(bool(self.algorithm(g.rewards).any()) for g in groups),
            "sampled_tokens": sum(e.transcript.total_sampled for e in rollout.episodes),
            "sandbox_runs": rollout.sandbox_runs,
            "sandbox_hits": rollout.sandbox_hits,
            "rollout_s": rollout.sampler_seconds,
            "sandbox_s": rollout.seconds - rollout.sampler_seconds,
            "train_s": train_s,
            "step_s": rollout.seconds + train_s,
            "compilations": count_compilations() - self.compiled,
        }
        return state, row

    def groups(self, episodes: Sequence[Episode]) -> list[Group]:
        """Consecutive G episodes are a Group; an episode without a grade is left out, a group of fewer than two too."""
        size, groups = self.config.group_size, []
        for i in range(0, len(episodes), size):
            graded = [e for e in episodes[i : i + size] if e.reward is not None]
            if len(graded) > 1:
                groups.append(Group(graded, [episode_reward(e, self.config.reward) for e in graded]))
        return groups


def episode_metrics(episodes: Sequence[Episode]) -> dict[str, float | None]:
    """Means of one step; reward_<family> and pass_<family> by family. Summary columns: episodes that could
    summarise."""
    graded = [e for e in episodes if e.reward is not None]

    def mean(values) -> float | None:
        values = list(values)
        return float(np.mean(values)) if values else None

    row = {
        "reward": mean(e.reward for e in graded),
        "turns": mean(e.turns for e in graded),
        "tokens": mean(e.transcript.total_tokens for e in graded),
        "infrastructure_failures": len(episodes) - len(graded),
        "finished": mean(e.outcome == "finished" for e in graded),
    }
    for family in sorted({e.family for e in episodes}):
        row[f"reward_{family}"] = mean(e.reward for e in graded if e.family == family)
    compacted = [e for e in graded if e.summaries]
    row["pass_compacted"] = mean(e.reward for e in compacted)
    row["summaries"] = mean(e.summaries for e in compacted)
    row["summary_tokens"] = mean(e.summary_tokens for e in compacted)
    return row


def learning_metrics(learned: dict[str, float]) -> dict[str, float]:
    tokens = max(learned["tokens"], 1.0)
    return {
        "entropy": learned["entropy"] / tokens,
        "masked": learned["masked"] / tokens,
        "k1": learned["k1"] / tokens,
        "log_ratio_max": learned["log_ratio"],
        "ratio_max": float(np.exp(learned["log_ratio"])),
        "trained_tokens": learned["tokens"],
        **{k: learned[k] for k in ("grad_norm", "learning_rate", "load_imbalance")},
    }
