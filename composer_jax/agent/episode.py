"""One episode: a task, a policy behind a Session, tools in a sandbox, and the grade at the end."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, Self

import numpy as np

from composer_jax.agent import summary, todos, tools
from composer_jax.agent.episode_clock import EpisodeClock, OutOfTime
from composer_jax.agent.episode_context import EpisodeContext
from composer_jax.agent.episode_spec import EpisodeSpec
from composer_jax.agent.transcript import Kind, Node, Transcript, TranscriptError
from composer_jax.agent.usage import EpisodeUsage, measure_usage
from composer_jax.agent.workspace import Workspace
from composer_jax.data.chat.chat_format import Message
from composer_jax.data.chat.messages import ToolCall
from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.errors import UserError
from composer_jax.frames import Frame, FrameError
from composer_jax.sampler.policy import Session
from composer_jax.sandbox import SandboxDied, SandboxKilled
from composer_jax.tasks.grading import grade, hack_monitor
from composer_jax.tasks.images import TaskWorkspace
from composer_jax.tasks.result_cache import EpisodeCache

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

FORMAT = "composer_jax episode 1"
"""What the header of an episode's frame says that it is."""


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
    effort: the level of effort that the system message named; "" for none (agent/effort.py).
    tools: the task's tools, by the names that tasks use (Task.tools).
    advantages: one number per node that a row trains (Transcript.trained_spans), in the order of the nodes, of an
      episode that is not compared with others of its task, such as a session of a user; None for one that is. The
      reward is then what the session was worth, which need not be between 0 and 1.
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
    advantages: tuple[float, ...] | None = None

    @property
    def summary_tokens(self) -> int:
        """Tokens of all summaries, the end of the message included."""
        return sum(len(node.sampled_tokens) for node in self.transcript.nodes_of_kind("summary"))

    def to_frame(self) -> Frame:
        """Returns header and arrays from which `from_frame` makes an equal episode, bit for bit."""
        transcript, arrays = self.transcript.to_frame()
        usage = asdict(self.usage)
        return {"format": FORMAT, **self.__dict__, "transcript": transcript, "usage": usage}, arrays

    @classmethod
    def from_frame(cls, header: Mapping[str, Any], arrays: Sequence[np.ndarray]) -> Self:
        """Makes the episode of `to_frame`. Raises FrameError for a frame of anything else."""
        if header.get("format") != FORMAT:
            raise FrameError(f"a frame of {header.get('format')!r}, not of {FORMAT!r}")
        values = {name: value for name, value in header.items() if name != "format"}
        try:
            advantages = header["advantages"]
            values |= {
                "transcript": Transcript.from_frame(header["transcript"], arrays),
                "usage": EpisodeUsage(**header["usage"]),
                "tools": tuple(header["tools"]),
                "advantages": None if advantages is None else tuple(advantages),
            }
            return cls(**values)
        except (KeyError, TypeError, TranscriptError) as error:
            raise FrameError(f"an episode that cannot be read ({error})") from error


class OutOfContext(Exception):
    """The context has no room for another message of the model."""


async def run_episode(spec: EpisodeSpec, session: Session, context: EpisodeContext) -> Episode:
    """Plays one episode of the policy behind `session`, and grades the workspace that it leaves.

    The reward is that of the grader if the policy called finish, else 0. `spec.seed` is recorded; randomness is the
    session's. After `episode_seconds` of tools and harness the episode ends where it is, with reward 0. The session is
    left open.

    Raises UserError for a task with an image where the context has no images, for a level of effort that the settings
    do not define, and with return_routing for a session that returns no routes.
    """
    task = spec.task
    if task.image is None:
        task_workspace = nullcontext(TaskWorkspace(context.pool, task.repository))
    elif context.images is None:
        raise UserError(f"task {task.id} needs the image {task.image}; play it with images=ImagePools()")
    else:
        task_workspace = context.images.workspace(task)
    episode = Episode(
        task_id=task.id,
        family=task.family,
        split=task.split,
        seed=spec.seed,
        transcript=Transcript(),
        reward=None,
        outcome="infrastructure",
        effort=spec.effort,
        tools=tuple(task.tools),
    )
    run = _Run(spec, session, context, EpisodeClock(context.settings.episode_seconds), episode)
    results = context.cache.of_episode(task.id, spec.seed)
    try:
        async with task_workspace as place:
            workspace = Workspace(task, place.pool, results, place.base, run.clock.paused)
            return await _play_and_grade(run, workspace, place, results)
    except SandboxDied as error:
        return replace(episode, detail=str(error))


