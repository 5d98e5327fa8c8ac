"""Tracks what becomes of an agent's changes in a git working tree, and sends it to the server as events.

start -> the agent works -> stop -> check, again and again, until the last horizon. Each is a call of its own, between
which everything is in SessionStore, so that another process can make the next one. Working trees are only read.
"""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from composer_jax.errors import UserError
from composer_jax.git import GitError, last_line
from composer_jax.realtime.track.agent_diff import FileDiff, hunk_hashes, reason_to_leave_out
from composer_jax.realtime.track.event_sender import (
    QueuedEvent,
    ServerUnavailable,
    check_server,
    queued_event,
    send_events,
)
from composer_jax.realtime.track.kept_lines import KeptLines, all_censored, count_kept_lines, count_lines_in_commit
from composer_jax.realtime.track.session_diff import session_diff
from composer_jax.realtime.track.tracked_session import SessionStore, Snapshot, TrackedSession, start_time
from composer_jax.realtime.track.working_tree import WorkingTree
from composer_jax.serve.traffic.records import EventKind

HORIZONS_S = (600.0, 3600.0, 86400.0)
"""Ages of a session's changes at which their kept lines are counted."""
UNDO_S = 600.0
"""Age until which restoring the files counts as undoing the session."""
UNDO_SLACK_S = 60.0
"""Delay with which a look every minute notices that the files were restored."""
POLL_S = (10.0, 60.0)
"""Seconds between two looks at the times of the files: in the first ten minutes, and later."""
RETRY_S = (60.0, 3600.0)
"""First and longest pause after the server could not be reached; a pause is twice the one before."""
EXPIRY_S = 7 * 86400.0
"""Age at which an event that could not be sent is dropped."""
MAX_HUNKS = 1000
"""Hashes of hunks in one event."""
CLOCK_SLACK_S = 60.0
"""Seconds that a clock may be set back."""


def latest_measurement(horizon: float) -> float:
    """Returns the age until which a measurement counts for a horizon: a tenth of it and a minute later."""
    return 1.1 * horizon + 60.0


