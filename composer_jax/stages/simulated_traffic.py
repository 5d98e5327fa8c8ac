"""Simulated users work with versions of a run's weights, through the server's own code, on a simulated clock.

    WORKDIR/traffic              what the server writes, as `launch.serve --traffic` does
    WORKDIR/users/0003.jsonl     one line for each session of cycle 3 whose turns are on disk: its truth and reactions
    WORKDIR/users/clock.json     the simulated time, up to which all reactions have been sent
    WORKDIR/metrics/users.jsonl  the truth of each cycle in means

A session is played again only if a killed process left it unfinished; what is on disk of it is forgotten then, and the
user opens another one, which has the same course.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import itertools
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer_jax.atomic_write import write_atomically
from composer_jax.checkpoint.address import PATCHES_PREFIX
from composer_jax.checkpoint.checkpoint import open_checkpoint
from composer_jax.checkpoint.weight_chain import WeightReceiver
from composer_jax.checkpoint.weight_shards import as_tree
from composer_jax.errors import UserError
from composer_jax.event_loop import EventLoop, run_all
from composer_jax.observe.journal import Journal, read_journal
from composer_jax.observe.progress import Progress
from composer_jax.realtime.release.canary import arm_of
from composer_jax.sampler.sampler import Sampler
from composer_jax.seeds import hash_seed
from composer_jax.serve.traffic.consent import TrafficHeaders
from composer_jax.serve.traffic.database import open_database
from composer_jax.serve.traffic.folder import TrafficFolder
from composer_jax.serve.traffic.retention import forget
from composer_jax.stages.run import Run
from composer_jax.stages.traffic_users import SessionTime, TrafficUsers

if TYPE_CHECKING:  # the packages of the server are optional
    from composer_jax.agent.episode_context import EpisodeContext
    from composer_jax.serve.service import Service

BEGIN_S = 1_767_600_000.0
"""Unix seconds at which the first cycle begins: 5 January 2026, 08:00 UTC."""
COLLECT_S = 3 * 3600.0
"""Simulated seconds in which the sessions of a cycle open."""
FLUSH_SECONDS = 0.2
"""Real seconds for which a turn waits for others on its way to the disk."""
POLL_SECONDS = 0.05
CONSENT_TEXT = "These users are simulated; what they write and what became of it may be trained on."
RETENTION_DAYS = 3650


class SimulatedClock:
    """Unix seconds that pass when the simulation says so. A session has a time of its own inside `of`."""

    def __init__(self, now: float) -> None:
        self.now = now
        self._session: ContextVar[SessionTime | None] = ContextVar("session", default=None)

    def __call__(self) -> float:
        time = self._session.get()
        return self.now if time is None else time.now

    @contextlib.contextmanager
    def of(self, time: SessionTime):
        """Context in which this task has the time of a session."""
        token = self._session.set(time)
        try:
            yield
        finally:
            self._session.reset(token)


@dataclasses.dataclass(frozen=True)
class Arms:
    """Which version answers which users."""

    anchor: int
    candidate: int | None = None
    salt: str = ""
    fraction: float = 0.0
    """Of the users that have the candidate."""

    def version(self, arm: str) -> int:
        """Returns the version that an arm serves."""
        return self.candidate if arm == "candidate" and self.candidate is not None else self.anchor

    def arm(self, user: str) -> str:
        """Returns the arm of a user; "" outside canaries."""
        return "" if self.candidate is None else arm_of(self.salt, user, self.fraction)


class SimulatedTraffic:
    """The sessions of simulated users in a run's folder.

    Attributes:
      clock: the simulated time. folder: what the server writes.
    """

    def __init__(self, run: Run, users: TrafficUsers, chain: str) -> None:
        """chain: folder of the versions that are served. The run's services are those that play."""
        self._run, self.users, self._chain = run, users, chain
        self.path, self.folder = run.path / "users", run.path / "traffic"
        self.path.mkdir(exist_ok=True)
        self._clock_file = self.path / "clock.json"
        now = json.loads(self._clock_file.read_bytes())["now"] if self._clock_file.exists() else BEGIN_S
        self.clock = SimulatedClock(now)
        self._receiver = WeightReceiver(chain)
        self._policy = self._write_policy()

    def rows(self, cycle: int) -> dict[int, dict[str, Any]]:
        """Returns number -> {"session", "key", "consent", "closed", "truth", "reactions"} of a cycle's sessions."""
        return {row["number"]: row for row in read_journal(self._journal(cycle))}

    def play(self, cycle: int, numbers: Sequence[int], arms: Arms, *, measured_only: bool = False) -> None:
        """Plays the sessions of a cycle that are not on disk, all of which open within COLLECT_S from now.

        measured_only: nobody consents to more than "evals".

        Raises:
          UserError: the infrastructure lost a session, or the disk does not take one; the same call goes on.
        """
        played = self.rows(cycle)
        missing = [number for number in numbers if number not in played]
        opened = {number: self.users.opening(cycle, number) for number in missing}
        by_arm = {arm: [n for n in missing if arms.arm(opened[n].user) == arm] for arm in ("", "anchor", "candidate")}
        names = self._new_names(cycle, missing)
        with (
            contextlib.closing(Journal(self._journal(cycle), self._run.workdir.require_held)) as journal,
            Progress(len(numbers), "session", f"cycle {cycle}", initial=len(numbers) - len(missing)) as progress,
        ):
            for arm, chosen in by_arm.items():
                if not chosen:
                    continue
                sampler = self._sampler(arms.version(arm))
                with self._run.services.episode_context() as (context, loop):
                    player = _Player(self, cycle, context, journal, progress, measured_only)
                    loop.run(player.play(sampler, arm, {number: names[number] for number in chosen}))

    def pass_until(self, time: float) -> None:
        """Lets the simulated time pass; whatever users do until then reaches the server in the order of its arrival."""
        due: list[tuple[float, str, str, list[dict[str, Any]]]] = []
        for file in sorted(self.path.glob("*.jsonl")):
            for row in read_journal(file):
                if row["consent"] == "none":
                    continue
                chosen = (one for one in row["reactions"] if self.clock.now <= one["arrival"] < time)
                for arrival, group in itertools.groupby(chosen, lambda one: one["arrival"]):
                    due.append((arrival, row["session"], row["key"], list(group)))
        if due:
            with EventLoop() as loop:
                loop.run(self._send(sorted(due, key=lambda one: one[:2])))
        self.clock.now = max(self.clock.now, time)
        write_atomically(self._clock_file, json.dumps({"now": self.clock.now}).encode())

    def closed(self, cycle: int) -> float:
        """Returns when the last session of a cycle so far was closed, by the simulated clock."""
        return max((row["closed"] for row in self.rows(cycle).values()), default=self.clock.now)

    # -- inside --------------------------------------------------------------------------------------------------

    def _journal(self, cycle: int) -> Path:
        return self.path / f"{cycle:04d}.jsonl"

    def _write_policy(self) -> Path:
        """Writes the policy of the traffic folder, whose salt follows from the seed."""
        keys = {name: hashlib.sha256(key.encode()).hexdigest() for name, key in self.users.organisations.items()}
        policy = {
            "consent_text": CONSENT_TEXT,
            "retention_days": RETENTION_DAYS,
            "organisations": {name: {"consent": "training", "keys": [key]} for name, key in keys.items()},
            "salt": hashlib.sha256(f"simulated users {self._run.config.seed}".encode()).hexdigest()[:32],
        }
        path = self.path / "policy.json"
        write_atomically(path, json.dumps(policy, indent=1).encode())
        return path

    def _sampler(self, version: int) -> Sampler:
        services = self._run.services
        self._receiver.receive(version)
        params, router_bias = services.sampler.definition.shapes()
        tree = as_tree(self._receiver.arrays, {"params": params, "router_bias": router_bias})
        return services.sampler_with(tree["params"], tree["router_bias"], version)

    def _new_names(self, cycle: int, numbers: Sequence[int]) -> dict[int, str]:
        """Returns number -> X-Session-ID of sessions that are played; what is left of earlier attempts is forgotten."""
        names = {number: f"{cycle:03d}-{number:05d}" for number in numbers}
        if not (self.folder / "policy.json").exists():
            return names
        with contextlib.closing(open_database(self.folder)) as database:
            stored = {name for (name,) in database.execute("SELECT session FROM sessions")}
            dead = {name for (name,) in database.execute("SELECT name FROM tombstones WHERE kind = 'session'")}
        alive = stored - dead
        for number, name in names.items():
            tries = itertools.chain([name], (f"{name}-{attempt}" for attempt in itertools.count(2)))
            for attempt in tries:
                if attempt in alive:
                    forget(self.folder, session=attempt, clock=self.clock)
                elif attempt not in dead:
                    names[number] = attempt
                    break
        return names

    @contextlib.asynccontextmanager
    async def _service(self, sampler: Sampler, arm: str = "") -> AsyncIterator[Service]:
        """A server of an arm, whose clock is the simulated one."""
        try:
            from composer_jax.serve.service import ServerLimits, Service
            from composer_jax.serve.traffic.events import EventLog, RateLimit
            from composer_jax.serve.traffic.writer import TrafficLimits, TrafficWriter
        except ImportError as error:
            raise UserError(f"{error.name} is missing; pip install 'composer_jax[serve]'.") from error
        text = open_checkpoint(f"{PATCHES_PREFIX}{self._chain}").text
        replays = self._run.config.rl.route_shape(self._run.config.model) is not None
        limits = TrafficLimits(flush_seconds=FLUSH_SECONDS)
        options = {"arm": arm, "keeps_routing": replays, "limits": limits, "clock": self.clock}
        traffic = TrafficWriter(self.folder, str(self._policy), text, **options)
        service = Service(sampler, text.named("simulated"), ServerLimits(), None, traffic)
        service.events = EventLog(traffic, self.clock)
        service.events.limit = RateLimit(self.clock)
        try:
            yield service
        finally:
            await service.close()

    async def _send(self, due: Sequence[tuple[float, str, str, list[dict[str, Any]]]]) -> None:
        """Sends the reactions that arrive together in one request each; those that the server has change nothing."""
        from composer_jax.serve.traffic.events import EventBody

        async with self._service(self._run.services.sampler) as service:
            assert service.events is not None, "the service writes traffic"
            with Progress(len(due), "request", "reactions") as progress:
                for arrival, session, key, group in due:
                    self.clock.now = arrival
                    fields = ("id", "kind", "turn", "payload")
                    events = [
                        EventBody(session=session, age=arrival - one["time"], **{name: one[name] for name in fields})
                        for one in group
                    ]
                    await service.events.add(key, events)
                    progress.update(1)


