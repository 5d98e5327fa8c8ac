"""Algorithm: a Group's rewards -> advantages. Pure; the Learner never sees it."""

import dataclasses
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class GroupAdvantage:
    """Dr. GRPO's advantage (arXiv 2503.20783), as in Composer 2 (arXiv 2603.24477, section 4.1): A_i = R_i - mean_j
    R_j.

    No division by the standard deviation, which would blow small differences up in groups that agree, and no length
    normaliser. The baseline is taken over episodes, before they fan out into rows; every row of an episode gets its
    A_i.
    """

    leave_one_out: bool = False
    """Baseline over the other episodes only (RLOO, arXiv 2402.14740): A_i * G/(G-1)."""

    def __call__(self, rewards: Sequence[float]) -> np.ndarray:
        """float32 [G]; exactly zero for a group of equal rewards or of one episode."""
        rewards = np.asarray(rewards, np.float64)
        if len(rewards) < 2 or np.all(rewards == rewards[0]):
            return np.zeros(len(rewards), np.float32)
        advantage = rewards - rewards.mean()
        if self.leave_one_out:
            advantage *= len(rewards) / (len(rewards) - 1)
        return advantage.astype(np.float32)
