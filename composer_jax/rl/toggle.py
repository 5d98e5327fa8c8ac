"""Toggle: phases of RL that pay for short solutions alternate with phases that do not."""

import dataclasses

import numpy as np

from composer_jax.errors import UserError
from composer_jax.rl.batch import Group


@dataclasses.dataclass(frozen=True)
class ToggleConfig:
    """Kimi K2.5's Toggle (arXiv 2602.02276). In a phase with a budget an episode keeps its reward only if its task is
    still hard or the episode is short: r * 1[mean_j grade_j < threshold or |y| <= budget].

    K2.5 measures the budget of each task once, when training starts. Here a task is used once, and its budget comes
    from its own group.

    Raises:
      UserError: a value out of range.
    """

    every: int = 0
    """m, RL steps of a phase; the first phase has a budget. 0 turns Toggle off. Not published."""
    threshold: float = 0.8
    """lambda, mean grade of a group from which the budget holds. Not published."""
    quantile: float = 0.5
    """rho: the budget is this quantile of the lengths of the group's solved episodes. Not published."""

    def __post_init__(self) -> None:
        if self.every < 0:
            raise UserError(f"rl.algorithm.toggle.every={self.every} is negative; use a number of steps, or 0 for off.")
        for name in ("threshold", "quantile"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"rl.algorithm.toggle.{name}={getattr(self, name)} is out of range; use 0 to 1.")

    def has_budget(self, step: int) -> bool:
        """Returns whether the phase of the RL step `step` (0 is the first) has a budget."""
        return self.every > 0 and (step // self.every) % 2 == 0


def toggle_rewards(group: Group, config: ToggleConfig, step: int) -> Group:
    """Returns the group with the rewards of the step's phase. An episode's length is its number of sampled tokens."""
    grades = np.array([episode.reward for episode in group.episodes])
    solved = grades >= 1
    if not config.has_budget(step) or not solved.any() or grades.mean() < config.threshold:
        return group
    lengths = np.array([episode.transcript.total_sampled for episode in group.episodes])
    budget = np.quantile(lengths[solved], config.quantile)
    return Group(group.episodes, np.where(lengths <= budget, group.rewards, 0.0).tolist())
