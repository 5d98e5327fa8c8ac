"""Commits of a repository's own history, undone: the code as it was before, under the tests that came with it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from composer_jax.errors import UserError
from composer_jax.tasks.repository.candidate import Candidate, candidate, merge, split_lines
from composer_jax.tasks.repository.entities import entities
from composer_jax.tasks.repository.source import Source, parse
from composer_jax.tasks.suites.protected import is_protected

LARGEST = 8
"""Most source files that a commit may change."""


def revert_commits(repository: Path, limit: int = 500) -> Iterator[Candidate]:
    """The candidates of the last `limit` commits before HEAD that are no merges, newest first.

    A commit counts when it changed both code and tests (Python files, told apart by their names), at most
    LARGEST of code, and nothing since touched the lines that it changed. Files that are not Python, such as a
    changelog, stay as they are. Raises UserError where `repository` is not the top of a git repository.
    """
    git = Git(repository)
    for commit in git.lines("rev-list", "--no-merges", "--min-parents=1", f"--max-count={limit}", "HEAD"):
        found = _reverted(git, commit)
        if found is not None:
            yield found


class Git:
    """Reads objects of a repository, without its owner's settings: no hooks, pagers, helpers or network."""

    def __init__(self, repository: Path):
        self.repository = repository.resolve()
        program = shutil.which("git")
        if program is None:
            raise UserError("git is not installed; install it to make tasks from a repository's history")
        self._command = [program, "--no-pager", "--no-replace-objects", "-C", str(self.repository)]
        for setting in ("core.fsmonitor=false", f"core.hooksPath={os.devnull}", "protocol.allow=never"):
            self._command += ["-c", setting]
        # A checkout may belong to another user; only objects are read and nothing of its settings is run.
        self._command += ["-c", f"safe.directory={self.repository}"]
        self._environment = {
            "PATH": os.environ.get("PATH", os.defpath),
            "LC_ALL": "C",
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_CEILING_DIRECTORIES": str(self.repository.parent),
            "GIT_NO_LAZY_FETCH": "1",
            "GIT_OPTIONAL_LOCKS": "0",
            "GIT_TERMINAL_PROMPT": "0",
        }
        if self._run("rev-parse", "--verify", "--quiet", "HEAD^{commit}").returncode:
            raise UserError(f"{repository} is not a git repository with a commit; give the folder that holds .git")

    def _run(self, *arguments: str) -> subprocess.CompletedProcess[bytes]:
        command = [*self._command, *arguments]
        return subprocess.run(command, env=self._environment, stdin=subprocess.DEVNULL, capture_output=True)

    def output(self, *arguments: str) -> bytes:
        """Standard output of a git command; a failure raises UserError with git's own words."""
        done = self._run(*arguments)
        if done.returncode:
            words = done.stderr.decode(errors="replace").strip()
            raise UserError(f"git {' '.join(arguments)} failed in {self.repository}: {words}; check the repository")
        return done.stdout

    def lines(self, *arguments: str) -> list[str]:
        return self.output(*arguments).decode(errors="surrogateescape").splitlines()

    def changed(self, commit: str) -> list[str]:
        """The paths of regular files that a commit added, changed or deleted; a renamed file is two."""
        raw = self.output("diff-tree", "-r", "-z", "--no-renames", "--no-commit-id", commit)
        fields = raw.decode(errors="surrogateescape").split("\0")[:-1]
        # ":100644 100755 hash hash M", then the path.
        return [
            path
            for entry, path in zip(fields[::2], fields[1::2], strict=True)
            if all(mode in ("000000", "100644", "100755") for mode in entry.lstrip(":").split()[:2])
        ]

    def texts(self, commit: str, paths: list[str]) -> dict[str, bytes | None]:
        """What each path holds in a commit; None where it is not there."""
        raw = self.output("--literal-pathspecs", "ls-tree", "-r", "-z", commit, "--", *paths)
        found: dict[str, bytes | None] = dict.fromkeys(paths)
        for entry in raw.decode(errors="surrogateescape").split("\0")[:-1]:
            head, path = entry.split("\t", 1)
            if path in found:
                found[path] = self.output("cat-file", "blob", head.split()[2])
        return found


def _reverted(git: Git, commit: str) -> Candidate | None:
    paths = [path for path in git.changed(commit) if path.endswith(".py")]
    code = [path for path in paths if not is_protected(path)]
    if not 0 < len(code) <= LARGEST or len(code) == len(paths):
        return None
    try:
        head, after, before = (
            {path: None if raw is None else raw.decode() for path, raw in git.texts(name, code).items()}
            for name in ("HEAD", commit, f"{commit}^")
        )
    except UnicodeDecodeError:
        return None  # a file in another encoding, which a candidate cannot hold
    files: dict[str, str | None] = {}
    for path in code:
        now, applies = _undone(head[path], after[path], before[path])
        if not applies:
            return None
        if now != head[path]:
            files[path] = now
    sources = {path: text for path, text in head.items() if text is not None}
    try:
        for path, text in files.items():
            parse(path, text or "")
    except (SyntaxError, ValueError):
        return None
    if not files:
        return None
    subject = git.lines("show", "--no-patch", "--no-show-signature", "--format=%s", commit)
    note = f"commit {commit[:12]} was undone: {' '.join(subject)}"
    return candidate("revert_commit", sources, files, _changed_entities(sources, files), note)


def _undone(head: str | None, after: str | None, before: str | None) -> tuple[str | None, bool]:
    """The text of HEAD without what one commit did to the file, and whether there is one."""
    if head == after:
        return before, True
    if head is None or after is None or before is None:
        return None, False
    merged = merge(split_lines(after), [split_lines(head), split_lines(before)])
    return merged, merged is not None


def _changed_entities(sources: Mapping[str, str], files: Mapping[str, str | None]) -> list[str]:
    """The ids whose text is another one, or that are only there before or after; an outer one counts too."""
    found: list[str] = []
    for path in sorted(files):
        old, new = (_segments(path, texts.get(path)) for texts in (sources, files))
        found += [name for name in dict.fromkeys([*old, *new]) if old.get(name) != new.get(name)]
    return found


def _segments(path: str, text: str | None) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for entity in entities(Source(path, text)) if text is not None else ():
        start, end = entity.span
        found.setdefault(entity.id, []).append(entity.source.text[start:end])
    return found
