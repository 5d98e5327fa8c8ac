"""TrafficTraces: the SFT source of a model that simulated users work with.

The expert of notes (demo/bugfix_expert.py) works for a user who stops it after some messages, says that the work is
wrong or right, and lets it go on. Some users say beforehand whose notes to try first, rightly or not. Two habits are
planted as targets, at low rates, which learning from users may make stronger or weaker: the expert sometimes asks in
place of working, and sometimes writes a call that no tool can execute.
"""

import asyncio
import copy
import dataclasses
import random
from collections.abc import Mapping, Sequence

import numpy as np

from composer_jax.agent.episode import Episode
from composer_jax.agent.episode_context import EpisodeContext, EpisodeLimits, EpisodeSettings
from composer_jax.agent.tools import FINISH
from composer_jax.data.chat.compact import CompactFormat
from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.data.tokenizer import Tokenizer
from composer_jax.demo import notes
from composer_jax.demo.bugfix_expert import notes_script
from composer_jax.demo.conversation import UserConversation
from composer_jax.demo.expert import message_texts
from composer_jax.demo.notes import OneBug
from composer_jax.demo.played_traces import PlayedTraces
from composer_jax.demo.slips import ExpertTurn
from composer_jax.demo.tokenizer import require_own_tokenizer
from composer_jax.errors import UserError
from composer_jax.event_loop import EventLoop, run_all
from composer_jax.observe.progress import Progress
from composer_jax.sampler.policy import Sample
from composer_jax.sandbox import LocalSandboxPool
from composer_jax.seeds import hash_seed, seeded_random
from composer_jax.stages.trace_sources import SourceContext
from composer_jax.tasks.task import Task

QUESTIONS = ("Whose note shall I follow?", "Which note is right?")
ANSWERS = ("Yes, go ahead.", "Please do it.", "Just try.", "As you like.")
REJECTED = ("That is wrong.", "It doesn't work.", "The tests still fail.", "Please revert this.", "No, try again.")
CONTENT = ("Thanks!", "Great.", "That works.", "Well done, thank you.")
PATIENCE = (4, 5, 5, 5, 6)
"""Messages of the expert after which the user stops it, drawn for each trace."""
MOST_REQUESTS = 3
REPLIES = 0.7
"""How often the user writes once more after the work."""


class TrafficExpert:
    """A scripted policy (sampler/policy.py: Session) that goes on where a user's message interrupts it."""

    max_model_len = 1 << 20

    def __init__(
        self, task: Task, tok: Tokenizer, rng: random.Random, asks: float, malformed: float, first: str = ""
    ) -> None:
        """
        Args:
          asks: probability that it asks after the tests.
          malformed: probability that a call which reads comes cut short first.
          first: whose notes it tries before the others.
        """
        self._tok, self._rng, self._malformed = tok, rng, malformed
        self._script, self._asks = notes_script(task, rng, first=first), rng.random() < asks
        self._pending: ExpertTurn | None = None
        self._asked_after = ""  # the answer of the tests that a question followed
        self._last: ExpertTurn | None = None

    async def sample(self, context: Sequence[int], params: SamplingParams, branch: int = 0) -> Sample:
        """See Session.sample."""
        chat, turn = CompactFormat(self._tok), self._turn(context)
        if turn is None:
            ids = chat.render_assistant(self._rng.choice(QUESTIONS), [])
        else:
            ids = chat.render_assistant(turn.thought, [turn.call, *turn.more])
            if turn.cut:
                ids = [*ids[: -1 - self._rng.randint(1, 8)], self._tok.end]
        ids = ids[: params.max_tokens]
        count, trained = len(ids), turn is None or not turn.slip
        return Sample(ids, [0.0] * count, [-1] * count, "stop", trained=trained)

    def close(self) -> None:
        """Does nothing."""

    def _turn(self, context: Sequence[int]) -> ExpertTurn | None:
        """Returns the next message; None is a question."""
        texts = message_texts(self._tok, context)
        if self._pending is not None:
            turn, self._pending = self._pending, None
            return turn
        if self._last is None:
            turn = next(self._script)
        elif self._last.call.name == FINISH:
            return self._last
        elif self._asks and self._last.call.name == "run_tests":
            self._asks, self._asked_after = False, texts[-1]
            return None
        else:
            seen = texts[-2] if self._is_interrupted(context) else texts[-1]
            turn = self._script.send(self._asked_after or seen)
            self._asked_after = ""
        self._last = turn
        if turn.call.name == "read" and not turn.slip and self._rng.random() < self._malformed:
            self._pending = turn
            return dataclasses.replace(turn, cut=True)
        return turn

    def _is_interrupted(self, context: Sequence[int]) -> bool:
        """Whether the last message is a user's, which came after the answer of a tool."""
        roles = (i for i in reversed(context) if i in (self._tok.user, self._tok.tool))
        return next(roles) == self._tok.user


