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
    steps = [_paths(tree.changes(one.tree, other.tree)) for one, other in itertools.pairwise(span)]
    own_steps = [step for step, author in zip(steps, authors, strict=True) if author in ("session", "unclear")]
    touched = set[str]().union(*own_steps)
    changed = [file for file in tree.changes(span[0].tree, span[-1].tree) if _paths([file]) & touched]
    paths = _paths(changed)
    contents = [tree.contents(span[0].tree, sorted(paths))]
    for snapshot, step in zip(span[1:], steps, strict=True):
        same = {path: content for path, content in contents[-1].items() if path not in step}
        contents.append(same | tree.contents(snapshot.tree, sorted(paths & step)))
    diffs, left_out = [], {}
    filtered = tree.find_filtered(paths)
    for file in changed:
        path = file.after if file.after is not None else str(file.before)
        is_filtered = not filtered.isdisjoint(_paths([file]))
        diff = "filtered by git" if is_filtered else _diff_of(tree, file, path, contents, authors)
        if isinstance(diff, str):
            left_out[path] = diff
        elif diff.added or diff.deleted or diff.unclear:
            diffs.append(diff)
    return diffs, left_out


def _paths(files: Iterable[ChangedFile]) -> set[str]:
    return {path for file in files for path in (file.before, file.after) if path is not None}


def _diff_of(
    tree: WorkingTree, file: ChangedFile, path: str, contents: Sequence[dict[str, bytes]], authors: Sequence
) -> FileDiff | str:
    """The session's changes of a file, or why they are not measured."""
    if file.before is not None and file.before not in contents[0] or file.after and file.after not in contents[-1]:
        raise UserError(
            f"git has lost what {path} was when the session started (git gc --prune=now?); start the session anew"
        )
    if file.after is None and os.path.lexists(tree.root / path):
        return f"larger than {MAX_BYTES >> 20} MiB, or no longer a regular file"
    versions, makers = [], []
    for index, content in enumerate(contents):
        names = (file.before,) if index == 0 else (file.after,) if index == len(contents) - 1 else (path, file.before)
        version = next((content[name] for name in names if name in content), b"")
        if not versions or version != versions[-1]:
            versions.append(version)
            makers.append(authors[index - 1])
    if reason := reason_to_leave_out(path, versions):
        return reason
    diff = diff_file(path, [str(decode(version)) for version in versions], makers[1:])
    if len(diff.added) > MAX_ADDED_LINES:
        return f"{len(diff.added)} added lines, more than {MAX_ADDED_LINES}"
    return diff
