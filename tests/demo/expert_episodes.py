"""Episodes of the scripted experts, played in the sandboxes of a test."""

from composer_jax.agent.episode_context import EpisodeContext, EpisodeSettings
from composer_jax.data.chat.compact import CompactFormat
from composer_jax.demo.expert import expert_jobs
from composer_jax.demo.played_traces import play_jobs


async def make_traces(tasks, compaction_for, pool, tok, *, limits, seed=0, concurrency=16, on_done=None):
    """One expert episode per task, in their order; compaction_for: (task, its index) -> its compaction."""
    compactions = [compaction_for(task, index) for index, task in enumerate(tasks)]
    context = EpisodeContext(CompactFormat(tok), pool, EpisodeSettings(limits))
    return await play_jobs(expert_jobs(tasks, compactions, tok, seed), context, concurrency, on_done)
