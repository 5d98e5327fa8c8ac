"""TrafficWriter: turns of users who consent, from the server's memory into a traffic folder, in one thread.

The server puts a turn on a queue and goes on. The thread takes what is there once a second, finds each turn's parent,
looks for secrets, and writes one frame per day, and then one transaction that names it. Where the queue is full, or the
disk fails, the whole session is dropped: it gets a tombstone, and nothing more of it is written.
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import sqlite3
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import logging

from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.data.chat.text_processor import TextProcessor
from composer_jax.errors import UserError
from composer_jax.sampler.policy import Sample
from composer_jax.serve.token_details import routed_experts
from composer_jax.serve.traffic import policy, retention, turn_files
from composer_jax.serve.traffic.consent import TrafficHeaders
from composer_jax.serve.traffic.conversation_tree import ConversationTree, TreeNode
from composer_jax.serve.traffic.database import BUSY_SECONDS, open_database
from composer_jax.serve.traffic.finished_turn import FinishedTurn, OwnedSession, TurnRequest
from composer_jax.serve.traffic.policy import claim_policy, text_fingerprint
from composer_jax.serve.traffic.records import SampledTurn, SessionRecord, turn_id
from composer_jax.serve.traffic.redaction import has_secret_ids
from composer_jax.serve.traffic.session_rows import open_session, owners_of
from composer_jax.storage.workdir import lock_folder

DAY_SECONDS = 86_400
RETRY_SECONDS = 60.0
"""After an error the thread waits so long before it deletes again what is to be deleted."""
SEAM = 64
"""Ids before a turn's suffix that are searched for secrets with it."""
MOST_CAUSES = 100
PAUSE_TURNS, PAUSE_SECONDS = 4, 0.001
"""After so many turns the thread leaves the interpreter to others, so that a batch does not hold up streams."""
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "max_tokens")
CLOSE_SECONDS = 30.0
"""The server waits so long at its end for what is queued."""


@dataclasses.dataclass(frozen=True)
class TrafficLimits:
    """What the writer holds in memory."""

    queue_turns: int = 1024
    queue_bytes: int = 256 << 20
    """Of turns that wait; a session whose turn does not fit is dropped."""
    batch_turns: int = 64
    batch_ids: int = 1 << 16
    """Turns that are written at once: so many, or as many as have so many ids."""
    flush_seconds: float = 1.0
    """A turn waits so long for others."""
    busy_seconds: float = BUSY_SECONDS
    """The thread waits so long for the database."""
    open_sessions: int = 4096
    open_nodes: int = 1 << 18
    """Sessions, and turns of sessions, whose ends are in memory; others are read from the database again."""
    dropped_sessions: int = 1 << 16
    """Sessions to be dropped that a failing disk has not taken; with more, the server stops writing for good."""


@dataclasses.dataclass
class TrafficCounts:
    """What has become of turns and sessions since the server started."""

    written_turns: int = 0
    dropped_sessions: int = 0
    refused_turns: int = 0
    """Turns that were offered and not written: their session was dropped or forgotten, or another key began it."""
    refused_events: int = 0
    """Events that the database did not take (status 503)."""


