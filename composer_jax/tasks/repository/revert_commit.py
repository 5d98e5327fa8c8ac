"""Candidates that undo commits of the repository's history: the code before a commit under the tests of the commit."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from composer_jax.errors import UserError
from composer_jax.git import GitError, read_git, run_git
from composer_jax.tasks.patches import merge_versions, split_lines
from composer_jax.tasks.repository.candidate import Candidate, make_candidate
from composer_jax.tasks.repository.entities import parse_entities
from composer_jax.tasks.repository.source import SourceFile, parse
from composer_jax.tasks.suites.protected import is_protected

MAX_FILES = 8
"""Most source files that a commit may change."""


def revert_commits(repository: Path, limit: int = 500) -> Iterator[Candidate]:
    """The candidates of the last `limit` commits before HEAD, merges excepted, newest first.

    A commit counts when it changed Python files of both code and tests (see is_protected), at most MAX_FILES of code,
    and no later commit touched the same lines. Other files, such as a changelog, stay as they are.
    Raises UserError where `repository` is not the top of a git repository.
    """
    if not has_commit(repository):
        raise UserError(f"{repository} is not a git repository with a commit; give the folder that holds .git")
    options = ("--no-merges", "--min-parents=1", f"--max-count={limit}")
    for commit in read_git("rev-list", *options, "HEAD", cwd=repository).decode().splitlines():
        reverted = _revert(repository, commit)
        if reverted is not None:
            yield reverted


def has_commit(repository: Path) -> bool:
    """Whether a folder is the top of a git repository with a commit."""
    try:
        run_git("rev-parse", "--verify", "--quiet", "HEAD^{commit}", cwd=repository)
    except GitError:
        return False
    return True


def _revert(repository: Path, commit: str) -> Candidate | None:
    paths = [path for path in _changed_paths(repository, commit) if path.endswith(".py")]
    code = [path for path in paths if not is_protected(path)]
    if not 0 < len(code) <= MAX_FILES or len(code) == len(paths):
        return None
    try:
        head, after, before = (
            {path: None if raw is None else raw.decode() for path, raw in _read_files(repository, name, code).items()}
            for name in ("HEAD", commit, f"{commit}^")
        )
    except UnicodeDecodeError:
        return None  # a candidate holds UTF-8 texts only
    files: dict[str, str | None] = {}
    for path in code:
        text, applies = _undo(head[path], after[path], before[path])
        if not applies:
            return None
        if text != head[path]:
            files[path] = text
    sources = {path: text for path, text in head.items() if text is not None}
    try:
        for path, text in files.items():
            parse(path, text or "")
    except (SyntaxError, ValueError):
        return None
    if not files:
        return None
    subject = read_git("show", "--no-patch", "--format=%s", commit, cwd=repository).decode(errors="surrogateescape")
    note = f"commit {commit[:12]} was undone: {' '.join(subject.splitlines())}"
    return make_candidate("revert_commit", sources, files, _changed_entities(sources, files), note)


def _changed_paths(repository: Path, commit: str) -> list[str]:
    """The paths of regular files that a commit added, changed or deleted; a renamed file counts as two."""
    raw = read_git("diff-tree", "-r", "-z", "--no-renames", "--no-commit-id", commit, cwd=repository)
    fields = raw.decode(errors="surrogateescape").split("\0")[:-1]
    # ":100644 100755 hash hash M", then the path.
    return [
        path
        for entry, path in zip(fields[::2], fields[1::2], strict=True)
        if all(mode in ("000000", "100644", "100755") for mode in entry.lstrip(":").split()[:2])
    ]


def _read_files(repository: Path, commit: str, paths: list[str]) -> dict[str, bytes | None]:
    """The content of each path in a commit; None where the commit lacks it."""
    raw = read_git("--literal-pathspecs", "ls-tree", "-r", "-z", commit, "--", *paths, cwd=repository)
    contents: dict[str, bytes | None] = dict.fromkeys(paths)
    for entry in raw.decode(errors="surrogateescape").split("\0")[:-1]:
        head, path = entry.split("\t", 1)
        if path in contents:
            contents[path] = read_git("cat-file", "blob", head.split()[2], cwd=repository)
    return contents


def _undo(head: str | None, after: str | None, before: str | None) -> tuple[str | None, bool]:
    """(the text of HEAD without the commit's change of the file, whether the change can be undone)."""
    if head == after:
        return before, True
    if head is None or after is None or before is None:
        return None, False
    merged = merge_versions(split_lines(after), [split_lines(head), split_lines(before)])
    return merged, merged is not None


def _changed_entities(sources: Mapping[str, str], files: Mapping[str, str | None]) -> list[str]:
    """The ids of entities whose text differs or that exist on one side only, outer entities included."""
    names: list[str] = []
    for path in sorted(files):
        old, new = (_segments(path, texts.get(path)) for texts in (sources, files))
        names += [name for name in dict.fromkeys([*old, *new]) if old.get(name) != new.get(name)]
    return names


def _segments(path: str, text: str | None) -> dict[str, list[str]]:
    segments: dict[str, list[str]] = {}
    for entity in parse_entities(SourceFile(path, text)) if text is not None else ():
        start, end = entity.span
        segments.setdefault(entity.id, []).append(entity.source.text[start:end])
    return segments
