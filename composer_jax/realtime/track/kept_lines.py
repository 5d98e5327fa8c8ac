"""How many lines of a session's changes are in the working tree, and how many nobody can judge."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from composer_jax.realtime.track.agent_diff import MAX_BYTES, FileDiff, FileSurvival, decode, measure
from composer_jax.realtime.track.tracked_session import Snapshot, TrackedSession, authors_after, start_time
from composer_jax.realtime.track.working_tree import WorkingTree

HERE_FRACTION = 0.5
"""Part of a session's changes that has to be in the working tree for a new branch to be one of theirs."""


@dataclasses.dataclass(frozen=True)
class KeptLines:
    """Lines of a session's changes, as the payload of an event edited_after counts them."""

    added: int = 0
    added_kept: int = 0
    deleted: int = 0
    deleted_kept: int = 0
    censored: int = 0
    others: int = 0
    others_kept: int = 0

    def __add__(self, other: KeptLines) -> KeptLines:
        return KeptLines(
            *(one + two for one, two in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True))
        )


def all_censored(files: Sequence[FileDiff]) -> KeptLines:
    """Returns the counts where nobody can judge a line."""
    return KeptLines(censored=sum(len(diff.added) + len(diff.deleted) + diff.unclear for diff in files))


def count_lines_in_commit(tree: WorkingTree, session: TrackedSession, commit: str) -> tuple[int, int]:
    """Returns (added lines that are in a commit, deleted ones that are not). Files that the commit lacks count nowhere,
    unless the session deleted them."""
    contents = tree.contents(commit, [*(diff.path for diff in session.files), *session.renames.values()])
    added = deleted = 0
    for diff in session.files:
        content = contents.get(diff.path, contents.get(session.renames.get(diff.path, "")))
        if content is not None or not diff.after:
            survival = measure(diff, decode(content or b"") or "")
            added, deleted = added + sum(survival.added_kept), deleted + sum(survival.deleted_kept)
    return added, deleted


def count_kept_lines(tree: WorkingTree, session: TrackedSession, timeline: Sequence[Snapshot]) -> KeptLines:
    """Returns what is in the working tree of a session's changes. Notes renamed files and new branches in `session`.

    Lines are censored, that is, in no count but this, if
    - several agents were at work when they were added or deleted;
    - less than HERE_FRACTION of the changes is here, or was in a commit of the branch since the session began, on a
      branch on which they have never been seen;
    - they are lost here and in a stash;
    - they were lost while another agent was at work;
    - their file is now binary or larger than MAX_BYTES.
    """
    texts = _read_texts(tree, session)
    survivals = {diff.path: measure(diff, text) for diff in session.files if (text := texts[diff.path]) is not None}
    branch = tree.branch()
    if branch not in session.branches:
        # A line is not evidence of the session if its whole file is missing.
        files = [diff for diff in session.files if texts[diff.path] or not diff.after]
        there = [survivals[diff.path] for diff in files if diff.path in survivals]
        kept = sum(sum(survival.added_kept) + sum(survival.deleted_kept) for survival in there)
        least = HERE_FRACTION * sum(len(diff.added) + len(diff.deleted) for diff in session.files)
        if kept < least:
            commits = tree.commits([diff.path for diff in session.files], since=start_time(timeline, session.key))
            if all(sum(count_lines_in_commit(tree, session, commit)) < least for commit in commits):
                return all_censored(session.files)
        session.branches.append(branch)
    evidence = _Evidence(tree, session, timeline, texts)
    counts = KeptLines()
    for diff in session.files:
        survival = survivals.get(diff.path)
        counts += all_censored([diff]) if survival is None else _count(diff, survival, evidence)
    return counts


def _read_texts(tree: WorkingTree, session: TrackedSession) -> dict[str, str | None]:
    """For each file its text now, by the path after the session; "" if it is deleted, None if it cannot be compared."""
    contents = {diff.path: tree.read(diff.path) for diff in session.files}
    for path, new_path in list(session.renames.items()):
        if contents[path] is None:
            contents[path] = tree.read(new_path)
        else:  # renamed back, or a branch on which it was not renamed
            del session.renames[path]
    missing = [diff.path for diff in session.files if contents[diff.path] is None and diff.after]
    if missing:
        for path, new_path in tree.find_renames(session.tree, missing).items():
            session.renames[path] = new_path
            contents[path] = tree.read(new_path)
    return {
        path: "" if content is None else None if len(content) > MAX_BYTES else decode(content)
        for path, content in contents.items()
    }


class _Evidence:
    """Texts that show that a line was not lost to the user's edit, read when they are first needed."""

    def __init__(
        self,
        tree: WorkingTree,
        session: TrackedSession,
        timeline: Sequence[Snapshot],
        texts: Mapping[str, str | None],
    ):
        self._tree, self._session, self._texts = tree, session, texts
        self._paths = [diff.path for diff in session.files]
        self._stashes: list[tuple[str, str | None]] | None = None
        last = max(index for index, snapshot in enumerate(timeline) if snapshot.key == session.key)
        authors = authors_after(timeline, session.key)
        self._intervals = [
            (timeline[index].tree, timeline[index + 1].tree if index + 1 < len(timeline) else None)
            for index in range(last, len(timeline))
            if authors[index] == "other"
        ]
        self._trees: dict[str, dict[str, bytes]] = {}

    def stashed(self, path: str) -> list[tuple[str, str]]:
        """The file before and after each change that was stashed since the session."""
        if self._stashes is None:
            self._stashes = [pair for pair in self._tree.stashes() if pair[0] not in self._session.old_stashes]
        return [
            ("" if base is None else self._text(base, path), self._text(commit, path))
            for commit, base in self._stashes
            if self._has(commit, path)
        ]

    def others_edits(self, path: str) -> list[tuple[str, str]]:
        """The file before and after each time during which only other agents were at work."""
        return [
            (self._text(before, path), self._texts[path] or "" if after is None else self._text(after, path))
            for before, after in self._intervals
        ]

    def _has(self, tree: str, path: str) -> bool:
        if tree not in self._trees:
            self._trees[tree] = self._tree.contents(tree, self._paths)
        return path in self._trees[tree]

    def _text(self, tree: str, path: str) -> str:
        return (decode(self._trees[tree][path]) or "") if self._has(tree, path) else ""


def _count(diff: FileDiff, survival: FileSurvival, evidence: _Evidence) -> KeptLines:
    kept = _flags(survival)
    censored = [False] * len(kept)
    if not all(kept):
        # In a stash are lines that it would bring back; another agent took away those that were there before it.
        gains = [(after, before) for before, after in evidence.stashed(diff.path)]
        for has, lacks in (*gains, *evidence.others_edits(diff.path)):
            if has == lacks:
                continue
            flags = zip(censored, _flags(measure(diff, has)), _flags(measure(diff, lacks)), kept, strict=True)
            censored = [one or in_has and not (in_lacks or in_now) for one, in_has, in_lacks, in_now in flags]
    first, second = len(diff.added), len(diff.added) + len(diff.deleted)
    added, deleted, others = slice(first), slice(first, second), slice(second, None)
    return KeptLines(
        added=censored[added].count(False),
        added_kept=kept[added].count(True),
        deleted=censored[deleted].count(False),
        deleted_kept=kept[deleted].count(True),
        censored=censored[:second].count(True) + diff.unclear,
        others=censored[others].count(False),
        others_kept=kept[others].count(True),
    )


def _flags(survival: FileSurvival) -> list[bool]:
    return [*survival.added_kept, *survival.deleted_kept, *survival.others_kept]
