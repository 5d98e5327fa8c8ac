"""The agent harness: tools, transcript, self-summarization, one episode."""

from composer_jax.agent.episode import Episode, run_episode
from composer_jax.agent.episode_context import EpisodeContext, EpisodeLimits, EpisodeSettings
from composer_jax.agent.episode_spec import EpisodeSpec
from composer_jax.agent.summary import Compaction
from composer_jax.agent.transcript import Transcript

__all__ = [
    "Compaction",
    "Episode",
    "EpisodeContext",
    "EpisodeLimits",
    "EpisodeSettings",
    "EpisodeSpec",
    "Transcript",
    "run_episode",
]
