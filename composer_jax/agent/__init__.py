"""The agent harness: tools, transcript, self-summarization, one episode."""

from composer_jax.agent.episode import Episode as Episode
from composer_jax.agent.episode import run_episode as run_episode
from composer_jax.agent.episode_context import EpisodeContext as EpisodeContext
from composer_jax.agent.episode_context import EpisodeLimits as EpisodeLimits
from composer_jax.agent.episode_context import EpisodeSettings as EpisodeSettings
from composer_jax.agent.episode_spec import EpisodeSpec as EpisodeSpec
from composer_jax.agent.summary import Compaction as Compaction
from composer_jax.agent.transcript import Transcript as Transcript
