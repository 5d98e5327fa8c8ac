"""Plays episodes from a notebook: opens the sandboxes and the sessions that they need, and closes them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from composer_jax import agent
from composer_jax.agent.config import AgentConfig
from composer_jax.agent.episode import Episode, EpisodeLimits
from composer_jax.agent.summary import Compaction
from composer_jax.data.chat.chat_format import ChatFormat
from composer_jax.errors import UserError
from composer_jax.event_loop import EventLoop
from composer_jax.sampler.policy import Policy
from composer_jax.sandbox import LocalSandboxPool, SandboxLimits
from composer_jax.stages.model import Model
from composer_jax.tasks.images.pools import ImagePools
from composer_jax.tasks.suites.run import SUITE_LIMITS
from composer_jax.tasks.task import Task


def run_episode(
    task: Task,
    policy: Model | Policy,
    *,
    seed: int = 0,
    chat: ChatFormat | None = None,
    limits: EpisodeLimits | None = None,
    compaction: Compaction | None = None,
    system_prompt: str = "",
    temperature: float = 1.0,
) -> Episode:
    """Plays one episode of a policy on a task in a sandbox of this machine, and returns it graded.

    Blocks, also in a notebook. `composer_jax.agent.run_episode` is the form for code that has a session and sandboxes.

    Args:
      seed: uint32; fixes what the policy samples.
      chat: the format of messages; None is that of a Model.
      limits: None is the default of agent.limits.
      compaction: None asks for a summary when three quarters of the session's context are full.
      system_prompt: text of a system message, such as agent.prompts.system.SYSTEM; "" writes none.
      temperature: of all messages; 0 is greedy.

    Raises:
      UserError: a model without a chat format, or a task whose image is not on this machine.
    """
    options = {"limits": limits, "compaction": compaction, "system_prompt": system_prompt, "temperature": temperature}
    return run_group(task, policy, (seed,), chat=chat, **options)[0]


def run_group(
    task: Task,
    policy: Model | Policy,
    seeds: Sequence[int],
    *,
    chat: ChatFormat | None = None,
    limits: EpisodeLimits | None = None,
    compaction: Compaction | None = None,
    system_prompt: str = "",
    temperature: float = 1.0,
) -> list[Episode]:
    """Plays one episode of a task per seed, all at once, and returns them graded, in the order of the seeds.

    Blocks, also in a notebook. The policy limits how many episodes run at once. Other arguments and errors are those of
    `run_episode`.
    """
    if chat is None:
        if not isinstance(policy, Model):
            raise UserError(f"{type(policy).__name__} has no chat format of its own; give chat=.")
        chat = policy.chat_format
    with EventLoop() as loop:
        options = {"limits": limits or AgentConfig().limits, "system_prompt": system_prompt, "temperature": temperature}
        return loop.run(_play(task, policy, chat, compaction, seeds=seeds, **options))


async def _play(
    task: Task, policy: Policy, chat: ChatFormat, compaction: Compaction | None, *, seeds: Sequence[int], **options: Any
) -> list[Episode]:
    """options: further arguments of agent.run_episode."""
    pool = LocalSandboxPool(SandboxLimits() if task.repository is None else SUITE_LIMITS, size=len(seeds))
    images = ImagePools(len(seeds))

    async def play_one(seed: int) -> Episode:
        session = await policy.open(seed)
        try:
            summaries = compaction or Compaction(trigger=max(1, session.max_model_len * 3 // 4))
            return await agent.run_episode(
                task, session, pool, chat, compaction=summaries, seed=seed, images=images, **options
            )
        finally:
            session.close()

    try:
        async with policy.serving():
            try:
                async with asyncio.TaskGroup() as group:
                    episodes = [group.create_task(play_one(seed)) for seed in seeds]
            except BaseExceptionGroup as errors:
                raise errors.exceptions[0] from None
            return [episode.result() for episode in episodes]
    finally:
        await pool.close()
        await images.close()
