"""The rl section of a run's config."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from composer_jax.errors import UserError
from composer_jax.models.config import ModelConfig
from composer_jax.rl.algorithm import default_options
from composer_jax.rl.curriculum import CurriculumConfig
from composer_jax.rl.engines.config import FleetConfig, engine_addresses
from composer_jax.rl.feedback import FeedbackConfig
from composer_jax.rl.group_buffer import LateGroups
from composer_jax.rl.reference import ReferenceKLConfig
from composer_jax.rl.replay import ReplayConfig
from composer_jax.rl.rewards import RewardConfig
from composer_jax.train.losses import PolicyLossConfig
from composer_jax.train.optimizer import OptimizerConfig

DISK_FAMILIES = {"repository": 0, "harbor": 0, "swe_bench": 0, "swe_smith": 0}
"""Groups of the families of tasks from disk, none of which is used unless the config says so."""

NORMALISERS = ("constant", "tokens")


@dataclass(frozen=True)
class NormaliserConfig:
    """What the terms of the policy loss are divided by (train/losses.py).

    "constant": episodes * rl.tokens_per_episode, as in Dr. GRPO (arXiv 2503.20783, section 3.2). "tokens": the number
    of tokens in the step that have a weight in the loss term. Never the length of a single sequence, which would favour
    short successes and long failures. Raises UserError for a value that is neither.
    """

    policy: Literal["constant", "tokens"] = "constant"
    """Of the policy gradient."""
    cross_entropy: Literal["constant", "tokens"] = "tokens"
    """Of the cross-entropy."""
    kl: Literal["constant", "tokens"] = "constant"
    """Of the KL to the reference; equal to `policy`, the KL is a part of the advantage."""
    feedback: Literal["constant", "tokens"] = "constant"
    """Of the KL to a teacher with a hint (rl.feedback); equal to `policy`, a hinted token counts as one with an
    advantage of rl.feedback.weight (Kolibri: one normaliser for both)."""

    def __post_init__(self) -> None:
        for name in ("policy", "cross_entropy", "kl", "feedback"):
            value = getattr(self, name)
            if value not in NORMALISERS:
                raise UserError(f"rl.algorithm.normalisers.{name}={value!r} is unknown; use constant or tokens.")


@dataclass(frozen=True)
class AlgorithmConfig:
    """How the rewards of a group become advantages and loss weights (rl/algorithm.py)."""

    name: str = "group_mean"
    """A name of rl.algorithm.ALGORITHMS, or the import path of a class."""
    options: Mapping[str, Any] = field(default_factory=default_options)
    """Keyword arguments of the algorithm's constructor; by default those of group_mean."""
    normalisers: NormaliserConfig = field(default_factory=NormaliserConfig)
    """What the streams of the loss are divided by."""
    kl: ReferenceKLConfig = field(default_factory=ReferenceKLConfig)
    """The KL to the policy that RL started from."""


