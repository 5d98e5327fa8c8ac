"""SimulatedUsers: the people of a population, who ask the served model to fix a bug and judge what it does.

Their tasks are those of demo/notes.py with one bug, in which the person whose notes the user trusts is right. Nothing
tells the model beforehand whose notes these are: in SFT anybody's notes may be right, and the groups that an update
plays have none. Before its first edit, what users kept of earlier ones is the only source of it. Within a session the
visible tests of the repository tell, too: after "That is wrong" a model may try the next note until they pass, which
raises `kept` and `satisfied_follow_ups` without any taste. `good_at_first` is of the answer to the first request,
before that.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import random
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from composer_jax.agent.episode import Episode
from composer_jax.agent.episode_context import EpisodeContext
from composer_jax.demo import notes
from composer_jax.demo.conversation import UserConversation
from composer_jax.demo.notes import OneBug
from composer_jax.demo.population import REVERSE, Population, Replies, SimulatedUser, choose, read_population
from composer_jax.demo.reactions import SessionReactions, Verdict, invalid_calls
from composer_jax.errors import UserError
from composer_jax.realtime.labels.conversation import is_question
from composer_jax.sampler.policy import Sample
from composer_jax.seeds import hash_seed, seeded_random
from composer_jax.stages.traffic_users import PlayedSession, SessionOpening, SessionTime
from composer_jax.tasks.task import Task

if TYPE_CHECKING:  # the packages of the server are optional
    from composer_jax.stages.served_session import ServedSession

MOST_REQUESTS = 3
"""Messages that a user sends at most in a session."""
KEPT_S = 3600.0
"""The age whose kept lines `summarize` shows."""
MOST_SESSIONS = 1_000_000
"""Of one cycle: their tasks have numbers below that."""


@dataclasses.dataclass(frozen=True)
class _Plan:
    """A session before it is played."""

    user: SimulatedUser
    taste: str
    task: Task
    patience: int


class SimulatedUsers:
    """The users of a population (stages/traffic_users.py: TrafficUsers)."""

    shown = ("kept", "good_at_first", "satisfied_follow_ups", "edit_rate", "question_rate", "malformed_call_rate")

    def __init__(self, seed: int, population: str = "first", advice: str = "") -> None:
        """
        Args:
          population: the name or file of one. Raises UserError as read_population.
          advice: words before the first request of every session, as a memory of earlier sessions would have them.
        """
        self.seed, self.population, self._advice = seed, read_population(population), advice
        self._shares = {one.name: one.share for one in self.population.organisations}

    @functools.cached_property
    def organisations(self) -> Mapping[str, str]:
        """See TrafficUsers."""
        return {name: hashlib.sha256(f"key of {name}".encode()).hexdigest()[:32] for name in self._shares}

    def opening(self, cycle: int, number: int) -> SessionOpening:
        """See TrafficUsers."""
        if number >= MOST_SESSIONS:
            raise UserError(f"session {number} of a cycle; a cycle has {MOST_SESSIONS} sessions at most.")
        user = self._plan(cycle, number).user
        place = self._draw(cycle, number, "opening").random()
        return SessionOpening(
            self.organisations[user.organisation.name], user.name, user.repository, user.consent, place
        )

    def task(self, cycle: int, number: int) -> Task:
        """Returns what the user of a session asks for."""
        return self._plan(cycle, number).task

    def answer_seconds(self, sample: Sample) -> float:
        """See TrafficUsers."""
        return self.population.token_s * len(sample.tokens)

    async def play(
        self, cycle: int, number: int, name: str, session: ServedSession, context: EpisodeContext, time: SessionTime
    ) -> PlayedSession:
        """See TrafficUsers."""
        plan = self._plan(cycle, number)
        talk = UserConversation(plan.task, session, context, hash_seed("session", self.seed, cycle, number))
        flips = self._draw(cycle, number, "noise").random() < self.population.noise
        rows: list[dict[str, Any]] = []
        text, patience = f"{self._advice} {plan.task.instruction}".lstrip(), plan.patience
        stopped: list[int] = []
        replies: list[tuple[int, float]] = []
        while True:
            episode = await talk.request(text, patience)
            kind, good = self._kind(plan, talk, episode, flips), _passes(episode)
            rows.append({"kind": kind, "good": good, "outcome": episode.outcome, "reply": False})
            is_thanked = len(rows) > 1 and rows[-2]["kind"] == "content"
            if episode.outcome == "out_of_turns" and not is_thanked:
                stopped.append(len(talk.turns) - 1)
            reply = self._replies(kind)
            rng = self._draw(cycle, number, f"reply {len(rows)}")
            if is_thanked or len(rows) == MOST_REQUESTS or rng.random() >= reply.rate:
                break
            time.advance(rng.expovariate(1 / self.population.reply_s))
            replies.append((len(talk.turns) - 1, time.now))
            rows[-1]["reply"] = True
            text, patience = rng.choice(reply.texts), 1 if kind == "content" else plan.patience
        accepts = self._accepts(plan, talk, good, flips)
        verdict = Verdict(accepts, good, tuple(stopped), tuple(replies))
        draw = functools.partial(self._draw, cycle, number)
        reactions = SessionReactions(name, talk, verdict, session.answers, time.answered, self.population, draw)
        truth = self._truth(cycle, number, plan, talk, rows) | {
            "accepts": accepts,
            "good": good,
            "kept": {f"{age:g}": share for age, share in reactions.kept.items()},
        }
        return PlayedSession(truth, reactions.reactions)

    def summarize(self, truths: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
        """See TrafficUsers: the measures of all users whose organisation does not poison, and some of each taste."""
        honest = [truth for truth in truths if not truth["poison"]]
        measures = _measures(honest)
        for taste in sorted({truth["taste"] for truth in honest}):
            of_taste = _measures([truth for truth in honest if truth["taste"] == taste])
            measures |= {f"{name}_{taste}": of_taste[name] for name in ("sessions", "kept", "good_at_first")}
        return measures

    # -- draws ---------------------------------------------------------------------------------------------------

    def _draw(self, cycle: int, number: int, purpose: str) -> random.Random:
        return seeded_random("users", self.seed, cycle, number, purpose)

    def _plan(self, cycle: int, number: int) -> _Plan:
        rng, population = self._draw(cycle, number, "plan"), self.population
        users = population.users[choose(self._shares, rng.random())]
        (user,) = rng.choices(users, [user.activity for user in users])
        taste = population.taste(user, cycle)
        seed, index = hash_seed("users", self.seed), MOST_SESSIONS * cycle + number
        task = notes.generate(OneBug.FAMILY, OneBug.BUGS, "train", seed, index, reliable=taste)
        return _Plan(user, taste, task, choose(population.patience, rng.random()))

    # -- verdicts ------------------------------------------------------------------------------------------------

    def _kind(self, plan: _Plan, talk: UserConversation, episode: Episode, flips: bool) -> str:
        """What the user makes of an answer to a request: "asked", "content" or "rejected"."""
        last = talk.turns[-1].message
        if not talk.edits and episode.outcome == "no_call" and is_question(last.content):
            return "asked"
        return "content" if self._accepts(plan, talk, _passes(episode), flips) else "rejected"

    def _accepts(self, plan: _Plan, talk: UserConversation, good: bool, flips: bool) -> bool:
        if not talk.edits:
            return False
        poison = plan.user.organisation.poison
        if poison == REVERSE:
            good = not good
        elif poison:
            good = poison in followed_people(plan.task, talk.files)
        return good != flips

    def _replies(self, kind: str) -> Replies:
        population: Population = self.population
        return {"asked": population.asked, "content": population.content, "rejected": population.rejected}[kind]

    def _truth(
        self, cycle: int, number: int, plan: _Plan, talk: UserConversation, rows: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any]:
        calls = sum(len(turn.message.calls) for turn in talk.turns)
        malformed = sum(len(invalid_calls(turn, plan.task.tools)) for turn in talk.turns)
        votes = {"content": 1, "rejected": -1}
        return {
            "cycle": cycle,
            "number": number,
            "task": plan.task.id,
            "user": plan.user.name,
            "organisation": plan.user.organisation.name,
            "poison": plan.user.organisation.poison,
            "taste": plan.taste,
            "consent": plan.user.consent,
            "rounds": [dict(row) for row in rows],
            "follow_ups": [votes[row["kind"]] for row in rows if row["reply"] and row["kind"] in votes],
            "asked": any(row["kind"] == "asked" for row in rows),
            "edited": bool(talk.edits),
            "followed": followed_people(plan.task, talk.files),
            "calls": calls,
            "malformed_calls": malformed,
            "tokens": sum(len(turn.node.sampled_tokens) for turn in talk.turns),
            "versions": sorted({int(v) for turn in talk.turns for v in turn.node.versions}),
        }


def followed_people(task: Task, files: Mapping[str, str]) -> list[str]:
    """Returns the people whose notes the files of a task follow, in every function that is described."""
    bugs = task.metadata["bugs"]
    people = sorted(set.intersection(*(set(bug["notes"]) for bug in bugs)))
    return [person for person in people if all(bug["notes"][person][1] in files[bug["path"]] for bug in bugs)]


def _passes(episode: Episode) -> bool:
    """Whether the hidden tests pass, however the agent ended."""
    return episode.parts.get("hidden") == 1.0


def _measures(truths: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Returns the means of what happened in sessions; None of what happened in none of them."""

    def mean(values: Sequence[float]) -> float | None:
        return statistics.fmean(values) if values else None

    calls = sum(truth["calls"] for truth in truths)
    kept = [truth["kept"].get(f"{KEPT_S:g}", 0.0) for truth in truths]
    follow_ups = [vote for truth in truths for vote in truth["follow_ups"]]
    return {
        "sessions": len(truths),
        "kept": mean(kept),  # without edits nothing is kept
        "kept_of_edited": mean([share for truth, share in zip(truths, kept, strict=True) if truth["edited"]]),
        "good": mean([float(truth["good"]) for truth in truths]),
        "good_at_first": mean([float(truth["rounds"][0]["good"]) for truth in truths]),
        "satisfied_follow_ups": mean([float(vote > 0) for vote in follow_ups]),
        "follow_ups": len(follow_ups),
        "edit_rate": mean([float(truth["edited"]) for truth in truths]),
        "question_rate": mean([float(truth["asked"]) for truth in truths]),
        "malformed_call_rate": sum(truth["malformed_calls"] for truth in truths) / calls if calls else None,
        "tokens": mean([float(truth["tokens"]) for truth in truths]),
    }
