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
    """The hook is another process, with the clock of this machine; the repository's modules do not run in it."""
    repository.write("launch/__init__.py", "raise SystemExit('a module of the repository')")
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


@pytest.mark.parametrize(
    ("text", "mode", "sentence"),
    [
        ("#!/usr/bin/env python3\nprint()\n", 0o755, "is not a shell script; call this from it instead: if test -d"),
        ("#!/bin/sh\nexit 1\n", 0o644, "is not executable, so git ignores it"),
    ],
)
def test_hooks_that_cannot_be_changed_are_left_alone(repository, text, mode, sentence):
    hook = repository.root / ".git" / "hooks" / "post-merge"
    hook.write_text(text)
    hook.chmod(mode)
    with pytest.raises(UserError, match=f"post-merge {sentence}"):
        install_hooks(repository.root)
    assert hooks(repository) == {"post-merge": text} and stat.S_IMODE(hook.stat().st_mode) == mode


@pytest.mark.parametrize("link", ["hooks", "hooks/post-commit"])
def test_files_of_the_working_tree_that_hooks_link_to_are_not_changed(repository, link):
    repository.write("scripts/post-commit", "#!/bin/sh\n")
    path = repository.root / ".git" / link
    if link == "hooks":
        path.rename(path.with_name("hooks.old"))
    path.symlink_to(repository.root / ("scripts" if link == "hooks" else "scripts/post-commit"))
    with pytest.raises(UserError, match=f"{link} is a link to .*scripts"):
        install_hooks(repository.root)
    assert [file.name for file in (repository.root / "scripts").iterdir()] == ["post-commit"]
    assert repository.read("scripts/post-commit") == "#!/bin/sh\n"


def test_a_hook_keeps_its_mode_and_may_lack_its_last_line_end(repository):
    hook = repository.root / ".git" / "hooks" / "post-commit"
    hook.write_text("#!/bin/bash")
    hook.chmod(0o700)
    install_hooks(repository.root)
    assert stat.S_IMODE(hook.stat().st_mode) == 0o700 and "launch.track" in hook.read_text()
    repository.git("config", "core.hooksPath", ".husky")
    assert len(remove_hooks(repository.root)) == 4
    assert hooks(repository) == {"post-commit": "#!/bin/bash\n"} and stat.S_IMODE(hook.stat().st_mode) == 0o700


def test_a_series_of_cherry_picks_starts_no_process_for_each(repository):
    repository.git("checkout", "-q", "-b", "other")
    for number in range(3):
        repository.write(f"{number}.py", f"number = {number}\n")
        repository.commit(str(number))
    repository.git("checkout", "-q", "main")
    install_hooks(repository.root)
    folder = repository.root / ".git" / "composer_jax" / "track"
    (folder / "sessions").mkdir(parents=True)
    repository.git("cherry-pick", "main..other")
    assert repository.read("2.py") and not (folder / "hook.log").exists()


@pytest.mark.parametrize("settings", ["", ".gitconfig", ".config/git/config"])
def test_hooks_in_another_folder_are_left_alone(repository, settings):
    if not settings:
        repository.git("config", "core.hooksPath", ".husky")
    else:
        (repository.root.parent / settings).parent.mkdir(parents=True, exist_ok=True)
        (repository.root.parent / settings).write_text("[core]\n\thooksPath = .husky\n")
    with pytest.raises(UserError, match="lie in core.hooksPath=.husky; add this line to the hooks post-commit, "):
        install_hooks(repository.root)
    assert not os.path.exists(repository.root / ".husky")