@dataclass(frozen=True)
class RLConfig:
    """Reinforcement learning against sandboxed tasks."""

    steps: int = 100
    """RL steps: rollouts of `groups`, each followed by one update of the weights."""
    groups: Mapping[str, int] = field(default_factory=DISK_FAMILIES.copy)
    """Task family -> groups of it in every step. Families are those of tasks.families and those in tasks.train."""
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    """Draws the families of groups by what their last results show, with `groups` as weights, and harder families as
    the grade grows; off by default."""
    group_size: int = 8
    """G, episodes per task (Composer 2: a fixed group size; the number is not published)."""
    compaction: str = "summary"
    """The compaction of agent.compactions that episodes use."""
    trigger: tuple[int, int] | None = None
    """Range in tokens from which the trigger of each group is drawn uniformly; None uses the compaction's own."""
    family_compactions: Mapping[str, str] = field(default_factory=dict)
    """Task family -> the compaction of agent.compactions that its episodes use, with its own trigger."""
    uncompacted_fraction: float = 0.0
    """Fraction of the groups with `compaction` that run without compaction all the same."""
    tokens_per_episode: float = 1024.0
    """The loss is divided by episodes * this: Dr. GRPO's constant normaliser (arXiv 2503.20783). Only its product with
    the learning rate matters."""
    batches: tuple[tuple[int, int], ...] = ((32_768, 8),)
    """(row length in tokens, rows) of training batches, by ascending length; a row goes into the first that fits."""
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    """How rewards become advantages."""
    loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    """How advantages become a loss."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    """How a grade and an episode's length become a reward."""
    feedback: FeedbackConfig = field(default_factory=FeedbackConfig)
    """Hints at mistakes, toward which the policy is trained beside the reward; off by default."""
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    """Conversations of SFT that are trained by cross-entropy beside the episodes; off by default."""
    router_replay: Literal["auto", "on", "off"] = "auto"
    """Whether the learner uses the experts that the sampler chose for each token (models/router_replay.py): "auto" does
    so in networks with experts, "on" refuses others. rl.loss.replay_plausibility is its filter."""
    max_staleness: int = 0
    """Largest number of steps between a group's start and the step that trains it. 0 alternates rollout and learning, 1
    plays one batch ahead; larger numbers keep slow episodes from holding up the others (not published)."""
    late_groups: LateGroups = "wait"
    """What happens to a group that would exceed max_staleness: "wait" delays the step until the group has ended, "drop"
    cancels the group, which spares the wait and leaves out long episodes more often than short ones."""
    engines: str | tuple[str, ...] = "local"
    """What samples. "local": a sampler in the processes of the run. "ray": engines that the run starts on the nodes of
    the Ray cluster of launch.rl --cluster. Otherwise the addresses HOST:PORT of the engine ports of launch.serve, a
    list or with commas between them. With engines the run has no sampler, and they follow `publish` (docs/fleet.md)."""
    fleet: FleetConfig = field(default_factory=FleetConfig)
    """How the run deals with engines that are not local."""
    rollout_devices: int = 0
    """Devices that the sampler has to itself, the last ones; `mesh` has to leave them free. Rollout and learning then
    overlap if max_staleness is above 0. With 0 they share the devices of `mesh` and take turns."""
    deterministic: bool = False
    """With max_staleness above 0: trains groups in the order of their numbers, and changes weights only when no episode
    runs, so that neither batches nor sampled tokens depend on timing."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Optimizer of the RL stage."""
    weight_check_every: int = 20
    """Steps between those after which sampler and learner score a fixed row, as they also do when the stage begins or
    resumes; its gap is weight_gap of metrics/rl.jsonl (rl/weight_check.py). 0 never does."""
    weight_gap_bound: float | None = None
    """Nats of that gap beyond which the run ends; None takes 4 times the gap that the dtypes explain, at least 0.05."""
    publish: str = ""
    """Folder or URL to which every version of the weights is published in bfloat16 (checkpoint/weight_chain.py), where
    servers follow it (docs/serve.md). Empty: nowhere."""
    keep_groups: bool = False
    """Keeps every trained group in DIR/rl/groups, for launch.replay; otherwise groups are deleted when both checkpoints
    have learned from them. The groups of a run are as large as all of its transcripts, and with replay their routes."""
    save_every: int = 20
    """Steps between checkpoints."""
    record_every: int = 20
    """Steps between those whose first episodes of each family are kept for the report."""
    record_tokens: bool = False
    """Whether the report shows the advantage and the log-probability of every sampled token of those episodes."""

    def __post_init__(self) -> None:
        for name in ("steps", "save_every", "record_every"):
            if getattr(self, name) < 1:
                raise UserError(f"rl.{name}={getattr(self, name)}; it must be at least 1.")
        if self.weight_check_every < 0:
            raise UserError(f"rl.weight_check_every={self.weight_check_every} is negative; 0 never checks.")
        if self.rollout_devices < 0:
            raise UserError(f"rl.rollout_devices={self.rollout_devices} is negative; 0 shares the learner's devices.")
        self._check_engines()
        if self.max_staleness < 0:
            raise UserError(f"rl.max_staleness={self.max_staleness} is negative; 0 alternates rollout and learning.")
        if self.late_groups not in get_args(LateGroups):
            raise UserError(f"rl.late_groups={self.late_groups!r} is unknown; use 'wait' or 'drop'.")
        if self.deterministic and self.late_groups == "drop":
            raise UserError("rl.late_groups='drop' depends on timing; use 'wait' with rl.deterministic=True.")
        if self.group_size < 2:
            raise UserError(f"rl.group_size={self.group_size}; an advantage is a difference, use at least 2.")
        if self.tokens_per_episode <= 0:
            raise UserError(f"rl.tokens_per_episode={self.tokens_per_episode}; it must be positive.")
        for family, groups in self.groups.items():
            if groups < 0:
                raise UserError(f"rl.groups.{family}={groups} is negative; use 0 to leave the family out.")
        self._check_ladders()
        if not 0 <= self.uncompacted_fraction <= 1:
            raise UserError(f"rl.uncompacted_fraction={self.uncompacted_fraction} is not a fraction; use 0 to 1.")
        if self.trigger is not None and not 1 <= self.trigger[0] <= self.trigger[1]:
            raise UserError(f"rl.trigger={self.trigger} is not a range of tokens; use (least, most), least >= 1.")
        if self.router_replay not in ("auto", "on", "off"):
            raise UserError(f"rl.router_replay={self.router_replay!r} is unknown; use auto, on or off.")
        self._check_batches()

    @property
    def samples_here(self) -> bool:
        """Whether a sampler in the processes of the run samples, not engines elsewhere."""
        return self.engines == "local"

    @property
    def families(self) -> set[str]:
        """The task families that groups are drawn from: those with groups, and the harder ones of ladders."""
        return {rung for family, n in self.groups.items() if n for rung in self.curriculum.rungs(family)}

    def route_shape(self, model: ModelConfig) -> tuple[int, int] | None:
        """Returns (expert layers, experts per token) of the routes to replay in this network; None without replay.

        Raises UserError for router_replay="on" and a network without experts.
        """
        if self.router_replay == "off" or (self.router_replay == "auto" and not model.n_experts):
            return None
        if not model.n_experts:
            raise UserError('rl.router_replay="on" needs a network with experts, but n_experts=0; use "auto".')
        return model.n_moe_layers, model.experts_per_token

    def rollout_network(self, model: ModelConfig) -> ModelConfig:
        """Returns the network as the sampler computes it: it records its routes where they are to be replayed."""
        return model if self.route_shape(model) is None else dataclasses.replace(model, cache_routing=True)

    def _check_engines(self) -> None:
        engine_addresses(self.engines)  # raises for what is no address
        if self.fleet.cpu_nodes and self.engines != "ray":
            raise UserError(
                f"rl.fleet.cpu_nodes={self.fleet.cpu_nodes} is about rl.engines='ray', and rl.engines="
                f"{self.engines!r}; use 0."
            )
        if self.samples_here:
            return
        if self.rollout_devices:
            raise UserError(
                f"rl.rollout_devices={self.rollout_devices} is for a sampler of the run, and rl.engines names engines "
                "that sample; use rl.rollout_devices=0."
            )
        if not self.publish:
            raise UserError("rl.engines needs rl.publish, the folder or URL from which engines take the weights.")

    def _check_ladders(self) -> None:
        for first, harder in self.curriculum.ladders.items():
            if not self.groups.get(first):
                continue  # the family is switched off, and its ladder with it
            for rung in harder:
                if own := self.groups.get(rung):
                    raise UserError(
                        f"rl.curriculum.ladders.{first} names {rung!r}, and rl.groups.{rung}={own} gives it groups of "
                        "its own; set that to 0, or take it off the ladder."
                    )

    def _check_batches(self) -> None:
        if not self.batches:
            raise UserError("rl.batches is empty; give at least one (row length, rows).")
        if any(length < 2 or rows < 1 for length, rows in self.batches):
            raise UserError(f"rl.batches={self.batches} has a shape without tokens; use lengths >= 2 and rows >= 1.")
        lengths = [length for length, _ in self.batches]
        if lengths != sorted(set(lengths)):
            raise UserError(f"rl.batches={self.batches} must have ascending row lengths.")