async def _play_and_grade(run: "_Run", workspace: Workspace, place: TaskWorkspace, cache: EpisodeCache) -> Episode:
    task, episode = run.spec.task, run.episode
    try:
        outcome, broken = await _play(run, workspace)
        await workspace.close()
        visible_task = replace(task, repository=place.base)
        flags = await asyncio.to_thread(hack_monitor.find_flags, visible_task, run.calls, workspace.changes)
        episode.flags = [f"{flag.name}: {flag.evidence}" for flag in flags]
        has_final_message = outcome in ("finished", "no_call")
        episode.usage = await asyncio.to_thread(
            measure_usage,
            episode.transcript,
            run.context.chat,
            tools.select_tools(task.tools),
            has_final_message,
            workspace.todos,
            visible_task,
            workspace.changes,
        )
        if broken:
            return replace(episode, outcome=outcome, reward=0.0, detail=broken)
        result = await grade(task, workspace.changes, place.pool, cache)
    except SandboxKilled as error:
        return replace(episode, outcome="killed_sandbox", reward=0.0, detail=f"grading: {error}")
    finally:
        await workspace.close()
    reward = result.reward if outcome == "finished" else 0.0
    return replace(episode, outcome=outcome, reward=reward, parts=dict(result.parts), detail=result.detail)


async def _play(run: "_Run", workspace: Workspace) -> tuple[Outcome, str]:
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

    spec: EpisodeSpec
    session: Session
    context: EpisodeContext
    clock: EpisodeClock
    episode: Episode
    """Grows while it is played; its outcome, reward, parts and detail are known at the end."""
    calls: list[tuple[str, Mapping[str, Any]]] = field(default_factory=list)

    async def play(self, workspace: Workspace) -> Outcome:
        task, compaction, chat = self.spec.task, self.spec.compaction, self.context.chat
        available = tools.select_tools(task.tools)
        settings = self.context.settings
        max_turns = min(settings.limits.max_turns, task.max_turns or settings.limits.max_turns)
        text = settings.effort.system_prompt(self.spec.effort, settings.system_prompt)
        system = [Message("system", text)] if text else []
        messages = [*system, Message("user", task.instruction)]
        prompt = self.episode.transcript.append("prompt", chat.render(messages, available.values()))
        while True:
            node = await self.sample("assistant", settings.limits.max_turn_tokens)
            self.episode.turns += 1
            sampled = node.sampled_tokens.tolist()
            message = chat.parse(sampled, available.values())
            if not message.calls:
                return "no_call"

            done = next((i for i, call in enumerate(message.calls) if tools.is_finish(call, available)), None)
            tool_calls = [call for call in message.calls[:done] if isinstance(call, ToolCall)]
            self.calls += [(call.name, call.arguments) for call in tool_calls]
            answers = await tools.execute_calls(message.calls[:done], available, workspace)
            for observation in chat.bridge(sampled, answers):
                self.episode.transcript.append("tool", observation)
            if done is not None:
                return "finished"

            if self.episode.turns == max_turns:
                return "out_of_turns"
            length = self.episode.transcript.length + len(chat.generation_prompt)
            if compaction.is_due(length, len(prompt.tokens)):
                if self.episode.summaries + 1 == compaction.max_segments:
                    return "out_of_segments"
                await self.compact(prompt, workspace)

    async def sample(self, kind: Kind, max_tokens: int) -> Node:
        """Samples one message after the transcript's context. Raises OutOfContext if that has no room for one."""
        settings, prefix = self.context.settings, self.context.chat.generation_prompt
        context = self.episode.transcript.tokens + list(prefix)
        room = min(
            self.session.max_model_len - len(context),
            settings.limits.max_episode_tokens - self.episode.transcript.total_tokens - len(prefix),
        )
        if room < 1:
            raise OutOfContext
        routes = settings.return_routing
        params = SamplingParams(
            min(max_tokens, room),
            temperature=settings.temperature,
            return_routing=routes,
            routing_start=self.episode.transcript.routes_known if routes else 0,
        )
        with self.clock.paused():
            sample = await self.session.sample(context, params, branch=self.episode.summaries)
        if routes and sample.routing is None and sample.finish_reason != "cancelled":
            raise UserError(
                f"{type(self.session).__name__} returns no experts of its tokens, which router replay needs; use "
                'rl.router_replay="off", or a sampler with cache_routing.'
            )
        return self.episode.transcript.append(
            kind,
            prefix,
            sample.tokens,
            sample.logprobs,
            sample.versions,
            trained=sample.trained,
            routes=sample.routing,
            routes_start=sample.routing_start,
        )

    async def compact(self, prompt: Node, workspace: Workspace) -> None:
        """Asks for a summary, and starts a new branch from it. Raises OutOfContext if there is no room for one."""
        chat, compaction = self.context.chat, self.spec.compaction
        self.episode.transcript.append("summary_request", chat.user([compaction.request]))
        written = await self.sample("summary", compaction.max_summary_tokens)
        self.episode.summaries += 1
        ids = written.sampled_tokens.tolist()
        self.episode.facts_kept_last = summary.facts_kept(self.spec.task, chat, ids)
        if self.episode.summaries == 1:
            self.episode.facts_kept = self.episode.facts_kept_last
        failed = summary.is_failed(chat, ids)
        self.episode.failed_summaries += failed
        if not compaction.trains(failed):
            self.episode.transcript.untrain(written)
        self.episode.transcript.branch(prompt)
        plan = todos.format_plan(workspace.todos)
        carried = summary.carry_message(chat, self.episode.summaries, ids, plan, compaction.carry)
        self.episode.transcript.append("carry", carried)
