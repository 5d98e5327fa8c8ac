"""GroupBuffer: which groups are played, which are trained next, and how stale they may become.

The buffer is pure: it has no clock, no I/O and no episodes, so the orchestrator and a simulation share it. A group is
admitted, resolved when its last episode has ended, and then shipped in one batch, or dropped.

Staleness of a group is the number of optimizer steps between its admission and the step that trains it. A group
admitted at step t has the deadline t + max_staleness. At most (max_staleness + 1) * groups_per_step groups are
outstanding, so every deadline can be met if groups ship in the order of their deadlines. A resolved group may overtake
one that still plays only as long as this stays true.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Literal

LateGroups = Literal["wait", "drop"]


@dataclasses.dataclass
class _Cohort:
    """Numbers of the outstanding groups that were admitted at one step; they share a deadline."""

    playing: set[int] = dataclasses.field(default_factory=set)
    resolved: set[int] = dataclasses.field(default_factory=set)

    def __len__(self) -> int:
        return len(self.playing) + len(self.resolved)


class GroupBuffer:
    """The outstanding groups of an RL run.

    The time of a call does not grow with the number of outstanding groups, except where a batch is returned: at most
    max_staleness + 1 different deadlines are outstanding, and groups are counted by deadline.

    Attributes:
      step: optimizer steps that have been shipped.
      next_number: number of the next group that was never admitted; groups are numbered from 0.
      outstanding: number -> optimizer steps that had been shipped when the group was admitted; of the groups that are
        neither shipped nor dropped.
    """

    def __init__(
        self,
        groups_per_step: int,
        steps: int,
        max_staleness: int = 0,
        *,
        late_groups: LateGroups = "wait",
        in_order: bool = False,
        step: int = 0,
    ):
        """
        Args:
          steps: optimizer steps of the run; no group is admitted that the remaining steps do not need.
          late_groups: "wait": a batch waits for the groups that would otherwise miss their deadline. "drop": a batch
            takes what is resolved, and groups that can no longer count are dropped.
          in_order: batches take groups in the order of their numbers (deterministic runs).
          step: optimizer steps that an earlier process has shipped.
        """
        self.groups_per_step, self.steps, self.max_staleness = groups_per_step, steps, max_staleness
        self.late_groups, self.in_order = late_groups, in_order
        self.step, self.next_number = step, 0
        self.outstanding: dict[int, int] = {}
        self._cohorts: dict[int, _Cohort] = {}
        self._resolved = 0

    @property
    def can_admit(self) -> bool:
        """Whether one more group may be admitted now."""
        batches = min(self.max_staleness + 1, self.steps - self.step)
        return len(self.outstanding) < batches * self.groups_per_step

    @property
    def playing(self) -> int:
        """Number of groups whose episodes have not all ended."""
        return len(self.outstanding) - self._resolved

    @property
    def queued(self) -> int:
        """Number of groups that wait to be trained."""
        return self._resolved

    def admit(self, number: int | None = None, admitted_at: int | None = None) -> int:
        """Admits the next group, or one that an earlier process had admitted; returns its number."""
        number = self.next_number if number is None else number
        if number in self.outstanding:
            raise ValueError(f"group {number} is outstanding already")
        self.next_number = max(self.next_number, number + 1)
        step = self.step if admitted_at is None else admitted_at
        self.outstanding[number] = step
        self._cohorts.setdefault(step, _Cohort()).playing.add(number)
        return number

    def resolve(self, number: int) -> None:
        """Notes that all episodes of a group have ended."""
        cohort = self._cohorts[self.outstanding[number]]
        if number in cohort.resolved:
            raise ValueError(f"group {number} is resolved already")
        cohort.playing.remove(number)
        cohort.resolved.add(number)
        self._resolved += 1

    def next_batch(self) -> list[int] | None:
        """Returns the numbers of the groups that the next step trains, ascending; None while it has to wait."""
        if self.in_order:
            first = self.step * self.groups_per_step
            numbers = range(first, first + self.groups_per_step)
            has_all = all(map(self._is_resolved, numbers))
            return list(numbers) if has_all else None
        taken = self._count_taken()
        if taken is None or (self.late_groups == "wait" and not self._can_meet_deadlines_after(taken)):
            return None
        return sorted(n for step, count in taken.items() for n in sorted(self._cohorts[step].resolved)[:count])

    def pop_batch(self, numbers: Iterable[int]) -> list[int]:
        """Counts a step that trains these groups; returns the numbers of the groups that are dropped.

        Raises ValueError if a group is not resolved.
        """
        for number in numbers:
            if not self._is_resolved(number):
                raise ValueError(f"group {number} is not resolved; it cannot be trained")
            self._remove(number)
        self.step += 1
        if self.late_groups == "wait":
            return []
        past = [step for step in self._cohorts if step + self.max_staleness < self.step]
        late = sorted(n for step in past for n in self._cohorts[step].playing | self._cohorts[step].resolved)
        for number in late:
            self._remove(number)
        return late

    def _is_resolved(self, number: int) -> bool:
        return number in self.outstanding and number in self._cohorts[self.outstanding[number]].resolved

    def _remove(self, number: int) -> None:
        step = self.outstanding.pop(number)
        cohort = self._cohorts[step]
        if number in cohort.resolved:
            cohort.resolved.remove(number)
            self._resolved -= 1
        else:
            cohort.playing.remove(number)
        if not len(cohort):
            del self._cohorts[step]

    def _count_taken(self) -> dict[int, int] | None:
        """Returns how many resolved groups the next batch takes by step of admission, oldest first; None if too few."""
        if self._resolved < self.groups_per_step:
            return None
        taken, room = {}, self.groups_per_step
        for step in sorted(self._cohorts):
            taken[step] = min(room, len(self._cohorts[step].resolved))
            room -= taken[step]
        return taken

    def _can_meet_deadlines_after(self, taken: Mapping[int, int]) -> bool:
        """Whether the groups that are not taken fit into the batches up to their deadlines (earliest deadline first).

        A group admitted at step t has the deadline t + max_staleness, the last step that may train it.
        """
        due = 0
        for step, count in taken.items():
            left = len(self._cohorts[step]) - count
            due += left
            if left and due > (step + self.max_staleness - self.step) * self.groups_per_step:
                return False
        return True
