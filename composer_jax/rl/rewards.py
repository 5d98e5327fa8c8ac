"""Rewards: the grade of an episode minus a cost of its length and penalties of its behaviour."""

import dataclasses
import math
from collections.abc import Callable, Mapping

from composer_jax.agent.episode import Episode
from composer_jax.errors import UserError
from composer_jax.rl.effort import EffortConfig
from composer_jax.rl.penalties import PenaltyConfig, penalties
from composer_jax.tasks.grading.hack_monitor import FLAG_NAMES


def length_cost(x: float, *, k: float, q: float) -> float:
    """C_{k,q}(x) = ((1 + kx)^(1-q) - 1) / (k (1-q)), concave and increasing, C'(0) = 1 (Composer 2, section 4.2).

    q = 0 is linear, q = 1 is ln(1 + kx)/k, q > 1 saturates at 1/(k (q-1)).
    """
    if q == 1:
        return math.log1p(k * x) / k
    return ((1 + k * x) ** (1 - q) - 1) / (k * (1 - q))


LENGTHS: Mapping[str, Callable[[Episode], int]] = {
    "thinking_token": lambda episode: episode.usage.thinking_tokens,
    "call_token": lambda episode: episode.usage.call_tokens,
    "output_token": lambda episode: episode.usage.output_tokens,
    "final_token": lambda episode: episode.usage.final_tokens,
    "call": lambda episode: episode.usage.total_calls,
    "turn": lambda episode: episode.turns,
    "summary_token": lambda episode: episode.summary_tokens,
}
"""Weight in RewardConfig -> what of an episode it weights; token counts are those of ids that were sampled or seen."""


@dataclasses.dataclass(frozen=True)
class RewardConfig:
    """R = grade - weight * C_{k,q}(x) - penalties; an effort level multiplies the weight.

    x is the weighted length of a solved episode: the six counts of Composer 2 (section 4.2: thinking, calls, tool
    outputs, final message, number of calls, number of turns) and the tokens of summaries, each times its weight below.
    Weights, k and q are not published; these are ours.
    """

    weight: float = 0.0
    """Factor on the length cost of a solved episode; 0 charges nothing."""
    thinking_token: float = 0.0
    """Contribution of one token of thinking, or of text beside a call, to the length x (EpisodeUsage)."""
    call_token: float = 0.0
    """Contribution of one token of tool calls to the length x."""
    output_token: float = 0.0
    """Contribution of one token of the tools' answers to the length x."""
    final_token: float = 0.0
    """Contribution of one token of the final message to the length x."""
    call: float = 0.0
    """Contribution of one tool call to the length x; calls side by side in one message save turns and not calls."""
    summary_token: float = 0.01
    """Contribution of one summary token, thinking before the summary included, to the length x."""
    turn: float = 0.0
    """Contribution of one turn to the length x."""
    k: float = 1.0
    """Curvature k of the length cost C_{k,q}."""
    q: float = 0.5
    """Exponent q of the length cost C_{k,q}."""
    zeroed: tuple[str, ...] = ()
    """Flags of the hack monitor that set an episode's grade to 0 for the reward; none by default, because a flag is no
    proof."""
    effort: EffortConfig = dataclasses.field(default_factory=EffortConfig)
    """Levels of effort, each with a prompt and a factor on the price of length; none by default."""
    penalties: PenaltyConfig = dataclasses.field(default_factory=PenaltyConfig)
    """Prices of behaviour: malformed calls, the shell in place of a tool, unfinished plans, reasoning in comments."""

    def __post_init__(self) -> None:
        for name in ("weight", *LENGTHS, "q"):
            if getattr(self, name) < 0:
                raise UserError(f"rl.reward.{name}={getattr(self, name)} is negative; use 0 to charge nothing for it.")
        if self.k <= 0:
            raise UserError(f"rl.reward.k={self.k}; it must be positive, and q=0 makes the length cost linear.")
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
    """Whether a flag of RewardConfig.zeroed takes away what the grade earned."""
    penalties: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Behaviour -> its penalty (rl/penalties.py)."""

    @property
    def penalty(self) -> float:
        """The sum of the penalties."""
        return sum(self.penalties.values())

    @property
    def reward(self) -> float:
        """The training reward: the grade minus the length cost, or 0 if zeroed; minus the penalties."""
        return (0.0 if self.zeroed else self.grade - self.length_cost) - self.penalty


def weighted_length(episode: Episode, config: RewardConfig) -> float:
    """Returns x of C_{k,q}(x): the lengths of an episode, each times its weight."""
    return sum(getattr(config, name) * count(episode) for name, count in LENGTHS.items())


def reward_parts(episode: Episode, config: RewardConfig) -> RewardParts:
    """Returns the parts of a graded episode's training reward.

    Only a solved episode pays for its length, so a short failure is not better than a long one. Every episode pays its
    penalties.

    Raises:
      ValueError: the episode has no grade, because the infrastructure failed.
    """
    if episode.reward is None:
        raise ValueError(f"episode of {episode.task_id} was never graded")
    zeroed = any(flag.partition(":")[0] in config.zeroed for flag in episode.flags)
    cost = 0.0
    if config.weight and episode.reward:
        weight = config.weight * config.effort.length_factor(episode.effort)
        cost = weight * length_cost(weighted_length(episode, config), k=config.k, q=config.q)
    return RewardParts(episode.reward, cost, zeroed, penalties(episode, config.penalties))
