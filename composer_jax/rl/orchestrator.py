"""Orchestrator: Tasks -> Episodes -> Groups -> Batches -> Params. The only place where the roles meet.

Rollout and learning take turns on one set of devices: roll out with the newest weights, train on the episodes, repeat.
"""

import dataclasses
import random
import time
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np

from composer_jax.agent.config import AgentConfig
from composer_jax.agent.episode import Episode
from composer_jax.agent.summary import Compaction
from composer_jax.event_loop import EventLoop
from composer_jax.observe.compilations import count_compilations
from composer_jax.rl.algorithm import make_algorithm
from composer_jax.rl.batch import Group, empty_batch, learner_batches, weighted_rows
from composer_jax.rl.config import RLConfig
from composer_jax.rl.rewards import RewardConfig, reward_parts
from composer_jax.rl.rollout import EpisodeSpec, Rollout, RolloutContext, roll_out
from composer_jax.sampler.policy import TrainablePolicy
from composer_jax.seeds import hash_seed
from composer_jax.tasks.source import TaskSource
from composer_jax.tasks.task import Task
from composer_jax.train.learner import Learner, TrainState


@dataclasses.dataclass(frozen=True)
class Cursor:
    """Position of an RL run: three counts, which differ because a step may leave the weights unchanged."""

    task_step: int = 0
    """RL steps whose tasks have been used."""
    weight_version: int = 0
    """Version of the weights that the sampler holds; every sampled token records it."""
    optimizer_step: int = 0
    """Updates of the weights, which the learning rate follows."""

    def to_json(self) -> dict[str, int]:
        """A JSON-able dict from which `Cursor(**data)` makes an equal cursor."""
        return dataclasses.asdict(self)


class Orchestrator:
    """One RL run: `roll_out` changes nothing and may be interrupted, then `learn` consumes the state.

    A step is a function of (state, cursor, seed): every task is used once, and a resumed run repeats none.
    """

    def __init__(
        self,
        config: RLConfig,
        agent: AgentConfig,
        seed: int,
        tasks: TaskSource,
        learner: Learner,
        policy: TrainablePolicy,
        context: RolloutContext,
    ):
        """agent: defines the compactions that `config` names."""
        self.config, self.agent, self.seed, self.tasks = config, agent, seed, tasks
        self.learner, self.policy, self.context = learner, policy, context
        self.algorithm = make_algorithm(config.algorithm.name, config.algorithm.options)
        self.is_compiled, self.compilations_before = False, count_compilations()

    def specs(self, task_step: int) -> list[EpisodeSpec]:
        """Returns the episodes of step `task_step` (0 is the first); the G episodes of a group are adjacent."""
        config, specs = self.config, []
        for family, groups in sorted(config.groups.items()):
            for number in range(groups):
                task = self.tasks.task(family, task_step * groups + number)
                compaction = self.draw_compaction(task)
                group = len(specs) // config.group_size
                specs += [
                    EpisodeSpec(task, hash_seed("rl", self.seed, task.id, i), compaction, group)
                    for i in range(config.group_size)
                ]
        return specs

    def draw_compaction(self, task: Task) -> Compaction:
        """Returns the compaction of a group, drawn once, so that its episodes differ only by the policy."""
        config, rng = self.config, random.Random(hash_seed("trigger", self.seed, task.id))
        if task.family in config.family_compactions:
            return self.agent.compaction(config.family_compactions[task.family], "rl.family_compactions")
        compaction = self.agent.compaction(config.compaction, "rl.compaction")
        if rng.random() < config.uncompacted_fraction:
            return Compaction(None)
        return dataclasses.replace(compaction, trigger=rng.randint(*config.trigger)) if config.trigger else compaction

    def roll_out(
        self,
        state: TrainState,
        cursor: Cursor,
        loop: EventLoop,
        on_done: Callable[[Episode], None] | None = None,
    ) -> Rollout:
        """Plays the episodes of the next step with the weights of `state`."""
        self.compilations_before = count_compilations()
        self.policy.update(state.params, state.router_bias, cursor.weight_version)
        return loop.run(roll_out(self.specs(cursor.task_step), self.policy, self.context, on_done))

    def learn(
        self, state: TrainState, cursor: Cursor, rollout: Rollout
    ) -> tuple[TrainState, Cursor, dict[str, float | None]]:
        """Returns the state and cursor after one step on these episodes, and the step's metrics.

        Groups of equal rewards are dropped before they cost a training token. A step without any other group leaves
        the weights alone: an update with a zero gradient would still move them by Adam's momentum.
        """
        began = time.perf_counter()
        groups = self.groups(rollout)
        batches = learner_batches(weighted_rows(groups, self.algorithm), self.config.batches)
        learned: dict[str, float] | None = None
        if batches:
            if not self.is_compiled:
                # The first update compiles every shape, with batches that have no gradient.
                batches += [empty_batch(*shape) for shape in self.config.batches]
                self.is_compiled = True
            normaliser = len(rollout.specs) * self.config.tokens_per_episode
            state, learned = self.learner.step(state, batches, normaliser)
        cursor = Cursor(cursor.task_step + 1, cursor.weight_version + bool(batches), int(state.step))
        train_s = time.perf_counter() - began
        row = {
            **episode_metrics(rollout.episodes, self.config.reward),
            **learning_metrics(learned, has_experts=self.learner.definition.config.n_experts > 0),
            "groups_used": sum(bool(self.algorithm(g.rewards).any()) for g in groups),
            "sampled_tokens": sum(e.transcript.total_sampled for e in rollout.episodes),
            "sandbox_runs": rollout.sandbox_runs,
            "sandbox_hits": rollout.sandbox_hits,
            "rollout_s": rollout.sampler_seconds,
            "sandbox_s": rollout.seconds - rollout.sampler_seconds,
            "train_s": train_s,
            "step_s": rollout.seconds + train_s,
            "compilations": count_compilations() - self.compilations_before,
        }
        return state, cursor, row

    def groups(self, rollout: Rollout) -> list[Group]:
        """Returns the groups of a rollout. Episodes without a grade are left out, groups of fewer than two as well."""
        by_group: dict[int, list[Episode]] = defaultdict(list)
        for spec, episode in zip(rollout.specs, rollout.episodes, strict=True):
            if episode.reward is not None:
                by_group[spec.group].append(episode)
        return [
            Group(graded, [reward_parts(episode, self.config.reward).reward for episode in graded])
            for _, graded in sorted(by_group.items())
            if len(graded) > 1
        ]