class _Player:
    """Plays sessions of one cycle with one version."""

    def __init__(
        self,
        traffic: SimulatedTraffic,
        cycle: int,
        context: EpisodeContext,
        journal: Journal,
        progress: Progress,
        measured_only: bool,
    ) -> None:
        self._traffic, self._cycle, self._context = traffic, cycle, context
        self._journal, self._progress, self._measured_only = journal, progress, measured_only
        self._begin = traffic.clock.now
        self._slots = asyncio.Semaphore(traffic._run.config.agent.concurrency)

    async def play(self, sampler: Sampler, arm: str, names: Mapping[int, str]) -> None:
        """Plays sessions: number -> X-Session-ID."""
        async with sampler.serving(), self._traffic._service(sampler, arm) as service:
            await run_all(self._play_one(service, number, name) for number, name in names.items())

    async def _play_one(self, service: Service, number: int, name: str) -> None:
        from composer_jax.serve.service import Client
        from composer_jax.stages.served_session import ServedSession

        users, cycle = self._traffic.users, self._cycle
        opening = users.opening(cycle, number)
        consent = "evals" if self._measured_only and opening.consent == "training" else opening.consent
        # An organisation lets us train on all that its key sends, so those who do not want that have keys of their own.
        key = opening.key if consent == "training" else hashlib.sha256(opening.user.encode()).hexdigest()
        client = Client(key, name, TrafficHeaders(consent, "main", opening.user, opening.repository))
        time = SessionTime(self._begin + opening.place * COLLECT_S)
        seed = hash_seed("simulated session", self._traffic._run.config.seed, cycle, number)
        on_sampled: Callable[[Any], None] = lambda sample: time.answer(users.answer_seconds(sample))  # noqa: E731
        async with self._slots:
            with self._traffic.clock.of(time):
                session = ServedSession(service, client, seed, on_sampled)
                played = await users.play(cycle, number, name, session, self._context, time)
        await self._wait_until_stored(service, key, name, consent)
        row = {
            "number": number,
            "session": name,
            "key": key,
            "consent": consent,
            "closed": max(one.arrival for one in played.reactions if one.kind == "session_closed"),
            "truth": dict(played.truth),
            "reactions": [dataclasses.asdict(reaction) for reaction in played.reactions],
        }
        self._journal.append(row)
        self._progress.update(1)

    async def _wait_until_stored(self, service: Service, key: str, name: str, consent: str) -> None:
        traffic = service.traffic
        assert traffic is not None, "the service writes traffic"
        owned = name, traffic.policy.hash(f"key {key}")
        while traffic.find_queued(owned) is not None:
            await asyncio.sleep(POLL_SECONDS)
        if consent != "none":
            try:
                TrafficFolder(self._traffic.folder).read(name)
            except UserError as error:
                raise UserError(f"session {name} of the simulated users is not stored: {error}") from error
