"""EpisodeSpec: one episode to be played."""

from dataclasses import dataclass

from composer_jax.agent.summary import Compaction
from composer_jax.tasks.task import Task


@dataclass(frozen=True)
class EpisodeSpec:
    """Specification of one episode."""

    task: Task
    seed: int
    """uint32; fixes everything that the policy samples."""
    compaction: Compaction
    group: int = 0
    """Episodes of one rollout that share a number are a group: attempts at one task."""
    effort: str = ""
    """The level of EpisodeSettings.effort that the system message names; "" names none. One for all of a group
    (agent/effort.py: draw_effort)."""