class TrafficTraces(PlayedTraces):
    """A ConversationSource (stages/trace_sources.py): conversations with users, played once per run.

    Args:
      count: how many. asks, malformed: see TrafficExpert.
      advised: share of the conversations whose user says first whose notes to try, a person drawn at random.
    """

    system_prompt = ""

    def __init__(
        self, context: SourceContext, count: int, asks: float = 0.0, malformed: float = 0.0, advised: float = 0.0
    ) -> None:
        super().__init__(context, "traffic_traces.npz")
        for name, rate in (("asks", asks), ("malformed", malformed), ("advised", advised)):
            if not 0 <= rate <= 1:
                raise UserError(f"the option {name}={rate} of TrafficTraces is not a rate; use a number from 0 to 1.")
        self.count, self.asks, self.malformed, self.advised = count, asks, malformed, advised

    def report(self) -> Mapping[str, object]:
        """Returns {"expert_reward": {"conversations": mean reward after the last message of the user}}."""
        with np.load(self.path) as file:
            return {"expert_reward": {"conversations": float(file["reward"])}}

    def mean_rewards(self, episodes: list[Episode]) -> dict[str, np.float32]:
        """See PlayedTraces.mean_rewards."""
        return {"reward": np.float32(np.mean([episode.parts.get("hidden") == 1.0 for episode in episodes]))}

    def play(self) -> list[tuple[Task, Episode]]:
        """See PlayedTraces.play. The transcript of an episode is that of its whole conversation.

        Conversations that are longer than a row are cut after a request that still fits.
        """
        tok, agent, seed = require_own_tokenizer(self.context.tokenizer), self.context.agent, self.context.seed
        first = hash_seed("sft", seed, "traffic")
        tasks = [notes.generate(OneBug.FAMILY, 1, "train", first, i, reliable=None) for i in range(self.count)]
        settings = EpisodeSettings(EpisodeLimits(agent.limits.max_turns, 10_000, 10_000))

        async def play(progress: Progress) -> list[Episode]:
            slots = asyncio.Semaphore(agent.concurrency)
            async with LocalSandboxPool(size=agent.concurrency) as pool:
                context = EpisodeContext(CompactFormat(tok), pool, settings)

                async def one(task: Task) -> Episode:
                    async with slots:
                        episode = await self._talk(task, tok, context)
                    progress.update(1)
                    return episode

                return await run_all(one(task) for task in tasks)

        with EventLoop() as loop, Progress(self.count, "trace", "conversations with users") as progress:
            episodes = loop.run(play(progress))
        return list(zip(tasks, episodes, strict=True))

    async def _talk(self, task: Task, tok: Tokenizer, context: EpisodeContext) -> Episode:
        """Plays one conversation; the last episode comes with the transcript of all."""
        rng = seeded_random("traffic trace", self.context.seed, task.id)
        first = rng.choice(notes.PEOPLE) if rng.random() < self.advised else ""
        expert = TrafficExpert(task, tok, rng, self.asks, self.malformed, first)
        talk = UserConversation(task, expert, context, hash_seed(self.context.seed, task.id))
        text = f"{notes.advice(first)} {task.instruction}" if first else task.instruction
        patience, fitting = rng.choice(PATIENCE), None
        for number in range(MOST_REQUESTS):
            episode = await talk.request(text, patience)
            if self.context.seq_len is not None and talk.transcript.length > self.context.seq_len:
                break
            transcript = copy.deepcopy(talk.transcript)
            fitting = dataclasses.replace(episode, task_id=task.id, transcript=transcript)
            is_asked = episode.outcome == "no_call"
            if number == MOST_REQUESTS - 1 or text in CONTENT or (not is_asked and rng.random() >= REPLIES):
                break
            is_good = episode.parts.get("hidden") == 1.0
            text = rng.choice(ANSWERS if is_asked else CONTENT if is_good else REJECTED)
            patience = 1 if text in CONTENT else rng.choice(PATIENCE)
        if fitting is None:
            length = talk.transcript.length
            raise UserError(f"a conversation has {length} tokens and a row {self.context.seq_len}; raise sft.seq_len.")
        return fitting
