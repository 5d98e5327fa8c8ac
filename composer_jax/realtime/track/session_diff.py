"""A session's changes of the working tree, out of the snapshots of all sessions."""

from __future__ import annotations

import os
from collections.abc import Sequence

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
from composer_jax.realtime.track.tracked_session import Snapshot, author_after
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
    authors = [author_after(timeline, index, key) for index in range(own[0], own[-1])]
    touched: set[str | None] = set()
    for index, author in enumerate(authors):
        if author in ("session", "unclear"):
            for file in tree.changes(span[index].tree, span[index + 1].tree):
                touched |= {file.before, file.after}
    changed = [file for file in tree.changes(span[0].tree, span[-1].tree) if {file.before, file.after} & touched]
    paths = sorted({path for file in changed for path in (file.before, file.after) if path is not None})
    contents = [tree.contents(snapshot.tree, paths) for snapshot in span]
    diffs, left_out = [], {}
    for file in changed:
        path = file.after if file.after is not None else str(file.before)
        diff = _diff_of(tree, file, path, contents, authors)
        if isinstance(diff, str):
            left_out[path] = diff
        elif diff.added or diff.deleted or diff.unclear:
            diffs.append(diff)
    return diffs, left_out


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
    versions = []
    for index, content in enumerate(contents):
        names = (file.before,) if index == 0 else (file.after,) if index == len(contents) - 1 else (path, file.before)
        versions.append(next((content[name] for name in names if name in content), b""))
    if reason := reason_to_leave_out(path, versions):
        return reason
    diff = diff_file(path, [str(decode(version)) for version in versions], authors)
    if len(diff.added) > MAX_ADDED_LINES:
        return f"{len(diff.added)} added lines, more than {MAX_ADDED_LINES}"
    return diff
