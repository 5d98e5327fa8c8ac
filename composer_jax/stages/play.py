"""Plays episodes from a notebook: opens the sandboxes and the sessions that they need, and closes them."""

from collections.abc import Sequence

from composer_jax.agent.episode import Episode, run_episode
from composer_jax.agent.episode_context import EpisodeContext, EpisodeSettings
from composer_jax.agent.episode_spec import EpisodeSpec
from composer_jax.agent.summary import Compaction
from composer_jax.data.chat.chat_format import ChatFormat
from composer_jax.errors import UserError
from composer_jax.event_loop import EventLoop, run_all
from composer_jax.sampler.policy import ServingPolicy
from composer_jax.sandbox import LocalSandboxPool, SandboxLimits
from composer_jax.stages.model import Model
from composer_jax.tasks.images import ImagePools
from composer_jax.tasks.network import require_network
from composer_jax.tasks.suites.run import SUITE_LIMITS
from composer_jax.tasks.task import Task


def run_attempt(
    task: Task,
    policy: Model | ServingPolicy,
    *,
    seed: int = 0,
    chat: ChatFormat | None = None,
    compaction: Compaction | None = None,
    settings: EpisodeSettings | None = None,
    network: str = "none",
) -> Episode:
    """Plays one episode of a policy on a task in a sandbox of this machine, and returns it graded.

    Blocks, also in a notebook. `composer_jax.agent.run_episode` is for code that has a session and sandboxes. Raises
    UserError for a model without a chat format, for a task whose image is missing, and for one that needs the network
    and does not get it.

    Args:
      seed: uint32; fixes what the policy samples.
      chat: the format of messages; None is that of a Model.
      compaction: None asks for a summary when three quarters of the session's context are full.
      settings: limits, system message and temperature; None has the defaults of EpisodeSettings.
      network: "host" gives a task that needs the network that of this machine (SandboxConfig).
    """
    return run_group(task, policy, (seed,), chat=chat, compaction=compaction, settings=settings, network=network)[0]


def run_group(
    task: Task,
    policy: Model | ServingPolicy,
    seeds: Sequence[int],
    *,
    chat: ChatFormat | None = None,
    compaction: Compaction | None = None,
    settings: EpisodeSettings | None = None,
    network: str = "none",
) -> list[Episode]:
    """Plays one episode of a task per seed, all at once, and returns them graded, in the order of the seeds.

    Blocks, also in a notebook. The policy limits how many episodes run at once. Other arguments and errors are those of
    `run_attempt`.
    """
    if chat is None:
        if not isinstance(policy, Model):
            raise UserError(f"{type(policy).__name__} has no chat format of its own; give chat=.")
        chat = policy.chat_format
    require_network([task], network, "network='host'")
    with EventLoop() as loop:
        return loop.run(_play(task, policy, seeds, chat, compaction, settings or EpisodeSettings()))


async def _play(
    task: Task,
    policy: ServingPolicy,
    seeds: Sequence[int],
    chat: ChatFormat,
    compaction: Compaction | None,
    settings: EpisodeSettings,
) -> list[Episode]:
    limits = SandboxLimits() if task.repository is None else SUITE_LIMITS
    pool = LocalSandboxPool(limits, size=len(seeds), network=task.network and task.image is None)
    images = ImagePools(len(seeds))
    context = EpisodeContext(chat, pool, settings, images=images)

    async def play_one(seed: int) -> Episode:
        session = await policy.open(seed)
        try:
            summaries = compaction or Compaction(trigger=max(1, session.max_model_len * 3 // 4))
            return await run_episode(EpisodeSpec(task, seed, summaries), session, context)
        finally:
            session.close()

    try:
        async with policy.serving():
            return await run_all(play_one(seed) for seed in seeds)
    finally:
        await pool.close()
        await images.close()
