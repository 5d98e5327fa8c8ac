"""Rewards: the grade of an episode minus a cost of its length."""

import dataclasses
import math

from composer_jax.agent.episode import Episode
from composer_jax.errors import UserError
from composer_jax.tasks.grading.hack_monitor import FLAG_NAMES


def length_cost(x: float, *, k: float, q: float) -> float:
    """C_{k,q}(x) = ((1 + kx)^(1-q) - 1) / (k (1-q)), concave and increasing, C'(0) = 1 (Composer 2, section 4.2).

    q = 0 is linear, q = 1 is ln(1 + kx)/k, q > 1 saturates at 1/(k (q-1)).
    """
    if q == 1:
        return math.log1p(k * x) / k
    return ((1 + k * x) ** (1 - q) - 1) / (k * (1 - q))


@dataclasses.dataclass(frozen=True)
class RewardConfig:
    """R = grade - weight * C_{k,q}(x), x = summary_token * (summary tokens) + turn * (turns).

    Weights are ours (not published).
    """

    weight: float = 0.0
    """Factor on the length cost of a solved episode; 0 charges nothing."""
    summary_token: float = 0.01
    """Contribution of one summary token to the length x."""
    turn: float = 0.0
    """Contribution of one turn to the length x."""
    k: float = 1.0
    """Curvature k of the length cost C_{k,q}."""
    q: float = 0.5
    """Exponent q of the length cost C_{k,q}."""
    zeroed: tuple[str, ...] = ()
    """Flags of the hack monitor that set an episode's reward to 0; none by default, because a flag is no proof."""

    def __post_init__(self) -> None:
        for name in self.zeroed:
            if name not in FLAG_NAMES:
                raise UserError(f"rl.reward.zeroed has {name!r}, which is no flag; use some of {', '.join(FLAG_NAMES)}")


@dataclasses.dataclass(frozen=True)
class RewardParts:
    """The parts of one episode's training reward; each is logged."""

    grade: float
    """The result of grading, 0 to 1."""
    length_cost: float
    """Cost of a solved episode's length; 0 for an unsolved one."""
    zeroed: bool
    """Whether a flag of RewardConfig.zeroed sets the reward to 0."""

    @property
    def reward(self) -> float:
        """The training reward: 0 if zeroed, else the grade minus the length cost."""
        return 0.0 if self.zeroed else self.grade - self.length_cost


def reward_parts(episode: Episode, config: RewardConfig) -> RewardParts:
    """Returns the parts of a graded episode's training reward.

    Only a solved episode pays for its length, so a short failure is not better than a long one.

    Raises:
      ValueError: the episode has no grade, because the infrastructure failed.
    """
    if episode.reward is None:
        raise ValueError(f"episode of {episode.task_id} was never graded")
    zeroed = any(flag.partition(":")[0] in config.zeroed for flag in episode.flags)
    cost = 0.0
    if config.weight and episode.reward:
        x = config.summary_token * episode.summary_tokens + config.turn * episode.turns
        cost = config.weight * length_cost(x, k=config.k, q=config.q)
    return RewardParts(episode.reward, cost, zeroed)
