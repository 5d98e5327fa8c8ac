"""Ladders: families of growing difficulty, between which RL climbs as the grade of the current one grows.

A fixed mix plays tasks that are too hard to teach anything at the beginning, and too easy at the end. The rung that a
ladder is on is a function of the results of all steps so far, so a resumed run needs no further state.
"""

import collections
import random
from collections.abc import Sequence

from composer_jax.errors import UserError
from composer_jax.rl.curriculum import CurriculumConfig, FamilyResults
from composer_jax.seeds import hash_seed


def current_rung(family: str, results: Sequence[FamilyResults], config: CurriculumConfig) -> int:
    """Returns the index of the rung that the ladder of a family is on after these steps; 0 is the family itself.

    The mean grade is over the groups of the current rung in the last `rung_window` steps that had any since the ladder
    is on it. With fewer such steps the ladder stays. Raises UserError for results that an earlier version stored
    without grades.

    Args:
      results: of every step so far.
    """
    rungs, rung = config.rungs(family), 0
    window: collections.deque[tuple[int, float]] = collections.deque(maxlen=config.rung_window)
    for step, by_family in enumerate(results, 1):
        if (result := by_family.get(rungs[rung])) is None:
            continue
        if "grade" not in result:
            raise UserError(
                f"rl.curriculum.ladders.{family} needs the grades of step {step}, which an earlier version of "
                "composer_jax recorded without them; begin another run in a new workdir, or leave the ladder out."
            )
        window.append((result["groups"], result["grade"]))
        if len(window) < config.rung_window:
            continue
        mean = sum(grade for _, grade in window) / sum(groups for groups, _ in window)
        if mean >= config.promote_above and rung + 1 < len(rungs):
            rung += 1
        elif mean < config.fall_below and rung > 0:
            rung -= 1
        else:
            continue
        window.clear()
    return rung


def draw_rung(family: str, number: int, seed: int, results: Sequence[FamilyResults], config: CurriculumConfig) -> str:
    """Returns the family that a group of a family of rl.groups is drawn from: a rung of its ladder, or the family.

    It is the current rung, or with the probability `easier` one of those below. Which of them is a function of the
    group's number and the run's seed.
    """
    if family not in config.ladders:
        return family
    rung, rng = current_rung(family, results, config), random.Random(hash_seed("rung", seed, number))
    if rung > 0 and rng.random() < config.easier:
        rung = rng.randrange(rung)
    return config.rungs(family)[rung]


def rung_metrics(results: Sequence[FamilyResults], config: CurriculumConfig) -> dict[str, int]:
    """Returns the rung of every ladder after these steps as a column rung_FAMILY, in which 1 is the family itself."""
    return {f"rung_{family}": 1 + current_rung(family, results, config) for family in config.ladders}
