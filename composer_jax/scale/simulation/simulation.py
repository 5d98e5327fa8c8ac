"""Simulation: an RL run with rl/group_buffer.py and simulated roles, from event to event.

It takes the decisions of rl/orchestrator.py in their order: groups are admitted when a step is committed, episodes wait
for a session of the engine and a sandbox first in, first out, a step learns when the buffer gives a batch, and is
committed when the engines hold its weights. The learner has its own devices. Messages to the engines go through its
process 0, one after another.

An attempt alternates between sandbox and engine `parts` times, however many turns it has: a part of its seconds in the
sandbox passes, then a part of its tokens is sampled at the rate that the engines have from moment to moment
(scale/simulation/engines.py). With episodes enough for all sessions, throughput is that of the real order: in a closed
network of stations that serve everybody at once or share their capacity evenly, it depends on mean demands only
(Baskett, Chandy, Muntz and Palacios, J. ACM 22, 1975). Where steps wait for their last episodes, few parts are too
fast, because these sample when others have ended. tests/scale/simulation/test_against_orchestrator.py measures by how
much.
"""

import contextlib
import dataclasses
import gc
import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from composer_jax.rl.config import RLConfig
from composer_jax.rl.group_buffer import GroupBuffer
from composer_jax.scale.simulation.engines import DecodePool
from composer_jax.scale.simulation.outcome import Outcome, Recorder
from composer_jax.scale.simulation.roles import Roles
from composer_jax.scale.simulation.workload import FINISHED, HUNG, Attempt, Workload

_SANDBOX, _LEARNED, _PUBLISHED, _INSTALLED, _MEASURE, _HOUR, _MESSAGE = range(7)
HOUR_S = 3600.0


class _Group:
    """A group that is admitted and neither shipped nor dropped."""

    __slots__ = ("attempts", "decoding", "graded", "is_dropped", "number", "oldest", "running", "tokens", "unfinished")

    def __init__(self, number: int, attempts: int):
        self.number, self.unfinished = number, attempts
        self.running = self.decoding = self.graded = 0
        self.tokens, self.oldest, self.is_dropped = 0.0, -1, False


@dataclasses.dataclass(slots=True)
class _Episode:
    """An episode with its current attempt."""

    group: _Group
    index: int
    attempt: Attempt
    lost: int = 0
    """Attempts that were lost before."""
    parts: int = 0
    """Parts of the attempt that are left, the current one included."""


