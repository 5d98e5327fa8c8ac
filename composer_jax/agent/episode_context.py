"""EpisodeContext: all that an episode needs and that is the same for many."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

from composer_jax.agent.effort import EffortConfig, EffortLevel
from composer_jax.data.chat.chat_format import ChatFormat
from composer_jax.errors import UserError
from composer_jax.sandbox import SandboxPool
from composer_jax.tasks.images import ImagePools
from composer_jax.tasks.result_cache import ResultCache


@dataclass(frozen=True)
class EpisodeLimits:
    """What one episode may use (not published). Raises UserError for a number below 1."""

    max_turns: int = 50
    """Messages of the model, summaries not counted."""
    max_turn_tokens: int = 2048
    """Tokens of one message; a longer one is cut, and the tools' answer says what the cut broke."""
    max_episode_tokens: int = 65_536
    """Tokens of all branches, each node counted once; nothing is sampled beyond."""

    def __post_init__(self) -> None:
        for limit in fields(self):
            if getattr(self, limit.name) < 1:
                raise UserError(f"agent.limits.{limit.name}={getattr(self, limit.name)}; it must be at least 1.")


@dataclass(frozen=True)
class EpisodeSettings:
    """What an EpisodeContext sets on every machine alike; a trainer sends it to its workers."""

    limits: EpisodeLimits = field(default_factory=EpisodeLimits)
    """What one episode may use."""
    system_prompt: str = ""
    """Text of the system message of every episode; "" writes none."""
    effort: EffortConfig = EffortConfig()
    """Defines the levels of effort that specs name; the text of a level follows `system_prompt`."""
    temperature: float = 1.0
    """Of everything that is sampled; 0 is greedy. RL trains on episodes of temperature 1."""
    episode_seconds: float | None = None
    """Limit on the seconds of tools and harness in an episode (agent.episode_seconds); None sets none. Sampling,
    waiting for a sandbox, and grading, which has limits of its own, do not count."""
    return_routing: bool = False
    """Records the experts of every token in the transcripts, for router replay."""
    infrastructure_retries: int = 2
    """Further attempts of a rollout at an episode that was lost; it is not scored if all attempts are lost."""

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Makes the settings of a dict of dataclasses.asdict. Raises UserError for limits below 1."""
        levels = {name: EffortLevel(**level) for name, level in data["effort"]["levels"].items()}
        effort = EffortConfig(levels, data["effort"]["prompt"])
        return cls(**{**data, "limits": EpisodeLimits(**data["limits"]), "effort": effort})


@dataclass(frozen=True)
class EpisodeContext:
    """What any number of episodes need beside a policy: their settings, and what this machine has for them."""

    chat: ChatFormat
    """The format of all messages; a session ends what it samples at one of `chat.end_tokens`."""
    pool: SandboxPool
    settings: EpisodeSettings = field(default_factory=EpisodeSettings)
    cache: ResultCache = field(default_factory=lambda: ResultCache(max_entries=0))
    """Results of sandbox commands, of which each episode has its own; the default keeps none."""
    images: ImagePools | None = None
    """Containers in which tasks with an image are played instead of `pool`; None refuses such tasks."""
