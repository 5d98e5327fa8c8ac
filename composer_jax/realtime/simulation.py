"""Scripted users without a network: traffic whose truth is known, for tests and benchmarks of labels and statistics.

A user asks for a change. The answer passes hidden tests with the policy's rate, which differs between users. The user
finds out with 10 % noise. One who is not content reverts the edits after an exponential delay and often says so; one
who is content keeps them, apart from ordinary churn. Users differ in patience and leave when an answer takes longer.
All draws of a cycle are arrays; the records of one session are made when they are read.
"""

import copy
import dataclasses
import functools
import hashlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from composer_jax.errors import UserError
from composer_jax.serve.traffic.records import Event, EventKind, SampledTurn, SessionRecord, SessionTraffic, turn_id

REQUESTS = (
    "Fix the failing test of the parser",
    "Add a limit to the number of retries",
    "Rename the option and update its callers",
    "Change the cache so that old entries are removed",
)
REJECTED = ("That is wrong, the tests still fail", "It doesn't work", "please revert this, it broke the build")
CONTENT = ("Thanks! Next, the documentation of the module", "Great, now look at the other open task")
QUESTION = "Which of the two modules do you mean?"
PLAIN_ANSWER = "yes, go ahead"
DONE = "Done, the change is in place."
CALL = "\x00"
"""Stands for a tool call in the text of an answer."""
AGES_S = (600.0, 3600.0, 86_400.0)
"""Ages at which the simulated client measures edits."""


@dataclasses.dataclass(frozen=True)
class SimulatedPolicy:
    """What the agent does: rates from 0 to 1."""

    version: int = 1
    pass_rate: float = 0.6
    """Mean over users of the chance that an answer passes the hidden tests."""
    question_rate: float = 0.05
    """How often it asks in place of editing."""
    invalid_rate: float = 0.03
    """Of its calls."""
    seconds: float = 40.0
    """Mean time of an answer."""

    def __post_init__(self) -> None:
        for name in ("pass_rate", "question_rate", "invalid_rate"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"{name}={getattr(self, name)} is not a rate; use a number from 0 to 1.")


@dataclasses.dataclass(frozen=True)
class SimulatedWorld:
    """What users are like and what happens to their files. Seconds and shares are ours."""

    users: int = 200
    sessions: int = 1000
    """Of one cycle, spread over the users at random: some have many."""
    cycle_s: float = 4 * 3600.0
    """Sessions begin at random in so many seconds."""
    concentration: float = 8.0
    """Of the Beta distribution of the users' pass rates: higher is more alike."""
    noise: float = 0.1
    """How often a user takes a good answer for a bad one, or the reverse."""
    revert_s: float = 2400.0
    """Mean delay of a revert."""
    churn_s: float = 40 * 3600.0
    """Mean life of a line that nobody rejects, the agent's or others'."""
    says_so: float = 0.6
    """How often a user's next message shows what the user found."""
    reply_s: float = 20.0
    """From the answer to that message."""
    patience_s: float = 300.0
    """Mean time after which a user leaves an answer."""
    censored: float = 0.1
    """Share of measurements that never arrive, whatever they would have shown."""
    late: float = 0.03
    """Share of measurements that arrive after the grace."""
    delay_s: float = 30.0
    """Longest time that any other measurement takes to arrive."""
    reverted_delay_s: float = 30.0
    """The same where the user has reverted the edits: another value makes delays depend on the outcome."""
    repeated: float = 0.05
    """Share of events that are sent twice."""