class Simulation:
    """One simulated run.

    Attributes:
      buffer: the GroupBuffer, which decides what is admitted, trained and dropped.
      batches: numbers of the groups of each step, if `keeps_batches`.
    """

    def __init__(
        self,
        config: RLConfig,
        roles: Roles,
        workload: Workload,
        *,
        steps: int = 10**9,
        episode_seconds: float = math.inf,
        retries: int = 2,
        parts: int = 1,
        keeps_batches: bool = False,
    ):
        """
        Args:
          config: its groups, group_size, max_staleness and late_groups are used.
          episode_seconds: limit on the sandbox seconds of an attempt (agent.episode_seconds). A hung attempt ends
            then, with a grade and no tokens; another whose tools take longer ends then with its grade and tokens.
          retries: further attempts at an episode after a lost one.
          parts: how often an attempt alternates between sandbox and engine; the time of a simulation is proportional.
        """
        per_step = sum(config.groups.values())
        self.buffer = GroupBuffer(per_step, steps, config.max_staleness, late_groups=config.late_groups)
        self.batches: list[list[int]] = []
        self._roles, self._workload, self._group_size = roles, workload, config.group_size
        self._episode_seconds, self._retries, self._keeps_batches = episode_seconds, retries, keeps_batches
        self._parts, self._pool = parts, DecodePool(roles.rates)
        self._limit = min(roles.sandboxes, roles.sessions)
        self._wait = "sandboxes" if roles.sandboxes < roles.sessions else "engines"
        self._timers: list[tuple[float, int, int, Any]] = []
        self._entries = 0
        self._groups: dict[int, _Group] = {}
        self._queue: deque[_Episode] = deque()
        self._running, self._next_start, self._next_message = 0, 0.0, 0.0
        self._phase, self._batch, self._version, self._served_version = "waiting", [], 0, 0
        self._recorder = Recorder(roles)

    def run(self, seconds: float, *, warm_up_s: float = 0.0, on_hour: Callable[[], None] | None = None) -> Outcome:
        """Simulates `warm_up_s` and then `seconds`, which are measured, or less if all steps are taken.

        Args:
          on_hour: called after each simulated hour.
        """
        self._start_timer(warm_up_s, _MEASURE)
        if on_hour:
            self._start_timer(HOUR_S, _HOUR, on_hour)
        self._admit()
        self._fill()
        with _without_garbage_collection():
            self._run_until(warm_up_s + seconds)
        return self._recorder.outcome(self.buffer, self._version)

    def _run_until(self, until: float) -> None:
        pool, timers = self._pool, self._timers
        while self.buffer.step < self.buffer.steps or self._phase != "waiting":
            timer, end = timers[0][0] if timers else math.inf, pool.next_end()
            at = min(timer, end, until)
            if at == math.inf:
                raise RuntimeError("everything waits and no timer runs: the simulated run hangs")
            self._advance(at)
            if min(timer, end) > until:
                break
            if end <= timer:
                self._end_decoding()
            else:
                _, _, kind, item = heapq.heappop(timers)
                self._handle(kind, item)

    # -- time ----------------------------------------------------------------------------------------------------

    def _start_timer(self, at: float, kind: int, item: Any = None) -> None:
        self._entries += 1
        heapq.heappush(self._timers, (at, self._entries, kind, item))

    def _advance(self, at: float) -> None:
        pool = self._pool
        phase = self._phase
        if phase == "waiting":
            phase = self._wait if self._queue else "episodes"
        self._recorder.pass_time(at - pool.now, phase, self._running)
        pool.advance(at)

    def _handle(self, kind: int, item: Any) -> None:
        if kind == _SANDBOX:
            self._leave_sandbox(item)
        elif kind == _MESSAGE:
            self._begin_decoding(item)
        elif kind == _LEARNED:
            self._ship()
        elif kind == _PUBLISHED:
            self._pool.is_paused = True
            self._start_timer(self._pool.now + self._roles.install_s, _INSTALLED)
        elif kind == _INSTALLED:
            self._pool.is_paused, self._served_version = False, self._version
            self._commit()
        elif kind == _MEASURE:
            self._recorder.start(self._pool)
        else:
            item()
            self._start_timer(self._pool.now + HOUR_S, _HOUR, item)

    # -- episodes ------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Admits the groups that may play now; their episodes wait for a session and a sandbox."""
        while self.buffer.can_admit:
            number = self.buffer.admit()
            group = self._groups[number] = _Group(number, self._group_size)
            attempts = self._workload.attempts(number)
            self._queue.extend(_Episode(group, i, attempt) for i, attempt in enumerate(attempts))

    def _fill(self) -> None:
        """Starts attempts while sessions and sandboxes are free."""
        queue, now, roles = self._queue, self._pool.now, self._roles
        while queue and self._running < self._limit:
            episode = queue.popleft()
            group = episode.group
            if group.is_dropped:
                continue
            if group.oldest < 0:
                group.oldest = self._served_version
            self._running += 1
            group.running += 1
            episode.parts = self._parts
            if episode.attempt.fate == HUNG:
                self._start_timer(now + self._episode_seconds, _SANDBOX, episode)
                continue
            self._next_start = max(now, self._next_start + 1 / roles.sandbox_starts_per_s)
            ready = self._next_start + roles.sandbox_start_s
            self._start_timer(ready + self._tool_s(episode), _SANDBOX, episode)

    def _leave_sandbox(self, episode: _Episode) -> None:
        if episode.group.is_dropped:
            return
        if episode.attempt.fate == HUNG:
            self._end_attempt(episode)
        elif seconds := self._roles.message_s_per_token * episode.attempt.sampled / self._parts:
            self._next_message = max(self._pool.now, self._next_message) + seconds
            self._recorder.count_messages(seconds)
            self._start_timer(self._next_message, _MESSAGE, episode)
        else:
            self._begin_decoding(episode)

    def _begin_decoding(self, episode: _Episode) -> None:
        if not episode.group.is_dropped:
            episode.group.decoding += 1
            self._pool.add(episode.attempt.sampled / self._parts, episode)

    def _end_decoding(self) -> None:
        episode = self._pool.pop()
        if not episode.group.is_dropped:
            self._pool.end()
            episode.group.decoding -= 1
            episode.parts -= 1
            if episode.parts:
                self._start_timer(self._pool.now + self._tool_s(episode), _SANDBOX, episode)
            else:
                self._end_attempt(episode)

    def _tool_s(self, episode: _Episode) -> float:
        """Returns the seconds of a part in the sandbox."""
        return min(episode.attempt.tool_s, self._episode_seconds) / self._parts

    def _end_attempt(self, episode: _Episode) -> None:
        group, attempt = episode.group, episode.attempt
        self._running -= 1
        group.running -= 1
        is_lost = attempt.fate not in (FINISHED, HUNG)
        if is_lost and episode.lost < self._retries:
            episode.lost += 1
            episode.attempt = self._workload.retry(group.number, episode.index, episode.lost)
            self._queue.append(episode)
        else:
            group.unfinished -= 1
            if not is_lost:
                group.graded += 1
                group.tokens += attempt.row_tokens if attempt.fate == FINISHED else 0
        self._recorder.count_attempt(is_lost)
        self._fill()
        if not group.unfinished:
            self.buffer.resolve(group.number)
            self._try_to_learn()

    # -- steps ---------------------------------------------------------------------------------------------------

    def _try_to_learn(self) -> None:
        """Begins the next step if the learner waits and the buffer has a batch."""
        if self._phase != "waiting":
            return
        numbers = self.buffer.next_batch()
        if numbers is None:
            return
        self._phase, self._batch = "learning", numbers
        groups = [self._groups[number] for number in numbers]
        self._tokens = sum(
            group.tokens for group in groups if group.graded >= 2 and self._workload.is_trained(group.number)
        )
        self._staleness = [self._version - group.oldest for group in groups]
        seconds = self._roles.learn_s + self._roles.learn_s_per_token * self._tokens
        self._start_timer(self._pool.now + seconds, _LEARNED)

    def _ship(self) -> None:
        """Ends an optimizer step; a step without tokens leaves the weights unchanged, so nothing is published."""
        dropped = self.buffer.pop_batch(self._batch)
        for number in self._batch:
            del self._groups[number]
        for number in dropped:
            group = self._groups.pop(number)
            group.is_dropped = True
            self._running -= group.running
            self._pool.withdraw(group.decoding)
        self._fill()
        self._recorder.count_step(self._staleness, len(self._batch), len(dropped), self._tokens)
        if self._keeps_batches:
            self.batches.append(self._batch)
        if self._tokens:
            self._version += 1
            self._phase = "publishing"
            self._start_timer(self._pool.now + self._roles.publish_s, _PUBLISHED)
        else:
            self._commit()

    def _commit(self) -> None:
        """Completes a step: new groups are admitted, and the next step learns if it can."""
        self._phase = "waiting"
        self._recorder.commit(self._pool.now)
        self._admit()
        self._fill()
        self._try_to_learn()


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Millions of episodes, none in a reference cycle, would be searched for cycles, which doubles the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
