"""A user's git working tree: snapshots of it, what changed between two, and the texts of single files.

A snapshot is a git tree of all tracked and untracked files that are not ignored, as they are on disk. It is written to
an object store of ours in the folder `composer_jax/track` of the git directory: no ref, index or object of the user's
changes, and no filter or hook runs. A snapshot costs what `git status` costs (one lstat per tracked file, one listing
of the folders) and reads only files that differ from the index; everything else costs what the named files cost.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path

from composer_jax.errors import UserError
from composer_jax.git import GitError, last_line, run_git
from composer_jax.realtime.track.agent_diff import MAX_BYTES

MAX_UNTRACKED = 20_000
"""Untracked files of a snapshot."""
RENAME_SIMILARITY = 50
"""Percent of a file's content that make it the same file under another name."""
RENAME_CANDIDATES = 1000
"""Deleted and new files above which git compares only equal contents for renames."""
STASHES = 10
"""Newest stashes that are searched for lines put aside."""
COMMITS = 20
"""Newest commits of a branch in which a session's changes are looked for."""
_REGULAR = ("100644", "100755")


@dataclasses.dataclass(frozen=True)
class ChangedFile:
    """A regular file that differs between two snapshots; a path is None where there is no file."""

    before: str | None
    after: str | None


class WorkingTree:
    """The working tree that a folder lies in.

    Attributes:
      root: the top folder.
      folder: ours, in the git directory of this working tree.
    Raises UserError: the folder is in no working tree, or git is not installed.
    """

    def __init__(self, folder: Path):
        if not folder.is_dir():
            raise UserError(f"--repository={folder} is not a folder; name a folder of a git repository")
        anywhere = {"GIT_CEILING_DIRECTORIES": "", "GIT_DISCOVERY_ACROSS_FILESYSTEM": "1"}
        try:
            asked = ("--is-inside-work-tree", "--show-object-format", "--absolute-git-dir")
            answer = run_git("rev-parse", *asked, cwd=folder, environment=anywhere)
            inside, object_format, git_folder = os.fsdecode(answer).splitlines()
        except GitError as error:
            raise UserError(
                f"--repository={folder} is in no git repository ({last_line(str(error))}); run git init there"
            ) from error
        if inside != "true":
            raise UserError(f"--repository={folder} has no working tree (a bare repository?); name a checkout of it")
        top = run_git("rev-parse", "--show-toplevel", cwd=folder, environment=anywhere)
        self.root = Path(os.fsdecode(top.removesuffix(b"\n")))
        self.git_folder = Path(git_folder)
        self.folder = self.git_folder / "composer_jax" / "track"
        self._no_object = b"0" * (64 if object_format == "sha256" else 40)

    def is_reachable(self) -> bool:
        """Whether the working tree and its git directory are still there."""
        return self.root.is_dir() and self.git_folder.is_dir()

    def snapshot(self) -> str:
        """Returns the id of a git tree of the files as they are now. Files larger than MAX_BYTES are left out.

        Raises:
          UserError: there are more than MAX_UNTRACKED untracked files, or the files keep changing.
        """
        for _ in range(3):
            try:
                return self._write_tree()
            except GitError as error:  # a file that was listed is gone
                reason = last_line(str(error))
        raise UserError(f"git cannot take a snapshot of {self.root} ({reason}); see what git status says there")

    def changes(self, before: str, after: str) -> list[ChangedFile]:
        """Returns the files that differ between two snapshots, renamed ones as one."""
        if before == after:
            return []
        similar = (f"-M{RENAME_SIMILARITY}%", f"-l{RENAME_CANDIDATES}")
        fields = iter(self._git("diff-tree", "-r", "-z", *similar, before, after).split(b"\0")[:-1])
        changed = []
        for field in fields:
            old_mode, new_mode, _, _, kind = field.decode().removeprefix(":").split(" ")
            old = new = os.fsdecode(next(fields))
            if kind[0] in "RC":
                new = os.fsdecode(next(fields))
            file = ChangedFile(old if old_mode in _REGULAR else None, new if new_mode in _REGULAR else None)
            if file.before is not None or file.after is not None:
                changed.append(file)
        return changed

    def contents(self, tree: str, paths: Sequence[str]) -> dict[str, bytes]:
        """Returns the regular files among `paths` in a tree or commit."""
        if not paths:
            return {}
        names = b"".join(b"%s:%s\n" % (tree.encode(), os.fsencode(path)) for path in paths if "\n" not in path)
        output, contents, position = self._git("cat-file", "--batch", stdin=names), {}, 0
        for path in (path for path in paths if "\n" not in path):
            line_end = output.index(b"\n", position)
            header = output[position:line_end]
            position = line_end + 1
            if header.endswith((b" missing", b" ambiguous")):
                continue
            kind, size = header.split(b" ")[-2:]
            if kind == b"blob":
                contents[path] = output[position : position + int(size)]
            position += int(size) + 1
        return contents

    def find_filtered(self, paths: Iterable[str]) -> set[str]:
        """Returns the files that .gitattributes gives a filter: git stores other contents of them than are on disk."""
        names = b"".join(os.fsencode(path) + b"\0" for path in paths)
        fields = self._git("check-attr", "-z", "--stdin", "filter", stdin=names).split(b"\0")[:-1]
        values = zip(fields[::3], fields[2::3], strict=True)
        return {os.fsdecode(path) for path, value in values if value not in (b"unspecified", b"unset")}

    def read(self, path: str) -> bytes | None:
        """Returns a file of the working tree; None where there is no regular file, or one reached through a link.

        Of a file larger than MAX_BYTES, that many bytes and one more.

        Raises UserError: the file may not be read.
        """
        file = self.root / path
        try:
            if file.parent.resolve() != self.root.resolve() / Path(path).parent:
                return None
            if not stat.S_ISREG(file.lstat().st_mode):
                return None
            with file.open("rb") as stream:
                return stream.read(MAX_BYTES + 1)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise UserError(f"cannot read {file} ({error.strerror}); let the tracker read it") from error

    def find_renames(self, tree: str, paths: Iterable[str]) -> dict[str, str]:
        """Returns the new paths of files of a snapshot that were renamed since, RENAME_SIMILARITY given."""
        wanted = set(paths)
        changed = self.changes(tree, self.snapshot())
        return {
            file.before: file.after
            for file in changed
            if file.before in wanted and file.after is not None and file.after != file.before
        }

    def branch(self) -> str:
        """Returns the ref of the current branch; the commit where HEAD is detached, as during a rebase."""
        head = (self.git_folder / "HEAD").read_text(encoding="utf-8", errors="surrogateescape").strip()
        if head != "ref: refs/heads/.invalid":
            return head.removeprefix("ref: ")
        try:  # HEAD is in a reftable
            return self._git("symbolic-ref", "--quiet", "HEAD").decode(errors="surrogateescape").strip()
        except GitError:
            return str(self.head())

    def head(self) -> str | None:
        """Returns the id of the current commit; None before the first."""
        try:
            return self._git("rev-parse", "--verify", "--quiet", "HEAD^{commit}").decode().strip()
        except GitError:
            return None

    def commits(self, paths: Sequence[str], since: float) -> list[str]:
        """Returns the newest COMMITS of the current branch that changed one of these files since a time."""
        limits = (f"--max-count={COMMITS}", f"--max-age={int(since)}")
        names = b"".join(os.fsencode(path) + b"\n" for path in paths if "\n" not in path)
        try:
            commits = self._git("--literal-pathspecs", "rev-list", *limits, "--stdin", stdin=b"HEAD\n--\n" + names)
            return commits.decode().split()
        except GitError:  # no commit
            return []

    def commit_time(self, commit: str) -> int:
        """Returns the Unix seconds at which a commit was made."""
        return int(self._git("log", "-1", "--format=%ct", commit))

    def stashes(self) -> list[tuple[str, str | None]]:
        """Returns the newest stashes: (commit, commit on which it was made), or None for one of untracked files."""
        try:
            commits = self._git("log", "--walk-reflogs", f"-{STASHES}", "--format=%H %P", "refs/stash", "--").decode()
        except GitError:  # no stash
            return []
        pairs: list[tuple[str, str | None]] = []
        for line in commits.splitlines():
            commit, base, _, *untracked = line.split(" ")
            pairs += [(commit, base), *((other, None) for other in untracked)]
        return pairs

    def fingerprint(self, paths: Iterable[str]) -> tuple[tuple[int, int], ...]:
        """Returns what differs after a commit, a checkout or a change of one of these files; starts no git."""
        refs = (self.git_folder / name for name in ("HEAD", "logs/HEAD", "reftable/tables.list"))
        files = (*refs, *(self.root / path for path in paths))
        times = []
        for file in files:
            try:
                status = file.lstat()
                times.append((status.st_mtime_ns, status.st_size))
            except (FileNotFoundError, NotADirectoryError):
                times.append((0, 0))
        return tuple(times)

    def _write_tree(self) -> str:
        index = self.folder / "index"
        for leftover in (index, self.folder / "index.lock"):  # of a process that was killed: others wait for our lock
            leftover.unlink(missing_ok=True)
        original = Path(os.fsdecode(self._git("rev-parse", "--git-path", "index").removesuffix(b"\n")))
        original = self.root / original
        self._prepare_objects()
        if original.exists():
            shutil.copy2(original, index)  # with its time, by which git knows entries that changed within a second
        fields = self._git("diff-files", "--raw", "-z", "--no-renames", "--ignore-submodules=all").split(b"\0")[:-1]
        regular, removed = [], []
        for path in (*dict.fromkeys(fields[1::2]), *self._untracked()):  # each once: of a conflict are several
            file = self.root / os.fsdecode(path)
            if b"\n" in path or path.startswith(b'"') or not _is_small_file(file):
                removed.append(path)
            else:
                regular.append((path, "100755" if os.access(file, os.X_OK) else "100644"))
        names = b"".join(path + b"\n" for path, _ in regular)
        hashes = self._git("hash-object", "-w", "--no-filters", "--stdin-paths", stdin=names).split()
        entries = [b"0 %s\t%s\0" % (self._no_object, path) for path in removed]
        for (path, mode), name in zip(regular, hashes, strict=True):
            entries.append(b"%s %s\t%s\0" % (mode.encode(), name, path))
        own = {"GIT_INDEX_FILE": str(index)}
        self._git("update-index", "--add", "-z", "--index-info", stdin=b"".join(entries), environment=own)
        tree = self._git("write-tree", "--missing-ok", environment=own).decode().strip()
        index.unlink(missing_ok=True)
        return tree

    def _untracked(self) -> list[bytes]:
        """Untracked files that neither the repository nor the user's own settings ignore."""
        settings = self.folder / "settings"
        include = (f"path = {json.dumps(str(file), ensure_ascii=False)}\n" for file in user_settings())
        settings.write_text("[include]\n" + "".join(include), errors="surrogateescape")
        own = {"HOME": str(Path.home()), "XDG_CONFIG_HOME": os.environ.get("XDG_CONFIG_HOME", "")}
        own["GIT_CONFIG_GLOBAL"] = str(settings)
        listed = self._git("ls-files", "-z", "--others", "--exclude-standard", environment=own).split(b"\0")[:-1]
        if len(listed) > MAX_UNTRACKED:
            raise UserError(
                f"{self.root} has {len(listed)} untracked files, more than {MAX_UNTRACKED}; add those that nobody "
                "edits to .gitignore"
            )
        return listed

    def _prepare_objects(self) -> None:
        """Creates the object store of the snapshots, which finds the objects of the user's, too."""
        objects = self.folder / "objects"
        if (objects / "info" / "alternates").exists():
            return
        theirs = Path(os.fsdecode(self._git("rev-parse", "--git-path", "objects", own=False).removesuffix(b"\n")))
        try:
            (objects / "info").mkdir(parents=True, exist_ok=True, mode=0o700)
            (objects / "info" / "alternates").write_bytes(os.fsencode((self.root / theirs).resolve()) + b"\n")
        except OSError as error:
            raise UserError(
                f"cannot write {objects} ({error.strerror}); the tracker keeps its state there, so let it"
            ) from error

    def _git(
        self, *arguments: str, stdin: bytes = b"", environment: dict[str, str] | None = None, own: bool = True
    ) -> bytes:
        objects = {"GIT_OBJECT_DIRECTORY": str(self.folder / "objects")}
        has_objects = own and (self.folder / "objects" / "info" / "alternates").exists()
        return run_git(
            *arguments,
            cwd=self.root,
            stdin=stdin,
            environment={**(objects if has_objects else {}), **(environment or {})},
        )


def user_settings() -> list[Path]:
    """Returns the files in which git looks for the user's settings; the later ones have precedence."""
    folder = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return [folder / "git" / "config", Path.home() / ".gitconfig"]


def _is_small_file(file: Path) -> bool:
    try:
        status = file.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return stat.S_ISREG(status.st_mode) and status.st_size <= MAX_BYTES
