"""One episode: a task, a policy behind a Session, tools in a sandbox, and the grade at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from composer_jax.agent import summary, todos, tools
from composer_jax.agent.episode_clock import EpisodeClock, OutOfTime
from composer_jax.agent.summary import Compaction
from composer_jax.agent.transcript import Kind, Node, Transcript
from composer_jax.agent.usage import EpisodeUsage, measure_usage
from composer_jax.agent.workspace import Workspace
from composer_jax.data.chat.chat_format import ChatFormat, Message
from composer_jax.data.chat.messages import ToolCall
from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.errors import UserError
from composer_jax.sampler.policy import Session
from composer_jax.sandbox import SandboxDied, SandboxKilled, SandboxPool
from composer_jax.tasks.grading import grade, hack_monitor
from composer_jax.tasks.images.pools import ImagePools, TaskWorkspace
from composer_jax.tasks.result_cache import EpisodeCache, ResultCache
from composer_jax.tasks.task import Task

Outcome = Literal[
    "finished",
    "out_of_turns",
    "out_of_context",
    "out_of_segments",
    "no_call",
    "out_of_time",
    "killed_sandbox",
    "infrastructure",
]


@dataclass
class Episode:
    """One attempt at a task.

    reward: None when the infrastructure failed; then the attempt says nothing about the policy.
    outcome: how it ended: the policy called finish; it used up its turns, its context or its segments; it sent
      a message without a tool call; its tools used up agent.episode_seconds; a command of it, or what it submitted,
      kills its sandbox (reward 0, parts {} in both); or the infrastructure lost every attempt.
    parts: the parts of the grade ("hidden": fraction of hidden cases that pass, whatever the outcome).
    detail: the grade in one line, for people.
    turns: messages of the model, summaries not counted. summaries: how many it wrote.
    failed_summaries: how many of them were cut or had no text (summary.is_failed).
    facts_kept: fraction of the facts that the task needs in the first summary; None where the task names none, and
      without a summary.
    facts_kept_last: the same for the last summary, from which the episode was ended.
    flags: signs of reward hacking, "name: evidence" each (tasks/grading/hack_monitor.py).
    usage: counts of tokens, calls and edits; all 0 when the infrastructure failed.
    effort: the level of effort that the system message named; "" for none (rl/effort.py).
    tools: the task's tools, by the names that tasks use (Task.tools); () also in records from before this field.
    """

    task_id: str
    family: str
    split: str
    seed: int
    transcript: Transcript
    reward: float | None
    outcome: Outcome
    parts: dict[str, float] = field(default_factory=dict)
    detail: str = ""
    turns: int = 0
    summaries: int = 0
    flags: list[str] = field(default_factory=list)
    usage: EpisodeUsage = EpisodeUsage()
    effort: str = ""
    failed_summaries: int = 0
    facts_kept: float | None = None
    facts_kept_last: float | None = None
    tools: tuple[str, ...] = ()

    @property
    def summary_tokens(self) -> int:
        """Tokens of all summaries, the end of the message included."""
        return sum(len(node.sampled_tokens) for node in self.transcript.nodes_of_kind("summary"))

    def to_json(self) -> dict[str, Any]:
        """A JSON-able dict from which `from_json` makes an equal episode."""
        return {
            **self.__dict__,
            "transcript": self.transcript.to_json(),
            "parts": dict(self.parts),
            "usage": self.usage.to_json(),
            "tools": list(self.tools),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Episode:
        transcript, usage = Transcript.from_json(data["transcript"]), EpisodeUsage(**data["usage"])
        tools = tuple(data.get("tools", ()))
        parts = dict(data["parts"])
        return cls(**{**data, "transcript": transcript, "parts": parts, "usage": usage, "tools": tools})


@dataclass(frozen=True)
class EpisodeLimits:
    """What one episode may use (not published).

    Raises:
      UserError: a number below 1.
    """

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


class OutOfContext(Exception):
    """The context has no room for another message of the model."""


async def run_episode(
    task: Task,
    session: Session,
    pool: SandboxPool,
    chat: ChatFormat,
    *,
    compaction: Compaction,
    limits: EpisodeLimits,
    seed: int = 0,
    cache: ResultCache | None = None,
    images: ImagePools | None = None,
    system_prompt: str = "",
    temperature: float = 1.0,
    return_routing: bool = False,
    episode_seconds: float | None = None,
) -> Episode:
    """Plays one episode of the policy behind `session` on `task`, and grades the workspace that it leaves.

    The reward is that of the grader if the policy called finish, else 0. `chat` is the format of all messages; the
    session ends what it samples at one of `chat.end_tokens`. `seed` is recorded; randomness is the session's. `cache`
    may serve any number of episodes; each has its own results. Tasks with an image are played in the containers of
    `images` instead of `pool`. `system_prompt` is the text of a system message before the instruction; "" writes none.
    `temperature` is that of all messages; 0 is greedy. `return_routing` records the routes of all tokens in the
    transcript, for router replay. After `episode_seconds` of tools and harness the episode ends where it is, with
    reward 0; sampling, waiting for a sandbox and grading, which has limits of its own, do not count. The session is
    left open.

    Raises UserError for a task with an image where there are no `images`, and with return_routing for a session that
    returns no routes.
    """
    if task.image is None:
        task_workspace = nullcontext(TaskWorkspace(pool, task.repository))
    elif images is None:
        raise UserError(f"task {task.id} needs the image {task.image}; play it with images=ImagePools()")
    else:
        task_workspace = images.workspace(task)
    clock = EpisodeClock(episode_seconds)
    run = _Run(task, session, chat, compaction, limits, clock, system_prompt, temperature, return_routing)
    results = cache.of_episode(task.id, seed) if cache else None
    try:
        async with task_workspace as place:
            workspace = Workspace(task, place.pool, results, place.base, clock.paused)
            return await _play_and_grade(run, workspace, place, seed, results)
    except SandboxDied as error:
        return run.episode("infrastructure", None, {}, str(error), seed)


async def _play_and_grade(
    run: _Run, workspace: Workspace, place: TaskWorkspace, seed: int, cache: EpisodeCache | None
) -> Episode:
    try:
        outcome, broken = await _play(run, workspace)
        await workspace.close()
        visible_task = replace(run.task, repository=place.base)
        flags = await asyncio.to_thread(hack_monitor.find_flags, visible_task, run.calls, workspace.changes)
        run.flags = [f"{flag.name}: {flag.evidence}" for flag in flags]
        has_final_message = outcome in ("finished", "no_call")
        run.usage = await asyncio.to_thread(
            measure_usage,
            run.transcript,
            run.chat,
            tools.select_tools(run.task.tools),
            has_final_message,
            workspace.todos,
            visible_task,
            workspace.changes,
        )
        if broken:
            return run.episode(outcome, 0.0, {}, broken, seed)
        result = await grade(run.task, workspace.changes, place.pool, cache)
    except SandboxKilled as error:
        return run.episode("killed_sandbox", 0.0, {}, f"grading: {error}", seed)
    finally:
        await workspace.close()
    reward = result.reward if outcome == "finished" else 0.0
    return run.episode(outcome, reward, dict(result.parts), result.detail, seed)


async def _play(run: _Run, workspace: Workspace) -> tuple[Outcome, str]:
    """Returns how playing ended, and a sentence on what the policy broke; "" if nothing."""
    try:
        async with run.clock.running():
            return await run.play(workspace), ""
    except OutOfContext:
        return "out_of_context", ""
    except OutOfTime as error:
        return "out_of_time", str(error)
    except SandboxKilled as error:
        return "killed_sandbox", str(error)


@dataclass
class _Run:
    """An episode in progress."""

    task: Task
    session: Session
    chat: ChatFormat
    compaction: Compaction
    limits: EpisodeLimits
    clock: EpisodeClock
    system_prompt: str = ""
    temperature: float = 1.0
    return_routing: bool = False
    transcript: Transcript = field(default_factory=Transcript)
    turns: int = 0
    summaries: int = 0
    calls: list[tuple[str, Mapping[str, Any]]] = field(default_factory=list)
    flags: list[str] = field(default_factory=list)
    usage: EpisodeUsage = EpisodeUsage()
    failed_summaries: int = 0
    facts_kept: float | None = None
    facts_kept_last: float | None = None

    @property
    def max_turns(self) -> int:
        """Most messages of the agent: what its task gives it, and no more than the limit of all episodes."""
        return min(self.limits.max_turns, self.task.max_turns or self.limits.max_turns)

    async def play(self, workspace: Workspace) -> Outcome:
        available = tools.select_tools(self.task.tools)
        system = [Message("system", self.system_prompt)] if self.system_prompt else []
        messages = [*system, Message("user", self.task.instruction)]
        prompt = self.transcript.append("prompt", self.chat.render(messages, available.values()))
        while True:
            node = await self.sample("assistant", self.limits.max_turn_tokens)
            self.turns += 1
            sampled = node.sampled_tokens.tolist()
            message = self.chat.parse(sampled)
            if not message.calls:
                return "no_call"

            done = next((i for i, call in enumerate(message.calls) if tools.is_finish(call, available)), None)
            tool_calls = [call for call in message.calls[:done] if isinstance(call, ToolCall)]
            self.calls += [(call.name, call.arguments) for call in tool_calls]
            answers = await tools.execute_calls(message.calls[:done], available, workspace)
            for observation in self.chat.bridge(sampled, answers):
                self.transcript.append("tool", observation)
            if done is not None:
                return "finished"

            if self.turns == self.max_turns:
                return "out_of_turns"
            length = self.transcript.length + len(self.chat.generation_prompt)
            if self.compaction.is_due(length, len(prompt.tokens)):
                if self.summaries + 1 == self.compaction.max_segments:
                    return "out_of_segments"
                await self.compact(prompt, workspace)

    async def sample(self, kind: Kind, max_tokens: int) -> Node:
        """Samples one message after the transcript's context. Raises OutOfContext if that has no room for one."""
        prefix = self.chat.generation_prompt
        context = self.transcript.tokens + list(prefix)
        room = min(
            self.session.max_model_len - len(context),
            self.limits.max_episode_tokens - self.transcript.total_tokens - len(prefix),
        )
        if room < 1:
            raise OutOfContext
        params = SamplingParams(min(max_tokens, room), temperature=self.temperature, return_routing=self.return_routing)
        with self.clock.paused():
            sample = await self.session.sample(context, params, branch=self.summaries)
        if self.return_routing and sample.routing is None and sample.finish_reason != "cancelled":
            raise UserError(
                f"{type(self.session).__name__} returns no experts of its tokens, which router replay needs; use "
                'rl.router_replay="off", or a sampler with cache_routing.'
            )
        return self.transcript.append(
            kind,
            prefix,
            sample.tokens,
            sample.logprobs,
            sample.versions,
            trained=sample.trained,
            routes=sample.routing,
        )

    async def compact(self, prompt: Node, workspace: Workspace) -> None:
        """Asks for a summary, and starts a new branch from it. Raises OutOfContext if there is no room for one."""
        self.transcript.append("summary_request", self.chat.user([self.compaction.request]))
        written = await self.sample("summary", self.compaction.max_summary_tokens)
        self.summaries += 1
        ids = written.sampled_tokens.tolist()
        self.facts_kept_last = summary.facts_kept(self.task, self.chat, ids)
        if self.summaries == 1:
            self.facts_kept = self.facts_kept_last
        failed = summary.is_failed(self.chat, ids)
        self.failed_summaries += failed
        if not self.compaction.trains(failed):
            self.transcript.untrain(written)
        self.transcript.branch(prompt)
        plan = todos.format_plan(workspace.todos)
        carried = summary.carry_message(self.chat, self.summaries, ids, plan, self.compaction.carry)
        self.transcript.append("carry", carried)

    def episode(
        self, outcome: Outcome, reward: float | None, parts: dict[str, float], detail: str, seed: int
    ) -> Episode:
        return Episode(
            task_id=self.task.id,
            family=self.task.family,
            split=self.task.split,
            seed=seed,
            transcript=self.transcript,
            reward=reward,
            outcome=outcome,
            parts=parts,
            detail=detail,
            turns=self.turns,
            summaries=self.summaries,
            flags=self.flags,
            usage=self.usage,
            failed_summaries=self.failed_summaries,
            facts_kept=self.facts_kept,
            facts_kept_last=self.facts_kept_last,
            tools=tuple(self.task.tools),
        )
