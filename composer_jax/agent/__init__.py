"""The agent harness: tools, transcript, self-summarization, one episode."""

from composer_jax.agent.episode import Episode, EpisodeLimits, run_episode
from composer_jax.agent.summary import Compaction
from composer_jax.agent.transcript import Transcript

__all__ = ["Compaction", "Episode", "EpisodeLimits", "Transcript", "run_episode"]
