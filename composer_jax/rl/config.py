"""The rl section of a run's config."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from composer_jax.errors import UserError
from composer_jax.rl.rewards import RewardConfig
from composer_jax.train.losses import PolicyLossConfig
from composer_jax.train.optimizer import OptimizerConfig


def _no_groups() -> dict[str, int]:
    """The families of tasks from disk, none of which is used unless the config says so."""
    return {"repository": 0, "harbor": 0, "swe_bench": 0, "swe_smith": 0}


@dataclass(frozen=True)
class AlgorithmConfig:
    """How the rewards of a group become advantages (rl/algorithm.py)."""

    name: str = "group_mean"
    """A name of rl.algorithm.ALGORITHMS, or the import path of a class."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the algorithm's constructor."""


@dataclass(frozen=True)
class RLConfig:
    """Reinforcement learning against sandboxed tasks."""

    steps: int = 100
    """RL steps: rollouts of `groups`, each followed by one update of the weights."""
    groups: Mapping[str, int] = field(default_factory=_no_groups)
    """Task family -> groups of it in every step. Families are those of tasks.families and those in tasks.train."""
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
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Optimizer of the RL stage."""
    publish: str = ""
    """Folder or URL to which every version of the weights is published in bfloat16 (checkpoint/weight_chain.py), where
    servers follow it (docs/serve.md). Empty: nowhere."""
    save_every: int = 20
    """Steps between checkpoints."""
    record_every: int = 20
    """Steps between those whose first episodes of each family are kept for the report."""

    def __post_init__(self) -> None:
        for name in ("steps", "save_every", "record_every"):
            if getattr(self, name) < 1:
                raise UserError(f"rl.{name}={getattr(self, name)}; it must be at least 1.")
        if self.group_size < 2:
            raise UserError(f"rl.group_size={self.group_size}; an advantage is a difference, use at least 2.")
        if self.tokens_per_episode <= 0:
            raise UserError(f"rl.tokens_per_episode={self.tokens_per_episode}; it must be positive.")
        for family, groups in self.groups.items():
            if groups < 0:
                raise UserError(f"rl.groups.{family}={groups} is negative; use 0 to leave the family out.")
        if not 0 <= self.uncompacted_fraction <= 1:
            raise UserError(f"rl.uncompacted_fraction={self.uncompacted_fraction} is no fraction; use 0 to 1.")
        if self.trigger is not None and not 1 <= self.trigger[0] <= self.trigger[1]:
            raise UserError(f"rl.trigger={self.trigger} is no range of tokens; use (least, most), least >= 1.")
        self._check_batches()

    def _check_batches(self) -> None:
        if not self.batches:
            raise UserError("rl.batches is empty; give at least one (row length, rows).")
        if any(length < 2 or rows < 1 for length, rows in self.batches):
            raise UserError(f"rl.batches={self.batches} has a shape without tokens; use lengths >= 2 and rows >= 1.")
        lengths = [length for length, _ in self.batches]
        if lengths != sorted(set(lengths)):
            raise UserError(f"rl.batches={self.batches} must have ascending row lengths.")