class SimulatedCycle:
    """The traffic of one cycle and its truth. Has the members of a folder of traffic (`sessions`, `read`)."""

    now = math.inf
    """Unix seconds: what happens or arrives later cannot be read yet."""

    def __init__(self, world: SimulatedWorld, policy: SimulatedPolicy, seed: int) -> None:
        self.world, self.policy, self.seed = world, policy, seed
        rng, n = np.random.default_rng(seed), world.sessions
        activity = rng.gamma(0.7, size=world.users)
        self.user = rng.choice(world.users, n, p=activity / activity.sum())
        rate = np.clip(policy.pass_rate, 1e-6, 1 - 1e-6)
        rates = rng.beta(rate * world.concentration, (1 - rate) * world.concentration, world.users)
        self.passes = rng.random(n) < rates[self.user]
        self.content = self.passes ^ (rng.random(n) < world.noise)
        self.asks = rng.random(n) < policy.question_rate
        self.opened = 1e9 + rng.uniform(0, world.cycle_s, n)
        self.seconds = rng.gamma(4.0, policy.seconds / 4, n)
        self.leaves = self.seconds > rng.exponential(world.patience_s, n)
        self.revert_after = np.where(self.content, np.inf, rng.exponential(world.revert_s, n))
        self.lines = np.where(self.asks, 0, 1 + rng.geometric(0.05, n))
        self.other_lines = rng.integers(20, 200, n)
        self.calls = rng.integers(1, 8, n)
        self.invalid = rng.binomial(self.calls, policy.invalid_rate)
        self.speaks = ~self.leaves & (rng.random(n) < world.says_so)
        self.fate = rng.random((n, len(AGES_S), 3))
        self.text = rng.integers(0, 1 << 16, (n, 2))
        # Lines die one by one: what is kept at an age is kept at every earlier one.
        survival = np.exp(-np.array(AGES_S) / world.churn_s)
        steps = survival / np.concatenate([[1.0], survival[:-1]])
        self.survivors, self.other_survivors = (self._thin(rng, size, steps) for size in (self.lines, self.other_lines))

    @staticmethod
    def _thin(rng: np.random.Generator, size: np.ndarray, steps: np.ndarray) -> np.ndarray:
        """Returns how many lines of each session live at each age, [sessions, ages]."""
        alive = [size]
        for step in steps:
            alive.append(rng.binomial(alive[-1], step))
        return np.stack(alive[1:], axis=1)

    def at(self, now: float) -> "SimulatedCycle":
        """Returns the same cycle as it can be read at a moment."""
        cycle = copy.copy(self)
        cycle.now = now
        return cycle

    def sessions(self) -> list[SessionRecord]:
        return [self._record(i) for i in range(self.world.sessions) if self.opened[i] <= self.now]

    def read(self, session: str) -> SessionTraffic:
        traffic = self.traffic(int(session.rsplit("-", 1)[1]))
        turns = [turn for turn in traffic.turns if turn.time <= self.now]
        events = [event for event in traffic.events if event.arrival <= self.now]
        return SessionTraffic(traffic.record, turns, events)

    def is_forgotten(self, session: str) -> bool:
        return False

    def keep_at(self, horizon: float) -> np.ndarray:
        """Returns the true share of kept lines of every session at an age of AGES_S; NaN without edits."""
        reverted = self.revert_after <= horizon
        with np.errstate(invalid="ignore"):
            share = self.survivors[:, AGES_S.index(horizon)] / self.lines
        return np.where(self.lines == 0, np.nan, np.where(reverted, 0.0, share))

    def expected_keep(self, horizon: float) -> float:
        """Returns the expectation of `keep_at`, in closed form, without any draw."""
        world, rate = self.world, self.policy.pass_rate
        discontent = rate * world.noise + (1 - rate) * (1 - world.noise)
        reverted = discontent * -math.expm1(-horizon / world.revert_s)
        return (1 - reverted) * math.exp(-horizon / world.churn_s)

    @functools.cached_property
    def ended(self) -> np.ndarray:
        """When the last edit of each session was made, Unix seconds."""
        return self.opened + self.seconds

    @property
    def all_aged(self) -> float:
        """Unix seconds at which every session is older than a day and the grace."""
        return float(self.opened.max() + self.seconds.max() + AGES_S[-1] + 3 * 3600)

    def _record(self, i: int) -> SessionRecord:
        user = hashlib.sha256(f"user {self.user[i]}".encode()).hexdigest()[:16]
        return SessionRecord(f"s{self.seed}-{i}", user, user, f"repository {self.user[i]}", "", float(self.opened[i]))

    def traffic(self, i: int) -> SessionTraffic:
        """Returns the records of session i: its request, the answer, perhaps a follow-up, and events."""
        record, request = self._record(i), REQUESTS[self.text[i, 0] % len(REQUESTS)]
        said = QUESTION if self.asks[i] else DONE
        first = self._turn(i, 0, "", request, CALL * int(self.calls[i]) + said, float(self.ended[i]))
        turns, events = [first], self._events(i, record.session, first.answer)
        if self.speaks[i]:
            # A follow-up has a short answer without edits, right after the first one.
            reply = self._reply(i)
            sent = float(self.ended[i]) + self.world.reply_s
            events.append(self._event(i, "follow_up", first.answer, sent, {}))
            turns.append(self._turn(i, 1, first.id, reply, "All right.", sent + 5.0))
        repeats = [event for event in events if _hash_share(event.id) < self.world.repeated]
        return SessionTraffic(record, turns, sorted(events + repeats, key=lambda event: event.time))

    def _reply(self, i: int) -> str:
        if self.asks[i]:
            return PLAIN_ANSWER
        texts = CONTENT if self.content[i] else REJECTED
        return texts[self.text[i, 1] % len(texts)]

    def _turn(self, i: int, number: int, parent: str, user: str, answer: str, time: float) -> SampledTurn:
        suffix, tokens = encode_text(f"\x02{user}\x03"), encode_text(answer)
        name = f"answer-{self.seed}-{i}-{number}"
        count = len(tokens)
        return SampledTurn(
            id=turn_id(f"s{self.seed}-{i}", parent, suffix, 0, name),
            session=f"s{self.seed}-{i}",
            answer=name,
            choice=0,
            parent=parent,
            suffix=suffix,
            tokens=tokens,
            logprobs=[-0.5] * count,
            raw_logprobs=[-0.5] * count,
            versions=[self.policy.version] * count,
            finish_reason="stop",
            kind="main",
            consent="training",
            sampling={"temperature": 1.0},
            template="simulated",
            tools="",
            time=time,
            seconds=float(self.seconds[i]) if number == 0 else 2.0,
            cached=0,
            has_secret=False,
        )

    def _events(self, i: int, session: str, answer: str) -> list[Event]:
        """Returns what the user and the client report of the first answer."""
        end = float(self.ended[i])
        hunk = hashlib.sha256(session.encode()).hexdigest()[:16]
        events = [
            self._event(i, "tool_error", answer, end - 1.0, {"error": "invalid_arguments"}, str(number))
            for number in range(int(self.invalid[i]))
        ]
        if self.lines[i]:
            verdict: EventKind = "accepted" if self.content[i] else "rejected"
            events.append(self._event(i, "shown", answer, end, {"hunks": [hunk]}))
            events.append(self._event(i, verdict, answer, end + 5.0, {"hunks": [hunk]}))
            for phase, code in (("before", 1), ("after", int(not self.passes[i]))):
                run = {"exit_code": code, "phase": phase}
                events.append(self._event(i, "tests_run", answer, end + 10.0, run, phase))
        if self.leaves[i]:
            events.append(self._event(i, "stop_pressed", answer, end, {}))
        if self.lines[i] and math.isfinite(self.revert_after[i]):
            events.append(self._event(i, "undo", answer, end + float(self.revert_after[i]), {"hunks": [hunk]}))
        measured = (self._measurement(i, answer, number, age) for number, age in enumerate(AGES_S))
        events += [event for event in measured if event is not None]
        closed = self._event(i, "session_closed", "", end + 60.0, {"reason": "user" if self.leaves[i] else "timeout"})
        return [*events, closed]

    def _measurement(self, i: int, answer: str, number: int, age: float) -> Event | None:
        """Returns what the client measured at an age; None where it could not."""
        lost, late, delay = self.fate[i, number]
        if lost < self.world.censored:
            return None
        lines, kept = int(self.lines[i]), int(self.survivors[i, number])
        others, others_kept = int(self.other_lines[i]), int(self.other_survivors[i, number])
        payload = {
            "horizon": age,
            "added": lines,
            "added_kept": 0 if self.revert_after[i] <= age else kept,
            "deleted": 0,
            "deleted_kept": 0,
            "censored": 0,
            "others": others,
            "others_kept": others_kept,
        }
        time = float(self.ended[i]) + age + 1.0
        longest = self.world.reverted_delay_s if self.revert_after[i] <= age else self.world.delay_s
        arrival = time + (2 * 3600.0 if late < self.world.late else longest * float(delay))
        return dataclasses.replace(self._event(i, "edited_after", answer, time, payload, str(age)), arrival=arrival)

    def _event(
        self, i: int, kind: EventKind, answer: str, time: float, payload: dict[str, Any], key: str = ""
    ) -> Event:
        name = f"event-{self.seed}-{i}-{kind}-{key}"
        return Event(name, f"s{self.seed}-{i}", kind, answer, time, time, payload)


class SimulatedText:
    """Reads the ids of simulated turns, which are the bytes of their text."""

    version = "simulated"

    def answer(self, tokens: Sequence[int]) -> tuple[str, int]:
        text = bytes(tokens).decode()
        return text.replace(CALL, ""), text.count(CALL)

    def user(self, suffix: Sequence[int]) -> str | None:
        text = bytes(suffix).decode()
        return text.split("\x02", 1)[1].split("\x03", 1)[0] if "\x02" in text else None


def encode_text(text: str) -> list[int]:
    """Returns the bytes of a text as token ids."""
    return list(text.encode())


def _hash_share(name: str) -> float:
    """Returns a number from 0 to 1 that follows from a name."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big") / (1 << 48)
