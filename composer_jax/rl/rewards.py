"""What an episode is worth: the grade, minus what it cost to get there."""

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
    """R = grade - weight * C_{k,q}(x), x = summary_token * (summary tokens) + turn * (turns). Weights are ours (not
    published).

    zeroed: names of hack_monitor's flags; an episode that has one of them is worth 0. None by default: a flag is a sign
    and no proof.
    """

    weight: float = 0.0
    summary_token: float = 0.01
    turn: float = 0.0
    k: float = 1.0
    q: float = 0.5
    zeroed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in self.zeroed:
            if name not in FLAG_NAMES:
                raise UserError(f"rl.reward.zeroed has {name!r}, which is no flag; use some of {', '.join(FLAG_NAMES)}")


def episode_reward(episode: Episode, config: RewardConfig) -> float:
    """The training reward of a graded episode. An infrastructure failure has no reward; callers leave those out.

    Only an episode that solved its task is charged for length: failing briefly must not become better than failing.
    """
    if episode.reward is None:
        raise ValueError(f"episode of {episode.task_id} was never graded")
    if any(flag.partition(":")[0] in config.zeroed for flag in episode.flags):
        return 0.0
    if config.weight == 0 or episode.reward == 0:
        return episode.reward
    x = config.summary_token * episode.summary_tokens + config.turn * episode.turns
    return episode.reward - config.weight * length_cost(x, k=config.k, q=config.q)