def episode_metrics(episodes: Sequence[Episode], config: RewardConfig) -> dict[str, float | None]:
    """Returns means over the graded episodes of one step.

    reward is what is optimised, grade what grading gave; both also by family. Summary columns are means over episodes
    with a summary.
    """
    graded = [(e, reward_parts(e, config)) for e in episodes if e.reward is not None]

    def mean(values) -> float | None:
        values = list(values)
        return float(np.mean(values)) if values else None

    row = {
        "reward": mean(parts.reward for _, parts in graded),
        "grade": mean(parts.grade for _, parts in graded),
        "length_cost": mean(parts.length_cost for _, parts in graded),
        "zeroed": float(sum(parts.zeroed for _, parts in graded)),
        "turns": mean(e.turns for e, _ in graded),
        "tokens": mean(e.transcript.total_tokens for e, _ in graded),
        "infrastructure_failures": len(episodes) - len(graded),
        "finished": mean(e.outcome == "finished" for e, _ in graded),
    }
    for family in sorted({e.family for e in episodes}):
        row[f"reward_{family}"] = mean(parts.reward for e, parts in graded if e.family == family)
        row[f"grade_{family}"] = mean(parts.grade for e, parts in graded if e.family == family)
    compacted = [(e, parts) for e, parts in graded if e.summaries]
    row["pass_compacted"] = mean(parts.grade for _, parts in compacted)
    row["summaries"] = mean(e.summaries for e, _ in compacted)
    row["summary_tokens"] = mean(e.summary_tokens for e, _ in compacted)
    return row


LEARNING = ("entropy", "out_of_region", "k1", "log_ratio_max", "ratio_max", "grad_norm", "learning_rate")
OF_EXPERTS = ("load_imbalance",)
"""Metrics that only a network with experts has."""


def learning_metrics(learned: dict[str, float] | None, *, has_experts: bool) -> dict[str, float | None]:
    """Returns the metrics of one update, per trained token where they are sums; None for a step without an update."""
    of_experts = OF_EXPERTS if has_experts else ()
    if learned is None:
        return {"trained_tokens": 0.0, **dict.fromkeys((*LEARNING, *of_experts))}
    tokens = max(learned["tokens"], 1.0)
    return {
        "entropy": learned["entropy"] / tokens,
        "out_of_region": learned["out_of_region"] / tokens,
        "k1": learned["k1"] / tokens,
        "log_ratio_max": learned["log_ratio"],
        "ratio_max": float(np.exp(learned["log_ratio"])),
        "trained_tokens": learned["tokens"],
        **{k: learned[k] for k in ("grad_norm", "learning_rate", *of_experts)},
    }