class TrafficWriter:
    """The one writer of a traffic folder. `open_request` and `offer` never wait for the disk.

    Attributes:
      counts: see TrafficCounts.
      keeps_routing: whether the experts of every token are written, which requests then have to ask for.
      policy: see TrafficPolicy.
    """

    def __init__(
        self,
        folder: Path | str,
        policy_file: str,
        text: TextProcessor,
        *,
        arm: str = "",
        keeps_routing: bool = False,
        limits: TrafficLimits | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Opens the folder, repairs what a killed server left, and starts the thread.

        policy_file: see claim_policy. arm: of a canary, which this server serves. clock: Unix seconds; one of
        your own also tells how long an answer took.

        Raises UserError for a folder of another model or schema, without a consent text, with links that lead outside,
        or that another server writes into.
        """
        self.folder, self.limits, self.keeps_routing = Path(folder).absolute(), limits or TrafficLimits(), keeps_routing
        self.counts, self._text, self._arm, self._clock = TrafficCounts(), text, arm, clock
        self._is_real_time = clock is time.time  # which may be set; what an answer took is measured by another clock
        fingerprint = text_fingerprint(text)
        self._lock = _claim_folder(self.folder)
        try:
            self.policy = claim_policy(self.folder, policy_file, fingerprint)
            with contextlib.closing(open_database(self.folder)) as database:
                retention.recover(self.folder, database, clock())
                self._expired = clock()
                retention.expire(self.folder, database, self.policy, self._expired)
                retention.overwrite_log(database)
                with database:
                    self.run = int(database.execute("INSERT INTO runs (closed) VALUES (0)").lastrowid or 0)
        except (sqlite3.Error, OSError) as error:
            os.close(self._lock)
            raise UserError(f"{self.folder} cannot be written ({error}); choose another --traffic.") from error
        except BaseException:
            os.close(self._lock)
            raise
        self._condition = threading.Condition()
        self._queue: deque[FinishedTurn] = deque()
        self._batch: list[FinishedTurn] = []
        self._queued_bytes = 0
        self._last_times: OrderedDict[OwnedSession, float] = OrderedDict()
        self._offered: OrderedDict[OwnedSession, ConversationTree] = OrderedDict()
        """The turns of sessions that were offered with their routes, oldest first."""
        self._dropping: set[OwnedSession] = set()
        self._unconsented: set[OwnedSession] = set()
        self._requests: weakref.WeakSet[TurnRequest] = weakref.WeakSet()  # being answered, or waiting for the disk
        self._closing = self._stopped = self._has_more = self._has_ended = False
        self._logged: set[str] = set()
        self._open: OrderedDict[str, _OpenSession] = OrderedDict()
        self._ends: dict[str, tuple[str, int]] = {}
        self._uncommitted: set[str] = set()  # files with a frame that no row may name
        self._overwrite_after = math.inf  # seconds of time.monotonic
        self.thread_seconds = 0.0
        """Processor time of the thread."""
        self._thread = threading.Thread(target=self._work, name="traffic", daemon=True)
        self._thread.start()

    @property
    def queue_length(self) -> int:
        """Turns that wait, or are being written."""
        return len(self._queue) + len(self._batch)

    def open_request(
        self, key: str, session: str, headers: TrafficHeaders, answer: str, tools: Sequence[Mapping[str, Any]]
    ) -> TurnRequest | None:
        """Returns what is known of a request at its beginning; None if it is not to be written.

        The consent of the key's organisation comes before that of the headers. While the returned object lives, its
        turns may still be offered, so a request of the same session without consent drops the session.

        answer: its id in OpenAI's API. tools: those that it declares.
        """
        organisation = self.policy.organisation(key)
        consent = self.policy.organisations[organisation].consent if organisation else headers.consent
        if not session or self._stopped or not self.policy.is_sampled(session):
            return None
        hashed = self.policy.hash
        owner = hashed(f"key {key}")
        if consent == "none":
            self._drop_if_stored((session, owner))
            return None
        record = SessionRecord(
            session,
            owner,
            hashed(f"user {headers.user}") if headers.user else owner,
            hashed(f"repository {headers.repository}") if headers.repository else "",
            organisation,
            self._clock(),
            self._arm,
            self.policy.text_hash,
        )
        declared = hashlib.sha256(json.dumps(tools, sort_keys=True).encode()).hexdigest()[:16] if tools else ""
        started = time.perf_counter() if self._is_real_time else record.opened
        request = TurnRequest(record, consent, headers.kind, answer, declared, started)
        with self._condition:
            self._requests.add(request)
        return request

    def routes_from(self, request: TurnRequest, prompt: Sequence[int]) -> int:
        """Returns the first token of a prompt whose experts no earlier turn of its session has brought."""
        tree = self._offered.get(request.owned_session)
        return 0 if tree is None else max(0, tree.find_parent(prompt, ())[0].tokens - 1)

    def offer(
        self,
        request: TurnRequest,
        choice: int,
        prompt: Sequence[int],
        sample: Sample,
        params: SamplingParams,
        seed: int,
    ) -> None:
        """Queues an answer that has ended, or drops its session. params, seed: how it was sampled."""
        now, session = time.perf_counter(), request.owned_session
        with self._condition:
            if self._stopped or session in self._dropping:
                self.counts.refused_turns += 1
                return
            if self._closing:
                self.counts.refused_turns += 1
                self._drop({session})
                self._log("an answer ended after the server")
                if self._has_ended:
                    self._drop_late()
                return
            end = self._end_of(session)
            seconds = max(0.0, (now if self._is_real_time else end) - request.started)
            turn = FinishedTurn(request, choice, prompt, sample, params, seed, end, seconds)
            self._queue.append(turn)
            self._queued_bytes += turn.nbytes
            if self.keeps_routing:
                self._note_routes(session, prompt, sample.tokens)
            limits = self.limits
            if self.queue_length > limits.queue_turns or self._queued_bytes > limits.queue_bytes:
                self._drop({session})
                self._log("the queue is full")
            if len(self._queue) >= limits.batch_turns:
                self._condition.notify()

    def _note_routes(self, session: OwnedSession, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Notes the end of a turn. One that nobody writes drops its session, and with it those that follow."""
        tree = self._offered.setdefault(session, ConversationTree())
        self._offered.move_to_end(session)
        tree.add(TreeNode(tokens=len(prompt) + len(answer), hash=tree.find_parent(prompt, answer)[1]))
        if len(self._offered) > self.limits.open_sessions:
            self._offered.popitem(last=False)

    def find_queued(self, session: OwnedSession) -> SessionRecord | None:
        """Returns the record of a session of which a turn waits to be written, or None."""
        with self._condition:
            requests = (turn.request for turns in (self._batch, self._queue) for turn in turns)
            return next((request.record for request in requests if request.owned_session == session), None)

    def close(self) -> None:
        """Writes what is queued and releases the folder; gives up after CLOSE_SECONDS."""
        with self._condition:
            self._closing = True
            self._condition.notify()
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            logging.warning("traffic: %d turns in %s were not written in time.", self.queue_length, self.folder)
        elif self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _end_of(self, session: OwnedSession) -> float:
        """When a turn of a session ends, now: clocks may go backwards, sessions do not."""
        ended = max(self._last_times.pop(session, 0.0), self._clock())
        self._last_times[session] = ended
        if len(self._last_times) > self.limits.open_sessions:
            self._last_times.popitem(last=False)
        return ended

    def _drop_if_stored(self, session: OwnedSession) -> None:
        """Drops a session of which a request comes without consent, which would be a hole in it."""
        with self._condition:
            if any(request.owned_session == session for request in self._requests):
                self._drop({session})
            else:
                self._unconsented.add(session)  # the thread looks whether the session is stored
                self._stop_if_full()

    def _drop_late(self) -> None:
        """Writes the tombstones of dropped sessions after the thread's end; the caller holds the condition."""
        try:
            with contextlib.closing(open_database(self.folder, busy_seconds=self.limits.busy_seconds)) as database:
                self._write_tombstones(database)
        except sqlite3.Error as error:
            self._log(str(error))

    def _drop(self, sessions: set[OwnedSession]) -> None:
        """Drops sessions, unless another key owns them; the caller holds the condition."""
        new = sessions - self._dropping
        self._dropping |= new
        self.counts.dropped_sessions += len(new)
        left = deque(turn for turn in self._queue if turn.request.owned_session not in new)
        self.counts.refused_turns += len(self._queue) - len(left)
        self._queued_bytes -= sum(turn.nbytes for turn in self._queue) - sum(turn.nbytes for turn in left)
        self._queue = left
        self._stop_if_full()

    def _stop_if_full(self) -> None:
        if max(len(self._dropping), len(self._unconsented)) > self.limits.dropped_sessions:
            self._stopped = True
            self._log("too many sessions were dropped that the disk has not noted; nothing is written any more")

    def _log(self, cause: str) -> None:
        if cause not in self._logged and len(self._logged) < MOST_CAUSES:
            self._logged.add(cause)
            logging.error("traffic: %s; sessions are dropped (said once, /metrics counts them).", cause)

    # -- the thread ----------------------------------------------------------------------------------------------

    def _work(self) -> None:
        database, tidy_after = None, 0.0
        while True:
            is_last = self._take()
            started = time.thread_time()
            try:
                database = database or open_database(self.folder, busy_seconds=self.limits.busy_seconds)
                self._drop_unconsented(database)
                self._write(database)
            except Exception as error:  # whatever it is, the thread goes on with other sessions
                self._forget_state(error)
                with self._condition:
                    self._drop({turn.request.owned_session for turn in self._batch})
                    self.counts.refused_turns += len(self._batch)
            with self._condition:
                self._queued_bytes -= sum(turn.nbytes for turn in self._batch)
                self._batch = []
            try:
                if database is not None and (is_last or time.monotonic() >= tidy_after):
                    self._tidy(database, is_last)
            except Exception as error:
                self._forget_state(error)
                tidy_after = time.monotonic() + RETRY_SECONDS
            self.thread_seconds += time.thread_time() - started
            if is_last:
                break
        if database is not None:
            database.close()

    def _take(self) -> bool:
        """Waits a second, or for a full batch; takes the batch, and returns whether it is the last one."""
        limits = self.limits
        with self._condition:
            self._condition.wait_for(
                lambda: self._closing or len(self._queue) >= limits.batch_turns,
                0.0 if self._has_more else limits.flush_seconds,
            )
            ids = 0
            while self._queue and len(self._batch) < limits.batch_turns and ids < limits.batch_ids:
                self._batch.append(self._queue.popleft())
                ids += len(self._batch[-1].prompt) + len(self._batch[-1].sample.tokens)
            self._has_more = bool(self._queue)
            self._has_ended = self._closing and not self._queue
            return self._has_ended

    def _forget_state(self, error: Exception) -> None:
        """After an error the thread knows no more than the disk."""
        self._open.clear()
        self._ends.clear()
        self._overwrite_after = 0.0
        self._log(str(error))

    def _drop_unconsented(self, database: sqlite3.Connection) -> None:
        """Drops the sessions among those without consent that are stored."""
        with self._condition:
            unconsented = [*self._unconsented]
        query = "SELECT session, owner FROM sessions WHERE session = ? AND owner = ?"
        stored = {row for session in unconsented for row in database.execute(query, session)}
        with self._condition:
            self._unconsented.difference_update(unconsented)
            self._drop(stored)

    def _write(self, database: sqlite3.Connection) -> None:
        """Writes the batch: one transaction for its sessions; frames, one for each day, and one that names them."""
        if not self._batch:
            return
        with database:
            database.execute("BEGIN IMMEDIATE")
            sessions = [(self._find_session(database, turn), turn) for turn in self._batch]
        turns = [(opened, turn) for opened, turn in sessions if opened is not None]
        owners = dict(turn.request.owned_session for _, turn in turns)
        days, count = self._rows(turns), 0
        with database:
            database.execute("BEGIN IMMEDIATE")  # from here on nobody can forget a user whom the thread does not see
            query = "SELECT 1 FROM tombstones WHERE kind = 'session' AND name = ?"
            for day, rows in days.items():
                live = {row.session for row, _ in rows if (row.session, owners[row.session]) not in self._dropping}
                live = {session for session in live if database.execute(query, (session,)).fetchone() is None}
                if live_rows := [(row, node) for row, node in rows if row.session in live]:
                    self._write_frame(database, day, live_rows)
                    count += len(live_rows)
        self._uncommitted.clear()
        with self._condition:
            self.counts.written_turns += count
            self.counts.refused_turns += len(self._batch) - count
        nodes = sum(one.tree.size for one in self._open.values())
        while len(self._open) > self.limits.open_sessions or nodes > self.limits.open_nodes:
            nodes -= self._open.popitem(last=False)[1].tree.size

    def _rows(self, turns: Sequence[tuple["_OpenSession", FinishedTurn]]) -> dict[str, list["_Row"]]:
        """Day -> turns as they are written. Searches for secrets, which takes long, so that nothing may be locked."""
        rows: dict[str, list[_Row]] = {}
        for i, (opened, turn) in enumerate(turns, 1):
            if turn.request.owned_session in self._dropping:
                continue
            try:
                rows.setdefault(opened.day, []).append(self._row(opened, turn))
            except Exception as error:  # such as of a tokenizer: other sessions are written
                self._log(f"a turn cannot be written ({error!r})")
                with self._condition:
                    self._drop({turn.request.owned_session})
            if i % PAUSE_TURNS == 0:
                time.sleep(PAUSE_SECONDS)
        return rows

    def _write_frame(self, database: sqlite3.Connection, day: str, turns: Sequence["_Row"]) -> None:
        """Appends a frame of turns to the files of a day, and their places to the caller's transaction."""
        frame = turn_files.pack(row for row, _ in turns)
        name, at = self._ends.get(day) or self._find_end(database, day)
        self._uncommitted.add(name)
        turn_files.append(self.folder, name, frame, at)
        self._ends[day] = (name, at + len(frame))
        if at + len(frame) >= turn_files.MOST_FILE_BYTES:
            del self._ends[day]
        places = [
            (row.id, row.session, name, at, len(frame), node.tokens, node.hash, row.has_secret) for row, node in turns
        ]
        database.executemany("INSERT INTO turns VALUES (?, ?, ?, ?, ?, ?, ?, ?)", places)

    def _find_end(self, database: sqlite3.Connection, day: str) -> tuple[str, int]:
        """The file of a day that gets the next frame, and where."""
        name = retention.newest_file(self.folder, day)
        end = None if name is None else retention.end_of_file(database, name)
        if name is None or end is None or end >= turn_files.MOST_FILE_BYTES:
            return retention.next_file(self.folder, day), 0
        return name, end

    def _find_session(self, database: sqlite3.Connection, turn: FinishedTurn) -> "_OpenSession | None":
        """The session of a turn; None if it has a tombstone, or belongs to another key or user."""
        record = turn.request.record
        opened = self._open.get(turn.session)
        if opened is None and (row := open_session(database, record, self.run)) is not None:
            if row.was_interrupted:
                self._add_tombstone(database, turn, "interrupted")
            else:
                query = "SELECT id, tokens, hash, has_secret FROM turns WHERE session = ? ORDER BY rowid"
                nodes = (TreeNode(*node) for node in database.execute(query, (turn.session,)))
                opened = _OpenSession(record.owner, row.user, row.day, ConversationTree(nodes))
                self._open[turn.session] = opened
        if opened is None or opened.owner != record.owner:
            return None
        if opened.user != record.user:
            self._add_tombstone(database, turn, "dropped")  # the other user's words would come back in later prompts
            del self._open[turn.session]
            return None
        self._open.move_to_end(turn.session)
        return opened

    def _add_tombstone(self, database: sqlite3.Connection, turn: FinishedTurn, reason: str) -> None:
        """Gives the session of a turn a tombstone, inside the caller's transaction."""
        retention.add_tombstones(database, [turn.session], reason, turn.time)
        with self._condition:
            self.counts.dropped_sessions += 1

    def _row(self, opened: "_OpenSession", turn: FinishedTurn) -> "_Row":
        """A turn as it is written, and its end, which the tree gets."""
        request, sample, params, prompt = turn.request, turn.sample, turn.params, turn.prompt
        parent, digest = opened.tree.find_parent(prompt, sample.tokens)
        suffix = prompt[parent.tokens :]
        ids = [*prompt[max(0, parent.tokens - SEAM) :], *sample.tokens]
        has_secret = parent.has_secret or has_secret_ids(ids, self._text.tokenizer.decode)
        row = SampledTurn(
            id=turn_id(turn.session, parent.id, suffix, turn.choice, request.answer),
            session=turn.session,
            answer=request.answer,
            choice=turn.choice,
            parent=parent.id,
            suffix=suffix,
            tokens=sample.tokens,
            logprobs=sample.logprobs,
            raw_logprobs=sample.raw_logprobs or [],
            versions=sample.versions,
            finish_reason=sample.finish_reason,
            kind=request.kind,
            consent=request.consent,
            sampling={name: getattr(params, name) for name in SAMPLING} | {"seed": turn.seed},
            template=self.policy.fingerprint,
            tools=request.tools,
            time=turn.time,
            seconds=turn.seconds,
            cached=sample.cached,
            has_secret=has_secret,
            routing=routed_experts(sample, max(0, parent.tokens - 1)),
        )
        node = TreeNode(row.id, len(prompt) + len(sample.tokens), digest, has_secret)
        opened.tree.add(node)
        return row, node

    def _tidy(self, database: sqlite3.Connection, is_last: bool) -> None:
        """Writes tombstones of dropped sessions, deletes what has one, and what is too old."""
        now = self._clock()
        self._write_tombstones(database)
        retention.trim(self.folder, database, self._uncommitted)
        self._uncommitted.clear()
        sessions, days = retention.erase(self.folder, database, now)
        for session in sessions:
            self._open.pop(session, None)
        for day in days:
            self._ends.pop(day, None)
        if not 0 <= now - self._expired < DAY_SECONDS:  # also after the clock was set back
            retention.expire(self.folder, database, self.policy, now)
            self._expired = now
            self._open.clear()
            self._ends.clear()
            self._overwrite_after = 0.0
        if sessions or time.monotonic() >= self._overwrite_after:
            is_done = retention.overwrite_log(database)  # it waits for readers, and new turns for it
            self._overwrite_after = math.inf if is_done else time.monotonic() + RETRY_SECONDS
        if is_last and not self._stopped:
            with database:
                database.execute("UPDATE runs SET closed = 1 WHERE run = ?", (self.run,))

    def _write_tombstones(self, database: sqlite3.Connection) -> None:
        """Writes the tombstones of dropped sessions, without those that another key owns."""
        with self._condition:
            dropped = set(self._dropping)
            queued = {turn.session for turn in self._queue}
        if not dropped:
            return
        with database:
            database.execute("BEGIN IMMEDIATE")
            owners = owners_of(database, {session for session, _ in dropped})
            # Of a session without a row, a turn of another key may come first.
            dropped = {one for one in dropped if one[0] in owners or one[0] not in queued}
            names = {session for session, owner in dropped if owners.get(session, owner) == owner}
            retention.add_tombstones(database, names, "dropped", self._clock())
        with self._condition:
            self._dropping -= dropped


@dataclasses.dataclass
class _OpenSession:
    """A session whose turns' ends are in memory."""

    owner: str
    user: str
    day: str
    tree: ConversationTree


_Row = tuple[SampledTurn, TreeNode]
"""A turn as it is written, and its end."""


def _claim_folder(folder: Path) -> int:
    """Creates and locks a traffic folder. Raises UserError for a foreign folder, and as retention.check_folder."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        retention.check_folder(folder)
        names = {path.name for path in folder.iterdir()} - {".lock"}
        if names and policy.NAME not in names and not all(name.startswith(f".{policy.NAME}.") for name in names):
            raise UserError(f"{folder} is not empty and has no {policy.NAME}; choose another --traffic.")
        folder.chmod(0o700)  # nobody else reaches the files in it, whatever their modes
    except OSError as error:
        raise UserError(f"cannot use {folder}: {error.strerror}; choose another --traffic.") from error
    return lock_folder(folder, f"{os.getpid()} serves", retention.FLAG)
