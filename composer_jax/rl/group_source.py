"""GroupSource: the number of a group -> its task, its compaction and the seeds of its episodes."""

import dataclasses
import random
from collections import Counter
from collections.abc import Mapping, Sequence

from composer_jax.agent.config import AgentConfig
from composer_jax.agent.effort import draw_effort
from composer_jax.agent.episode_spec import EpisodeSpec
from composer_jax.agent.summary import Compaction
from composer_jax.errors import UserError
from composer_jax.rl.config import RLConfig
from composer_jax.rl.curriculum import FamilyResults, draw_rung, family_weights
from composer_jax.seeds import hash_seed
from composer_jax.tasks.source import TaskSource
from composer_jax.tasks.task import Task


class GroupSource:
    """The groups of an RL run, numbered from 0. All but the family is a function of the number and the run's seed.

    Every task is used by one group only, and a resumed run repeats none. places: number -> (family, index of the task
    in it) of the groups that were drawn.
    """

    def __init__(self, config: RLConfig, agent: AgentConfig, seed: int, tasks: TaskSource):
        """agent: defines the compactions that `config` names."""
        self.config, self.agent, self.seed, self.tasks = config, agent, seed, tasks
        self.groups_per_step = sum(config.groups.values())
        self.places: dict[int, tuple[str, int]] = {}
        self._used: Counter[str] = Counter()  # tasks of each family that were drawn

    def restore(self, places: Mapping[int, tuple[str, int]]) -> None:
        """Takes over the places of the groups that an earlier process drew."""
        self.places = dict(places)
        self._used = Counter(family for family, _ in self.places.values())

    def draw(self, number: int, results: Sequence[FamilyResults]) -> tuple[str, int]:
        """Draws the task of a group, once; groups are drawn in the order of their numbers.

        Without rl.curriculum every step has exactly the groups of rl.groups, by family. A family with a ladder
        draws from one of its rungs. Raises UserError if a curriculum has used up all tasks.

        Args:
          results: of every step so far (rl/curriculum.py: family_results).
        """
        if number not in self.places:
            is_weighted = self.config.curriculum.window > 0
            family = (self._draw_weighted if is_weighted else self._draw_fixed)(number, results)
            self.places[number] = family, self._used[family]
            self._used[family] += 1
        return self.places[number]

    def _draw_fixed(self, number: int, results: Sequence[FamilyResults]) -> str:
        position = number % self.groups_per_step
        for family, count in sorted(self.config.groups.items()):
            if position < count:
                return self._draw_rung(family, number, results)
            position -= count
        raise AssertionError(f"group {number} has no family")

    def _draw_weighted(self, number: int, results: Sequence[FamilyResults]) -> str:
        weights = family_weights(self.config.groups, results, self.config.curriculum)
        by_rung = {self._draw_rung(family, number, results): w for family, w in sorted(weights.items())}
        by_rung = {rung: w for rung, w in by_rung.items() if self.tasks.has_task(rung, self._used[rung])}
        if not by_rung:
            raise UserError(f"rl.curriculum has used up all {number} tasks; lower rl.steps or add tasks.")
        rng = random.Random(hash_seed("family", self.seed, number))
        (rung,) = rng.choices(list(by_rung), list(by_rung.values()))
        return rung

    def _draw_rung(self, family: str, number: int, results: Sequence[FamilyResults]) -> str:
        return draw_rung(family, number, self.seed, results, self.config.curriculum)

    def task(self, number: int) -> Task:
        """Returns the task of a group that was drawn."""
        return self.tasks.task(*self.places[number])

    def specs(self, number: int) -> list[EpisodeSpec]:
        """Returns the episodes of a group, a function of its number and the run's seed."""
        task = self.task(number)
        compaction = self.draw_compaction(task)
        effort = draw_effort(self.config.reward.effort, self.seed, task.id)
        return [
            EpisodeSpec(task, hash_seed("rl", self.seed, task.id, i), compaction, number, effort)
            for i in range(self.config.group_size)
        ]

    def draw_compaction(self, task: Task) -> Compaction:
        """Returns the compaction of a group, drawn once, so that its episodes differ only by the policy."""
        config, rng = self.config, random.Random(hash_seed("trigger", self.seed, task.id))
        if task.family in config.family_compactions:
            return self.agent.compaction(config.family_compactions[task.family], "rl.family_compactions")
        compaction = self.agent.compaction(config.compaction, "rl.compaction")
        if rng.random() < config.uncompacted_fraction:
            return Compaction(None)
        return dataclasses.replace(compaction, trigger=rng.randint(*config.trigger)) if config.trigger else compaction
