"""Algorithm: the rewards of a group -> advantages. Pure; the Learner does not depend on it.

A config names one of ALGORITHMS or the import path of a class (rl.algorithm.name); its options are the constructor's
keyword arguments.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from composer_jax.errors import UserError
from composer_jax.extensions import resolve


class Algorithm(Protocol):
    """Rewards of the G episodes of one task -> the advantage that all sampled tokens of each episode carry."""

    def __call__(self, rewards: Sequence[float]) -> np.ndarray:
        """Returns float32 [G]; an episode with advantage 0 is not trained on."""
        ...


@dataclasses.dataclass(frozen=True)
class GroupAdvantage:
    """Dr. GRPO's advantage (arXiv 2503.20783), as in Composer 2 (arXiv 2603.24477, section 4.1): A_i = R_i - mean_j
    R_j.

    No division by the standard deviation, which would amplify small differences in groups of similar rewards, and no
    length normaliser. The baseline is taken over episodes, before they fan out into rows; every row of an episode
    gets its A_i.
    """

    leave_one_out: bool = False
    """Baseline over the other episodes only (RLOO, arXiv 2402.14740): A_i * G/(G-1)."""

    def __call__(self, rewards: Sequence[float]) -> np.ndarray:
        """float32 [G]; exactly zero for a group of equal rewards or of one episode."""
        rewards_G = np.asarray(rewards, np.float64)
        if len(rewards_G) < 2 or np.all(rewards_G == rewards_G[0]):
            return np.zeros(len(rewards_G), np.float32)
        advantage = rewards_G - rewards_G.mean()
        if self.leave_one_out:
            advantage *= len(rewards) / (len(rewards) - 1)
        return advantage.astype(np.float32)


ALGORITHMS: Mapping[str, Any] = {"group_mean": GroupAdvantage}


def make_algorithm(name: str, options: Mapping[str, Any]) -> Algorithm:
    """Returns the algorithm that the config names, constructed with its options.

    Raises:
      UserError: an unknown name, an import path that does not resolve, or an option that the constructor lacks.
    """
    kind = resolve(name, ALGORITHMS, "config.rl.algorithm.name")
    try:
        return kind(**options)
    except TypeError as error:
        raise UserError(f"config.rl.algorithm.options={dict(options)} do not fit {name!r}: {error}.") from error
