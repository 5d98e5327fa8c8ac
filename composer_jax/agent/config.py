"""The agent section of a run's config."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from composer_jax.agent.episode_context import EpisodeLimits
from composer_jax.agent.summary import Compaction
from composer_jax.errors import UserError


@dataclass(frozen=True)
class AgentConfig:
    """How agents play episodes, in RL, evaluation and expert traces alike."""

    limits: EpisodeLimits = field(default_factory=EpisodeLimits)
    """What one episode may use."""
    compactions: Mapping[str, Compaction] = field(
        default_factory=lambda: {"none": Compaction(None), "summary": Compaction(24_576)}
    )
    """Named ways of compaction, which rl.compaction and the suites of evaluate.suites choose from."""
    system_prompt: str = ""
    """Text of the system message of every episode (agent/prompts/system.py has one); empty writes none."""
    concurrency: int = 16
    """Sandboxes in use at once, and as many containers for tasks that need an image; on each host. The cache of the
    sampler bounds the episodes that are open (sampler.cache_tokens)."""
    episode_seconds: float = 14_400.0
    """Seconds of tools and harness that an episode may use. Sampling (queue, pauses and new weights included), waiting
    for a sandbox or a container, and grading do not count. Beyond it the tool that runs is cut, and the episode has
    grade 0 and no retry (docs/rewards.md). Not published."""

    def __post_init__(self) -> None:
        if not self.episode_seconds > 0:
            raise UserError(f"agent.episode_seconds={self.episode_seconds} ends every episode; use a number above 0.")
        if self.concurrency < 1:
            raise UserError(f"agent.concurrency={self.concurrency} leaves no sandbox; use at least 1.")

    def compaction(self, name: str, field: str) -> Compaction:
        """Returns the compaction called `name`. Raises UserError, which names the config field, if there is none."""
        if name not in self.compactions:
            known = ", ".join(self.compactions)
            raise UserError(f"config.{field}={name!r} is not a compaction; agent.compactions has {known}.")
        return self.compactions[name]