class Tracker:
    """Tracks the sessions of one working tree.

    Args:
      repository: a folder of the working tree.
      clock: Unix seconds.
      report: prints a sentence for a person.
    """

    def __init__(
        self, repository: Path, *, clock: Callable[[], float] = time.time, report: Callable[[str], object] = print
    ):
        self.tree = WorkingTree(repository)
        self.store = SessionStore(self.tree.folder)
        self._clock, self._report = clock, report
        self._seen: dict[str, tuple[tuple[int, int], ...]] = {}
        self._unsent: dict[str, tuple[float, float]] = {}  # session -> next attempt, pause

    def start(self, name: str, server: str, api_key: str = "", turn: str = "", test_command: str = "") -> None:
        """Remembers the working tree as it is before the agent changes it.

        A session that was stopped goes on: what the agent then adds counts with what it had added.

        Raises UserError: the session is at work, the server's address or the session's name is none.
        """
        if not name or len(name) > 256 or not name.isprintable():
            raise UserError(f"--session={name!r} is not a session; name the X-Session-ID of the agent's requests")
        server = check_server(server)
        self._refuse_started(name)
        ended = self._run_test(["sh", "-c", test_command]) if test_command else None
        with self.store.lock():
            session = self._refuse_started(name) or TrackedSession(name, server, api_key)
            now = self._now(session)
            if session.stopped is not None:
                self._check(session, self.store.timeline(), only_changed=False)
            tree = self.tree.snapshot()
            session.server, session.api_key, session.turn = server, api_key, turn
            session.stopped, session.tree = None, tree
            if session.head is None:
                session.head = self.tree.head()
            if ended is not None:
                self._add_test(session, *ended, phase="before")
            self.store.add_snapshot(Snapshot(now, tree, session.key, "start"))
            self.store.save(session)
        self._report(f"session {name}: started; {self.tree.root} is remembered as it is")

    def mark(self, name: str) -> None:
        """Notes that the session made the changes since the last snapshot. Needed only where several agents work."""
        with self.store.lock():
            session = self._load_started(name)
            now = self._now(session)
            tree = self.tree.snapshot()
            if tree != self.store.timeline()[-1].tree:
                self.store.add_snapshot(Snapshot(now, tree, session.key, "mark"))
            self.store.save(session)

    def stop(self, name: str, test_command: str = "") -> None:
        """Takes the session's changes, whose ages begin now, and sends what happened so far."""
        with self.store.lock():
            session = self._load_started(name)
            now = self._now(session)
            session.tree = self.tree.snapshot()
            snapshot = Snapshot(now, session.tree, session.key, "stop")
            timeline = [*self.store.timeline(), snapshot]
            session.files, session.left_out = session_diff(self.tree, timeline, session.key)
            self.store.add_snapshot(snapshot)
            session.stopped, session.measured, session.undone, session.renames = now, [], False, {}
            session.branches = [self.tree.branch()]
            session.old_stashes = [commit for commit, _ in self.tree.stashes()]
            self._new_commit(session, timeline)  # of the agent: no event, or it would learn to commit
            self.store.save(session)
        self._report(_describe(session))
        if test_command:
            self.test(name, ["sh", "-c", test_command])
        self._send(name)

    def test(self, name: str, command: Sequence[str]) -> int:
        """Runs the user's tests and returns their exit code; the event says whether it was before the changes."""
        self._load_tracked(name)
        began, code = self._run_test(command)
        with self.store.lock():
            session = self._load_tracked(name)
            phase = "before" if session.stopped is None and not self._has_changes(session) else "after"
            self._add_test(session, began, code, phase)
            self.store.save(session)
        self._send(name)
        return code

    def check(self, name: str | None = None, *, only_changed: bool = False) -> float | None:
        """Measures what is due and sends it. Returns the time of the next horizon; None if there is none.

        name: a session, or None for all that have been stopped.
        only_changed: does nothing for a session of which no horizon is due and nothing has changed on disk.
        """
        errors: list[UserError] = []  # of single sessions, which do not keep the others back
        with self.store.lock():
            sessions = self.store.load_all() if name is None else [self._load_tracked(name)]
            timeline = self.store.timeline()
            for session in sessions:
                if session.stopped is not None:
                    try:
                        self._check(session, timeline, only_changed)
                    except UserError as error:
                        errors.append(error)
                    except (GitError, OSError) as error:
                        errors.append(
                            UserError(
                                f"session {session.session!r} cannot be measured ({last_line(str(error))}); see what "
                                f"git status says in {self.tree.root}, or forget the session"
                            )
                        )
        for session in sessions:
            try:
                self._send(session.session)
            except UserError as refusal:
                errors.append(refusal)
        if errors:
            raise errors[0]
        left = self.store.load_all() if name is None else [self.store.load(name)]
        dues = [_next_due(session) for session in left if session is not None and session.stopped is not None]
        return min((due for due in dues if due is not None), default=None)

    def follow(self, name: str, sleep: Callable[[float], object] = time.sleep) -> None:
        """Checks a session until its last horizon is measured and everything is sent.

        Raises UserError: another process follows it, or the server refuses its events.
        """
        session = self._load_tracked(name)
        with self.store.follow(name):
            while True:
                try:
                    due = self.check(name, only_changed=True)
                    latest = self.store.load(name)
                except (GitError, OSError, UserError):
                    if self.tree.is_reachable():
                        raise
                    return self._send_unreachable(session)
                if latest is None:
                    return None
                session = latest
                now = self._clock()
                pause = POLL_S[now - (session.stopped or now) >= UNDO_S]
                sleep(pause if due is None else max(0.0, min(pause, due - now)))
                if not self.tree.is_reachable():
                    return self._send_unreachable(session)

    def run(
        self,
        name: str,
        command: Sequence[str],
        server: str,
        api_key: str = "",
        turn: str = "",
        test_command: str = "",
        sleep: Callable[[float], object] = time.sleep,
    ) -> int:
        """Starts the session, runs the agent's command, stops and follows the session; returns the command's exit code.

        Ctrl-C reaches the command while it runs, and afterwards ends the following. What fails after the command has
        ended, such as sending events that the server refuses, is reported.

        Raises UserError: the session cannot start, or the command.
        """
        if shutil.which(command[0]) is None:
            raise UserError(f"there is no program {command[0]!r}; name the command that starts the agent")
        self.start(name, server, api_key, turn, test_command)
        try:
            process = subprocess.Popen(command)
        except OSError as error:
            self.forget(name)
            raise UserError(
                f"{command[0]!r} does not start ({error.strerror}); name the command that starts the agent"
            ) from error
        code = _wait(process)
        try:
            self.stop(name, test_command)
            self._report(f"session {name}: followed for a day; Ctrl-C ends that, and the command follow continues it")
            self.follow(name, sleep)
        except (GitError, OSError, UserError) as error:
            self._report(f"session {name}: {error}")
        return code

    def forget(self, name: str) -> None:
        """Deletes what is remembered of a session; nothing more of it is sent."""
        with self.store.lock():
            session = self._load_tracked(name)
            if session.stopped is None:  # for other sessions, it is no longer at work
                self.store.add_snapshot(Snapshot(self._clock(), session.tree, session.key, "stop"))
            self.store.delete(name)

    def status(self) -> list[str]:
        """Returns a sentence for each session."""
        return [_describe(session) for session in self.store.load_all()]

    def _now(self, session: TrackedSession) -> float:
        now = self._clock()
        if now < session.latest - CLOCK_SLACK_S:
            raise UserError(
                f"the clock is {session.latest - now:.0f} seconds before what it was at the last look at session "
                f"{session.session!r}; set it right and try again"
            )
        session.latest = max(now, session.latest)
        return session.latest

    def _refuse_started(self, name: str) -> TrackedSession | None:
        session = self.store.load(name)
        if session is not None and session.stopped is None:
            raise UserError(f"session {name!r} is already started; stop it first, or track another session")
        return session

    def _load_tracked(self, name: str) -> TrackedSession:
        if (session := self.store.load(name)) is None:
            names = ", ".join(repr(other.session) for other in self.store.load_all()) or "none"
            raise UserError(f"session {name!r} is not tracked in {self.tree.root} (tracked: {names}); start it first")
        return session

    def _load_started(self, name: str) -> TrackedSession:
        session = self._load_tracked(name)
        if session.stopped is not None:
            raise UserError(f"session {name!r} is stopped; start it again before the agent goes on")
        return session

    def _check(self, session: TrackedSession, timeline: Sequence[Snapshot], only_changed: bool) -> None:
        assert session.stopped is not None
        now = self._now(session)
        age = now - session.stopped
        due = [horizon for horizon in HORIZONS_S if horizon not in session.measured and age >= horizon]
        fingerprint = self.tree.fingerprint([*(diff.path for diff in session.files), *session.renames.values()])
        if only_changed and not due and fingerprint == self._seen.get(session.session):
            return
        self._seen[session.session] = fingerprint
        counts = count_kept_lines(self.tree, session, timeline)
        if (added := self._new_commit(session, timeline)) is not None:
            self._add(session, "commit", now, {"added_kept": added})
        if _is_undone(counts) and not session.undone and age <= UNDO_S + UNDO_SLACK_S:
            session.undone = True
            hunks = [digest for diff in session.files for digest in hunk_hashes(diff, session.key)]
            self._add(session, "undo", now, {"hunks": hunks[:MAX_HUNKS]})
        for horizon in due:
            in_time = age <= latest_measurement(horizon)
            lines = counts if in_time else all_censored(session.files)
            self._add(session, "edited_after", now, {"horizon": horizon, **dataclasses.asdict(lines)})
            session.measured.append(horizon)
        self.store.save(session)

    def _new_commit(self, session: TrackedSession, timeline: Sequence[Snapshot]) -> int | None:
        """The added lines in the current commit, if it is new and has more of the changes than any before; or None."""
        head = self.tree.head()
        if head is None or head == session.head:
            return None
        session.head = head
        if self.tree.commit_time(head) < int(
            start_time(timeline, session.key)
        ):  # a checkout of what was there before the session
            return None
        added, deleted = count_lines_in_commit(self.tree, session, head)
        if added + deleted <= session.committed:
            return None
        session.committed = added + deleted
        return added

    def _add(self, session: TrackedSession, kind: EventKind, now: float, payload: Mapping[str, Any]) -> None:
        session.add(queued_event(session.session, kind, session.turn, now, payload, session.stopped or now))

    def _add_test(self, session: TrackedSession, began: float, code: int, phase: str) -> None:
        payload = {"exit_code": code, "phase": phase}
        session.add(queued_event(session.session, "tests_run", session.turn, self._now(session), payload, began))

    def _run_test(self, command: Sequence[str]) -> tuple[float, int]:
        """(when it began, exit code)."""
        began = self._clock()
        try:
            return began, _wait(subprocess.Popen(command, cwd=self.tree.root))
        except (FileNotFoundError, PermissionError):
            raise UserError(f"there is no program {command[0]!r} in {self.tree.root}; name the test command") from None

    def _has_changes(self, session: TrackedSession) -> bool:
        changed = self.tree.changes(session.tree, self.tree.snapshot())
        paths = [path for file in changed for path in (file.before, file.after) if path is not None]
        return bool(session.files) or any(reason_to_leave_out(path, []) is None for path in paths)

    def _send(self, name: str) -> None:
        """Sends what waits, unless the session is at work: before its end the server may not know it."""
        session = self.store.load(name)
        now = self._clock()
        attempt, pause = self._unsent.get(name, (now, RETRY_S[0]))
        if session is None or session.stopped is None or now < attempt:
            return
        if not session.queue and _next_due(session) is not None:
            return
        fresh = [event for event in session.queue if now - event.happened <= EXPIRY_S]
        old = [event for event in session.queue if now - event.happened > EXPIRY_S]
        acknowledged: list[QueuedEvent] = []
        try:
            for batch in send_events(session.server, session.api_key, fresh, now):
                acknowledged += batch
        except ServerUnavailable as error:
            pause = RETRY_S[0] if acknowledged else pause
            self._unsent[name] = (now + pause, min(2 * pause, RETRY_S[1]))
            self._report(f"session {name}: {error}; {len(fresh) - len(acknowledged)} events wait")
        else:
            self._unsent.pop(name, None)
        finally:
            self._remove_events(name, acknowledged, old)

    def _remove_events(self, name: str, acknowledged: Sequence[QueuedEvent], old: Sequence[QueuedEvent]) -> None:
        """Takes events out of the queue of a session, which is deleted if nothing is left to be measured or sent."""
        gone = {event.id for event in (*acknowledged, *old)}
        with self.store.lock():
            session = self.store.load(name)
            if session is None or not gone and session.queue:
                return
            session.queue = [event for event in session.queue if event.id not in gone]
            session.dropped += len(old)
            if session.queue or session.stopped is None or _next_due(session) is not None:
                self.store.save(session)
            else:
                self.store.delete(name)

    def _send_unreachable(self, session: TrackedSession) -> None:
        now = self._clock()
        since = session.stopped or now
        event = queued_event(session.session, "repo_unreachable", session.turn, now, {}, since)
        try:
            for _ in send_events(session.server, session.api_key, [*session.queue, event], now):
                continue
        except ServerUnavailable as error:
            raise UserError(
                f"{self.tree.root} is gone, and {error}; nothing more can be said of the session"
            ) from error
        self._report(f"session {session.session}: {self.tree.root} is gone; nothing more can be measured")


