"""Outcome: what a simulated run did, and the Recorder that measures it."""

import dataclasses
from collections.abc import Sequence

from composer_jax.rl.group_buffer import GroupBuffer
from composer_jax.scale.simulation.engines import DecodePool
from composer_jax.scale.simulation.roles import Roles

DAY_S = 86_400.0
PHASES = {
    "learning": "the learner computes a step",
    "publishing": "weights are encoded, sent and installed, and the learner waits for it",
    "sandboxes": "the learner waits, and episodes wait because all sandboxes are in use",
    "engines": "the learner waits, and episodes wait because all sessions of the engines are in use",
    "episodes": "the learner waits, and every episode that rl.max_staleness admits plays already",
}
"""What a run spends its time with; each moment belongs to one."""
SELDOM = 0.1
"""Fraction of the time below which the learner's waiting is not what holds a run up."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Figures of the measured time, except where "whole run" is said.

    A group is late if it was dropped because it would have been trained too late.
    """

    seconds: float
    """Simulated seconds that were measured."""
    steps: int
    """Steps committed."""
    steps_per_day: float
    """By the mean time between two commits; 0 if there were fewer than two."""
    episodes_per_hour: float
    """Attempts that were graded."""
    sampled_tokens_per_s: float
    trained_tokens_per_step: float
    learner_utilisation: float
    """Fraction of the time in which the learner computed, or its processes waited for a batch."""
    engine_utilisation: float
    """Tokens sampled as a fraction of those that the engines sample with all sessions decoding."""
    sandbox_utilisation: float
    """Fraction of the sandboxes in use, in the mean over time."""
    router_utilisation: float
    """Seconds that messages take of the learner's process 0, over the time; 1 is all that it has."""
    episodes_running: float
    """Episodes with a sandbox and a session, in the mean over time."""
    staleness_mean: float
    """Weight versions between a group's first token and the step that trains it, over groups."""
    staleness_max: int
    dropped_fraction: float
    """Groups dropped as late, of all groups that were trained or dropped."""
    lost_fraction: float
    """Attempts lost, of all attempts that ended."""
    phases: dict[str, float]
    """Fraction of the time by phase (PHASES)."""
    admitted: int
    """Groups admitted in the whole run."""
    shipped: int
    """Groups trained in the whole run."""
    dropped: int
    """Groups dropped in the whole run."""
    outstanding: int
    """Groups that were neither at the end."""
    weight_version: int
    """At the end."""
    ended_s: float
    """Simulated second in which the run's last measured moment lies, warm-up included."""

    @property
    def limit(self) -> str:
        """The phase that holds the run up: what the learner waits for, or its own work if it seldom waits."""
        waits = {phase: spent for phase, spent in self.phases.items() if phase not in ("learning", "publishing")}
        own = {phase: spent for phase, spent in self.phases.items() if phase not in waits}
        among = waits if sum(waits.values()) >= SELDOM else own
        return max(among, key=lambda phase: among[phase])


class Recorder:
    """Adds up what the Outcome says; `start` forgets what was before, except for the counts of the whole run."""

    def __init__(self, roles: Roles):
        self._roles = roles
        self._shipped = self._dropped = 0
        self._now = 0.0
        self._clear()

    def _clear(self) -> None:
        self._began, self._phases, self._episode_s = self._now, dict.fromkeys(PHASES, 0.0), 0.0
        self._commits: list[float] = []
        self._graded = self._lost = self._groups = self._late = self._staleness = self._staleness_max = 0
        self._tokens, self._steps, self._messages_s = 0.0, 0, 0.0
        self._sampled_before, self._pool = 0.0, None

    def start(self, pool: DecodePool) -> None:
        """Begins the measured time."""
        self._clear()
        self._pool, self._sampled_before = pool, pool.sampled

    def pass_time(self, seconds: float, phase: str, running: int) -> None:
        self._now += seconds
        self._phases[phase] += seconds
        self._episode_s += seconds * running

    def count_attempt(self, is_lost: bool) -> None:
        if is_lost:
            self._lost += 1
        else:
            self._graded += 1

    def count_messages(self, seconds: float) -> None:
        self._messages_s += seconds

    def count_step(self, staleness: Sequence[int], groups: int, dropped: int, tokens: float) -> None:
        self._shipped += groups
        self._dropped += dropped
        self._groups += groups
        self._late += dropped
        self._staleness += sum(staleness)
        self._staleness_max = max(self._staleness_max, *staleness)
        self._tokens += tokens
        self._steps += 1

    def commit(self, now: float) -> None:
        self._commits.append(now)

    def outcome(self, buffer: GroupBuffer, version: int) -> Outcome:
        roles, seconds, commits = self._roles, self._now - self._began, self._commits
        assert self._pool is not None, "the measured time has not begun"
        span = commits[-1] - commits[0] if len(commits) > 1 else 0.0
        tokens_per_s = (self._pool.sampled - self._sampled_before) / max(seconds, 1e-9)
        return Outcome(
            seconds=seconds,
            steps=len(commits),
            steps_per_day=(len(commits) - 1) * DAY_S / span if span else 0.0,
            episodes_per_hour=self._graded * 3600 / max(seconds, 1e-9),
            sampled_tokens_per_s=tokens_per_s,
            trained_tokens_per_step=self._tokens / max(self._steps, 1),
            learner_utilisation=self._phases["learning"] / max(seconds, 1e-9),
            engine_utilisation=tokens_per_s / roles.peak_tokens_per_s,
            sandbox_utilisation=self._episode_s / max(seconds, 1e-9) / roles.sandboxes,
            router_utilisation=self._messages_s / max(seconds, 1e-9),
            episodes_running=self._episode_s / max(seconds, 1e-9),
            staleness_mean=self._staleness / max(self._groups, 1),
            staleness_max=self._staleness_max,
            dropped_fraction=self._late / max(self._groups + self._late, 1),
            lost_fraction=self._lost / max(self._graded + self._lost, 1),
            phases={phase: spent / max(seconds, 1e-9) for phase, spent in self._phases.items()},
            admitted=buffer.next_number,
            shipped=self._shipped,
            dropped=self._dropped,
            outstanding=len(buffer.outstanding),
            weight_version=version,
            ended_s=self._now,
        )
