"""A session's changes of the working tree, out of the snapshots of all sessions."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence

from composer_jax.errors import UserError
from composer_jax.git import GitError, last_line
from composer_jax.realtime.track.agent_diff import (
    MAX_ADDED_LINES,
    MAX_BYTES,
    Author,
    FileDiff,
    decode,
    diff_file,
    reason_to_leave_out,
)
from composer_jax.realtime.track.tracked_session import Snapshot, authors_after
from composer_jax.realtime.track.working_tree import ChangedFile, WorkingTree


def session_diff(tree: WorkingTree, timeline: Sequence[Snapshot], key: str) -> tuple[list[FileDiff], dict[str, str]]:
    """Returns (changes of each file, reasons of the changed files that are left out), by path.

    timeline: the snapshots of all sessions; the session's first is a start, its last a stop.
    key: TrackedSession.key.
    Raises UserError: git has lost a content that was there when the session started.
    """
    try:
        return _session_diff(tree, timeline, key)
    except GitError as error:
        raise UserError(
            f"git has lost a snapshot of {tree.root} ({last_line(str(error))}); start the session anew"
        ) from error


def _session_diff(tree: WorkingTree, timeline: Sequence[Snapshot], key: str) -> tuple[list[FileDiff], dict[str, str]]:
    own = [index for index, snapshot in enumerate(timeline) if snapshot.key == key]
    span = list(timeline[own[0] : own[-1] + 1])
    authors = authors_after(timeline, key)[own[0] : own[-1]]
    steps = [tree.changes(one.tree, other.tree) for one, other in itertools.pairwise(span)]
    own_steps = [step for step, author in zip(steps, authors, strict=True) if author in ("session", "unclear")]
    touched = _paths(itertools.chain(*own_steps))
    names = {file: _names(file, steps) for file in tree.changes(span[0].tree, span[-1].tree)}
    names = {file: names_of_file for file, names_of_file in names.items() if not touched.isdisjoint(names_of_file)}
    paths = {name for names_of_file in names.values() for name in names_of_file if name is not None}
    contents = [tree.contents(span[0].tree, sorted(paths))]
    for snapshot, step in zip(span[1:], steps, strict=True):
        changed = paths & _paths(step)
        same = {path: content for path, content in contents[-1].items() if path not in changed}
        contents.append(same | tree.contents(snapshot.tree, sorted(changed)))
    diffs, left_out = [], {}
    filtered = tree.find_filtered(paths)
    for file, names_of_file in names.items():
        path = file.after if file.after is not None else str(file.before)
        is_filtered = not filtered.isdisjoint(_paths([file]))
        diff = "filtered by git" if is_filtered else _diff_of(tree, path, names_of_file, contents, authors)
        if isinstance(diff, str):
            left_out[path] = diff
        elif diff.added or diff.deleted or diff.unclear:
            diffs.append(diff)
    return diffs, left_out


def _paths(files: Iterable[ChangedFile]) -> set[str]:
    return {path for file in files for path in (file.before, file.after) if path is not None}


def _names(file: ChangedFile, steps: Sequence[Sequence[ChangedFile]]) -> list[str | None]:
    """The name of a file at each snapshot, through all renames; None where it does not exist.

    The names lead back from the last one, and forward from the first one where these end.
    """
    forward, backward = [file.before], [file.after]
    for step in steps:
        after = {None: None} | {change.before: change.after for change in step if change.before is not None}
        forward.append(after.get(forward[-1], forward[-1]))
    for step in reversed(steps):
        before = {None: None} | {change.after: change.before for change in step if change.after is not None}
        backward.append(before.get(backward[-1], backward[-1]))
    middle = zip(forward[1:-1], backward[-2:0:-1], strict=True)
    return [file.before, *(one if other is None else other for one, other in middle), file.after]


def _diff_of(
    tree: WorkingTree,
    path: str,
    names: Sequence[str | None],
    contents: Sequence[dict[str, bytes]],
    authors: Sequence[Author],
) -> FileDiff | str:
    """The session's changes of a file, which has one of `names` at each snapshot, or why they are not measured."""
    if any(name is not None and name not in contents[index] for index, name in ((0, names[0]), (-1, names[-1]))):
        raise UserError(
            f"git has lost what {path} was when the session started (git gc --prune=now?); start the session anew"
        )
    if names[-1] is None and os.path.lexists(tree.root / path):
        return f"larger than {MAX_BYTES >> 20} MiB, or no longer a regular file"
    versions, version_authors = [], []
    for index, (name, content) in enumerate(zip(names, contents, strict=True)):
        version = b"" if name is None else content.get(name, b"")
        if not versions or version != versions[-1]:
            versions.append(version)
            version_authors.append(authors[index - 1])
    if reason := reason_to_leave_out(path, versions):
        return reason
    diff = diff_file(path, [str(decode(version)) for version in versions], version_authors[1:])
    if len(diff.added) > MAX_ADDED_LINES:
        return f"{len(diff.added)} added lines, more than {MAX_ADDED_LINES}"
    return diff