def _wait(process: subprocess.Popen[bytes]) -> int:
    """The exit code of a process, as a shell gives it. Ctrl-C reaches the process, too, which decides about it."""
    while True:
        try:
            code = process.wait()
        except KeyboardInterrupt:
            continue
        return 128 - code if code < 0 else code


def _is_undone(counts: KeptLines) -> bool:
    changed = counts.added + counts.deleted
    return changed > 0 and not (counts.added_kept or counts.deleted_kept or counts.censored)


def _next_due(session: TrackedSession) -> float | None:
    """Unix seconds of the next horizon of a session that is stopped."""
    assert session.stopped is not None
    left = [horizon for horizon in HORIZONS_S if horizon not in session.measured]
    return session.stopped + left[0] if left else None


def _describe(session: TrackedSession) -> str:
    if session.stopped is None:
        return f"session {session.session}: the agent is at work"
    added, deleted = (sum(len(lines) for lines in part) for part in _lines(session.files))
    unclear = sum(diff.unclear for diff in session.files)
    text = f"session {session.session}: {added} lines added and {deleted} deleted in {len(session.files)} files"
    text += f", {unclear} by several agents" if unclear else ""
    text += f"; {len(session.measured)} of {len(HORIZONS_S)} measurements made, {len(session.queue)} events wait"
    text += f", {session.dropped} dropped" if session.dropped else ""
    reasons = [f"{path} ({reason})" for path, reason in sorted(session.left_out.items())]
    return text + (f"; left out: {', '.join(reasons)}" if reasons else "")


def _lines(files: Sequence[FileDiff]) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    return [diff.added for diff in files], [diff.deleted for diff in files]
