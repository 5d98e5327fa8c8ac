"""Curriculum: which task families the next groups are drawn from, by how much could be learned from the last ones.

A task is used once, so single tasks cannot be repeated; families can be drawn more often (Composer 2, arXiv 2603.24477,
section 4.1, draws more of what takes many turns and much thinking in later stages).

Ladders are families of growing difficulty, between which RL climbs as the grade of the current one grows: a fixed mix
plays tasks that are too hard to teach anything at the beginning, and too easy at the end. The rung that a ladder is on
is a function of the results of all steps so far, so a resumed run needs no further state.
"""

import collections
import dataclasses
import math
import random
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from composer_jax.agent.episode import Episode
from composer_jax.errors import UserError
from composer_jax.seeds import hash_seed

FamilyResults = Mapping[str, Mapping[str, Any]]
"""Family -> fields of its FamilyResult, of one step (family_results)."""


@dataclasses.dataclass(frozen=True)
class CurriculumConfig:
    """Weights of families, and ladders of harder ones.

    Weight of a family: rl.groups times (floor + 4 p (1 - p)), times powers of its turns and thinking tokens. p (1 - p)
    is the variance of a pass rate p: groups in which all episodes agree teach nothing. Numbers are ours (not
    published). Raises UserError for a value out of range.
    """

    window: int = 0
    """Steps whose results weigh the families. With 0 every step has exactly the groups of rl.groups, where a ladder
    counts as its first rung."""
    floor: float = 0.1
    """Added to 4 p (1 - p), which is between 0 and 1, so that no family is given up."""
    turns: float = 0.0
    """Exponent of a family's turns per episode, relative to the mean of all families."""
    thinking: float = 0.0
    """Exponent of a family's thinking tokens per episode, relative to the mean of all families."""
    ladders: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    """Family of rl.groups, the first rung -> families of growing difficulty, the other rungs. The groups of the family
    are drawn from the rung that its ladder is on; one without groups switches its ladder off."""
    promote_above: float = 0.8
    """Mean grade of the current rung from which the ladder climbs to the next."""
    fall_below: float = 0.2
    """Mean grade of the current rung below which the ladder falls to the previous one."""
    rung_window: int = 5
    """Steps with groups of the current rung, since the ladder is on it, over which the mean grade is taken. The ladder
    stays on a rung for as many at least."""
    easier: float = 0.25
    """Fraction of a ladder's groups that are drawn from the rungs below the current one, evenly, so that the policy
    does not forget them."""

    def __post_init__(self) -> None:
        if self.window < 0:
            raise UserError(f"rl.curriculum.window={self.window} is negative; use a number of steps, or 0 for none.")
        if not self.floor > 0:
            raise UserError(f"rl.curriculum.floor={self.floor} gives up families; use a number above 0.")
        for name in ("turns", "thinking"):
            if not getattr(self, name) >= 0:
                raise UserError(f"rl.curriculum.{name}={getattr(self, name)} is negative; use 0 or more.")
        if not 0 <= self.fall_below < self.promote_above <= 1:
            raise UserError(
                f"rl.curriculum.fall_below={self.fall_below} and promote_above={self.promote_above} are "
                "not thresholds of a mean grade; use 0 <= fall_below < promote_above <= 1."
            )
        if self.rung_window < 1:
            raise UserError(f"rl.curriculum.rung_window={self.rung_window} is not a number of steps; use 1 or more.")
        if not 0 <= self.easier < 1:
            raise UserError(
                f"rl.curriculum.easier={self.easier} is not a fraction that leaves groups to the current rung; "
                "use 0 or more and below 1."
            )
        self._check_ladders()

    def _check_ladders(self) -> None:
        first_of: dict[str, str] = {}
        for first, harder in self.ladders.items():
            if not harder:
                raise UserError(f"rl.curriculum.ladders.{first} has no harder rung; name one, or leave the ladder out.")
            for rung in harder:
                if rung in first_of:
                    raise UserError(
                        f"rl.curriculum.ladders.{first} names {rung!r}, which ladders.{first_of[rung]} has already; "
                        "leave it on one ladder, once."
                    )
                first_of[rung] = first

    def rungs(self, family: str) -> tuple[str, ...]:
        """Returns the families that the groups of a family of rl.groups are drawn from, the easiest first."""
        return (family, *self.ladders.get(family, ()))


@dataclasses.dataclass(frozen=True)
class FamilyResult:
    """What the groups of one family showed in one step; sums over its groups."""

    groups: int
    spread: float
    """p (1 - p) of the group's mean grade p."""
    turns: float
    """Turns per episode."""
    thinking: float
    """Thinking tokens per episode."""
    grade: float = 0.0
    """Mean grade of the group. Results that earlier versions stored lack it; only ladders need it."""

    def __add__(self, other: "FamilyResult") -> "FamilyResult":
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return FamilyResult(*(a + b for a, b in pairs))


def family_results(groups: Sequence[Sequence[Episode]]) -> dict[str, dict[str, Any]]:
    """Returns family -> the fields of its FamilyResult, of groups of episodes.

    Groups without a grade are left out, and episodes with given advantages, whose tasks nobody draws.
    """
    results: dict[str, FamilyResult] = {}
    for group in groups:
        graded = [episode for episode in group if episode.reward is not None and episode.advantages is None]
        if not graded:
            continue
        p = math.fsum(episode.reward or 0.0 for episode in graded) / len(graded)
        turns = math.fsum(episode.turns for episode in graded) / len(graded)
        thinking = math.fsum(episode.usage.thinking_tokens for episode in graded) / len(graded)
        family = graded[0].family
        result = FamilyResult(1, p * (1 - p), turns, thinking, p)
        results[family] = results[family] + result if family in results else result
    return {family: dataclasses.asdict(result) for family, result in sorted(results.items())}


def family_weights(
    groups: Mapping[str, int], steps: Sequence[FamilyResults], config: CurriculumConfig
) -> dict[str, float]:
    """Returns family -> its weight, of those with groups; a family without results counts as one with p = 1/2.

    A family with a ladder has the results of all of its rungs.

    Args:
      groups: family -> groups of it in a step without a curriculum.
      steps: results of every step so far (family_results); the last `config.window` of them count.
    """
    totals: dict[str, FamilyResult] = {}
    first_of = {rung: first for first, harder in config.ladders.items() if groups.get(first) for rung in harder}
    for step in steps[-config.window :]:
        for rung, fields in step.items():
            family, result = first_of.get(rung, rung), FamilyResult(**fields)
            totals[family] = totals[family] + result if family in totals else result
    per_group = {name: [getattr(t, name) / t.groups for t in totals.values()] for name in ("turns", "thinking")}
    means = {name: statistics.fmean(values) if values else 0.0 for name, values in per_group.items()}
    weights = {}
    for family, count in groups.items():
        if not count:
            continue
        weights[family] = count * (config.floor + 1.0)
        if total := totals.get(family):
            weights[family] = count * (config.floor + 4 * total.spread / total.groups)
            for name, exponent in (("turns", config.turns), ("thinking", config.thinking)):
                if means[name] > 0:
                    relative = getattr(total, name) / total.groups / means[name]
                    weights[family] *= max(relative, config.floor) ** exponent
    return weights


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
