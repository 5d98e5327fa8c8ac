"""Hooks of git that look at the tracked sessions."""

import os
import stat
import time

import pytest

from composer_jax.errors import UserError
from composer_jax.realtime.track.git_hooks import HOOKS, install_hooks, remove_hooks
from tests.realtime.track.tracked_repository import AGENT


def hooks(repository):
    folder = repository.root / ".git" / "hooks"
    return {path.name: path.read_text() for path in folder.iterdir() if not path.name.endswith(".sample")}


def test_a_commit_is_noticed_by_the_hook(repository, server):
    """The hook is another process, with the clock of this machine."""
    repository.now = time.time()
    install_hooks(repository.root)
    repository.tracker.start("s", server.url)
    repository.write("main.py", AGENT)
    repository.git("commit", "-q", "-a", "-m", "the agent's, while it is at work")
    repository.git("reset", "-q", "--soft", "HEAD~1")
    repository.tracker.stop("s")
    repository.git("commit", "-q", "-a", "-m", "the agent's work")
    assert server.received.wait(60), (repository.tracker.tree.folder / "hook.log").read_text()
    assert server.events()[0]["payload"] == {"added_kept": 4}


def test_hooks_of_the_user_stay(repository):
    folder = repository.root / ".git" / "hooks"
    theirs = "#!/bin/bash\nset -e\ntouch ran\nexit 0\n"
    (folder / "post-commit").write_text(theirs)
    (folder / "post-commit").chmod(0o755)
    install_hooks(repository.root)
    once = hooks(repository)
    install_hooks(repository.root)
    assert hooks(repository) == once and set(once) == set(HOOKS)
    assert once["post-commit"].startswith("#!/bin/bash\n") and once["post-commit"].endswith(theirs.split("\n", 1)[1])
    assert all(stat.S_IMODE((folder / name).stat().st_mode) & 0o111 for name in HOOKS)
    repository.write("main.py", AGENT)
    repository.git("commit", "-q", "-a", "-m", "no session is tracked")
    repository.git("checkout", "-q", "-b", "other")
    assert (repository.root / "ran").exists() and not repository.tracker.tree.folder.exists()
    assert len(remove_hooks(repository.root)) == 4
    assert hooks(repository) == {"post-commit": theirs}
    assert remove_hooks(repository.root) == []


def test_hooks_that_cannot_be_changed_are_left_alone(repository):
    program = repository.root / ".git" / "hooks" / "post-merge"
    program.write_text("#!/usr/bin/env python3\nprint()\n")
    with pytest.raises(UserError, match="post-merge is no shell script; call this from it instead: if test -d"):
        install_hooks(repository.root)
    assert set(hooks(repository)) == {"post-merge"}


@pytest.mark.parametrize("scope", ["--local", "--global"])
def test_hooks_in_another_folder_are_left_alone(repository, monkeypatch, scope):
    if scope == "--local":
        repository.git("config", "core.hooksPath", ".husky")
    else:
        (repository.root.parent / ".gitconfig").write_text("[core]\n\thooksPath = .husky\n")
    with pytest.raises(UserError, match="lie in core.hooksPath=.husky; add this line to the hooks post-commit, "):
        install_hooks(repository.root)
    assert not os.path.exists(repository.root / ".husky")
