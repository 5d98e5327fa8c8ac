"""Checkouts of repositories at a commit, from local mirrors: files only, without a history to read."""

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from composer_jax.errors import UserError
from composer_jax.git import GitError, run_git

_NAME = re.compile(r"[A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+")
_COMMIT = re.compile(r"[0-9a-fA-F]{7,64}")


class Mirrors:
    """A folder of git repositories, named owner__name or owner/name (bare ones may end in .git).

    store: the folder that caches checkouts, one folder per commit.
    """

    def __init__(self, folder: Path, store: Path):
        if not folder.is_dir():
            raise UserError(
                f"the folder {folder} of repositories does not exist; give one that holds owner__name or owner/name"
            )
        self.folder = folder
        self.store = store

    def checkout(self, repo: str, commit: str) -> Path:
        """Returns a read-only folder with the files of `repo` ("owner/name") at `commit`, without .git.

        Raises UserError when the mirror does not exist or lacks the commit.
        """
        if not _NAME.fullmatch(repo) or ".." in repo or not _COMMIT.fullmatch(commit):
            raise UserError(f"{repo!r} at {commit!r} is not a repository owner/name and a commit hash")
        flat = repo.replace("/", "__")
        target = self.store / f"{flat}@{commit}"
        if target.is_dir():
            return target
        mirror = self._mirror(repo, flat)
        with new_folder(self.store) as files:
            index = str(files.with_name("index"))
            where = {"GIT_DIR": str(mirror), "GIT_WORK_TREE": str(files), "GIT_INDEX_FILE": index}
            try:
                run_git("read-tree", f"{commit}^{{commit}}", cwd=files, environment=where)
                run_git("checkout-index", "--all", "--force", cwd=files, environment=where)
            except GitError as error:
                raise UserError(f"{mirror} has no readable commit {commit}; fetch it ({error})") from None
            return move_into_store(files, target)

    def _mirror(self, repo: str, flat: str) -> Path:
        for name in (flat, repo):
            for path in (self.folder / name / ".git", self.folder / name, self.folder / f"{name}.git"):
                if (path / "HEAD").is_file():
                    return path.resolve()
        raise UserError(f"{self.folder} holds no git repository {flat} or {repo}; clone it there")


@contextmanager
def new_folder(store: Path) -> Iterator[Path]:
    """Context with an empty folder inside a store; what move_into_store has not taken is deleted at the end."""
    store.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=store, prefix=".unfinished-") as scratch:
        files = Path(scratch, "files")
        files.mkdir()
        yield files


def move_into_store(finished: Path, target: Path) -> Path:
    """Renames a finished folder to `target` and returns `target`.

    The folder stays where it is if another process was faster.
    """
    if target.is_dir():
        return target  # a rename would replace an empty folder that others use
    try:
        finished.rename(target)
    except OSError:
        if not target.is_dir():
            raise
    return target
