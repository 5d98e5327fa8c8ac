"""What a user does after an agent, in a real repository, and how its lines then count."""

import random

import pytest

from tests.realtime.track.line_history import History, flat, formatted
from tests.realtime.track.tracked_repository import AGENT, SOURCE

KEPT = dict(added=4, added_kept=4, deleted=4, deleted_kept=4, others=6, others_kept=6)
ALL_CENSORED = dict(censored=8)

FORMATTED = (
    AGENT.replace("    ", "  ")
    .replace("sum(value for value in values if value is not None)", "sum(\n    value\n    for value in values\n  )")
    .replace("value\n    for value in values\n", "value for value in values if value is not None\n")
    .replace('second(name, default="nothing")', "second(\n    name,\n    default='nothing',\n  )")
    .replace("\n", "\r\n")
)


def commit(repository):
    repository.commit("the agent's work")


def rebase(repository):
    repository.commit("the agent's work")
    repository.git("checkout", "-q", "-b", "other", "HEAD~1")
    repository.write("main.py", '"""What it is about."""\n\n' + SOURCE)
    repository.commit("other")
    repository.git("checkout", "-q", "main")
    repository.git("rebase", "-q", "other")
    assert repository.read().startswith('"""What') and "third" in repository.read()


def squash_merge(repository):
    repository.git("checkout", "-q", "-b", "feature")
    repository.commit("the agent's work")
    repository.write("more.py", "more = 1\n")
    repository.commit("more")
    repository.git("checkout", "-q", "main")
    repository.git("merge", "-q", "--squash", "feature")
    repository.git("commit", "-q", "-m", "squashed")
    repository.git("branch", "-q", "-D", "feature")


def amend(repository):
    repository.commit("the agent's work")
    repository.write("main.py", repository.read() + "\n\nmore = 1\n")
    repository.git("commit", "-q", "--amend", "-a", "-m", "better")


def rename(repository):
    repository.git("mv", "main.py", "renamed.py")
    repository.replace("import os\n", "import os\nimport sys\n", "renamed.py")


def move_uncommitted(repository):
    repository.write("folder/renamed.py", repository.read())
    (repository.root / "main.py").unlink()


def rename_and_back(repository):
    (repository.root / "main.py").rename(repository.root / "renamed.py")
    repository.tracker.check("s")
    (repository.root / "renamed.py").rename(repository.root / "main.py")


def rename_on_another_branch(repository):
    repository.commit("the agent's work")
    repository.git("checkout", "-q", "-b", "feature")
    repository.git("mv", "main.py", "renamed.py")
    repository.commit("renamed")
    repository.tracker.check("s")
    repository.git("checkout", "-q", "main")


def format_file(repository):
    repository.write("main.py", FORMATTED)


def branch_and_back(repository):
    repository.commit("the agent's work")
    repository.git("checkout", "-q", "-b", "other", "HEAD~1")
    repository.git("checkout", "-q", "main")


def new_branch_with_the_work(repository):
    repository.git("checkout", "-q", "-b", "feature")
    repository.commit("the agent's work")


def stash_and_pop(repository):
    repository.git("stash", "-q")
    repository.git("stash", "pop", "-q")


def revert_and_rewrite(repository):
    repository.write("main.py", SOURCE)
    repository.tracker.check("s")
    repository.write("main.py", AGENT)


def move_function(repository):
    start, function = AGENT.index("def third"), AGENT[AGENT.index("def third") :]
    repository.write("main.py", AGENT[:start].replace("import os\n", f"import os\n\n\n{function}"))


def merge_conflict(repository):
    repository.commit("the agent's work")
    repository.git("checkout", "-q", "-b", "other", "HEAD~1")
    repository.write("other.py", "other = 1\n")
    repository.replace("import os", "import sys")
    repository.commit("other")
    repository.git("checkout", "-q", "main")
    repository.replace("import os", "import json")
    repository.git("commit", "-q", "-a", "-m", "json")
    repository.git("merge", "-q", "other")
    assert "<<<<<<<" in repository.read()


@pytest.mark.parametrize(
    "act",
    [
        commit,
        rebase,
        squash_merge,
        amend,
        rename,
        move_uncommitted,
        rename_and_back,
        rename_on_another_branch,
        format_file,
        branch_and_back,
        new_branch_with_the_work,
        stash_and_pop,
        revert_and_rewrite,
        move_function,
    ],
)
def test_the_agents_lines_are_kept(repository, act):
    repository.session()
    act(repository)
    assert repository.edited() == KEPT
    assert len(repository.events("undo")) == (act is revert_and_rewrite)


def test_lines_between_marks_of_a_conflict_are_kept(repository):
    repository.session()
    merge_conflict(repository)
    assert repository.edited() == KEPT | dict(others_kept=5)


def checkout_of_another_branch(repository):
    repository.commit("the agent's work")
    repository.git("checkout", "-q", "-b", "other", "HEAD~1")


def checkout_without_the_file(repository):
    repository.commit("the agent's work")
    repository.git("checkout", "-q", "--orphan", "other")
    repository.git("rm", "-q", "-r", "-f", ".")


def detached_checkout(repository):
    repository.commit("the agent's work")
    repository.git("checkout", "-q", "--detach", "HEAD~1")


def stash(repository):
    repository.git("stash", "-q")


def stash_on_another_branch(repository):
    repository.git("stash", "-q")
    repository.git("checkout", "-q", "-b", "other")


def make_binary(repository):
    repository.write("main.py", b"\0" * 100)


def stopped_rebase(repository):
    repository.commit("the agent's work")
    repository.git("checkout", "-q", "-b", "other", "HEAD~1")
    repository.replace("    total = 0\n", "    total = 1\n")
    repository.commit("conflict")
    repository.git("checkout", "-q", "main")
    repository.git("rebase", "-q", "other")
    assert "<<<<<<<" in repository.read()
    repository.git("checkout", "-q", "--ours", "main.py")  # in a rebase, that of the other branch


@pytest.mark.parametrize(
    "act",
    [
        checkout_of_another_branch,
        checkout_without_the_file,
        detached_checkout,
        stash_on_another_branch,
        make_binary,
        stopped_rebase,
    ],
)
def test_nobody_can_judge_the_agents_lines(repository, act):
    repository.session()
    act(repository)
    assert repository.edited() == ALL_CENSORED
    assert repository.events("undo") == []


def test_stashed_lines_are_censored_and_others_are_not(repository):
    repository.session()
    stash(repository)
    assert repository.edited() == ALL_CENSORED | dict(others=6, others_kept=6)
    assert repository.events("undo") == []


def test_lines_of_an_older_stash_are_lost(repository):
    repository.write("main.py", AGENT)
    repository.git("stash", "-q")
    repository.session()
    repository.write("main.py", SOURCE)
    assert repository.edited() == dict(added=4, deleted=4, others=6, others_kept=6)


def test_lines_that_a_stash_of_something_else_also_has_are_lost(repository):
    repository.session()
    repository.commit("the agent's work")
    repository.replace("import os", "import os, sys")
    repository.git("stash", "-q")
    repository.write("main.py", SOURCE)
    assert repository.edited() == dict(added=4, deleted=4, others=6, others_kept=6)


def test_an_untracked_file_in_a_stash_is_censored(repository):
    repository.session({"new.py": "first = call(1)\nsecond = call(2)\n"})
    repository.git("stash", "-q", "-u")
    assert repository.edited() == dict(censored=2)


def test_a_new_branch_that_takes_the_lines_along_can_lose_them(repository):
    repository.session()
    new_branch_with_the_work(repository)
    assert repository.edited() == KEPT
    repository.write("main.py", SOURCE)
    assert repository.edited(3600) == dict(added=4, deleted=4, others=6, others_kept=6)


def reset(repository):
    repository.commit("the agent's work")
    repository.git("reset", "-q", "--hard", "HEAD~1")


def revert(repository):
    repository.commit("the agent's work")
    repository.git("revert", "--no-edit", "HEAD")


def revert_on_a_new_branch(repository):
    repository.commit("the agent's work")
    repository.git("checkout", "-q", "-b", "new")
    repository.git("revert", "--no-edit", "HEAD")
    repository.write("other.py", "other = 1\n")
    repository.commit("other")


def checkout_of_the_file(repository):
    repository.git("checkout", "-q", "--", "main.py")


@pytest.mark.parametrize("act", [reset, revert, revert_on_a_new_branch, checkout_of_the_file])
def test_restoring_the_files_loses_all_and_is_an_undo(repository, act):
    repository.session()
    act(repository)
    assert repository.edited() == dict(added=4, deleted=4, others=6, others_kept=6)
    (undo,) = repository.events("undo")
    assert len(undo["hunks"]) == 2 and all(len(bytes.fromhex(digest)) == 32 for digest in undo["hunks"])


def test_lines_are_lost_on_a_detached_head_too(repository):
    repository.git("checkout", "-q", "--detach")
    repository.session()
    assert repository.edited() == KEPT
    checkout_of_the_file(repository)
    assert repository.edited(3600) == dict(added=4, deleted=4, others=6, others_kept=6)


def test_restoring_the_files_on_a_detached_head_is_an_undo(repository):
    repository.git("checkout", "-q", "--detach")
    repository.session()
    checkout_of_the_file(repository)
    assert repository.edited() == dict(added=4, deleted=4, others=6, others_kept=6)
    assert len(repository.events("undo")) == 1


def test_the_hashes_of_an_undo_are_bounded(repository):
    before, after = ("".join(f"line_{i} = {i if i % 2 else old}\n" for i in range(1200)) for old in (-1, -2))
    for path in ("one.py", "two.py"):
        repository.write(path, before)
    repository.session({"one.py": after, "two.py": after})
    for path in ("one.py", "two.py"):
        repository.write(path, before)
    assert repository.edited() == dict(added=1200, deleted=1200, others=1200, others_kept=1200)
    assert len(set(repository.events("undo")[0]["hunks"])) == 1000


def test_restoring_one_file_and_stashing_the_other_is_no_undo(repository):
    repository.write("other.py", SOURCE)
    repository.commit("other")
    repository.session({"main.py": AGENT, "other.py": AGENT})
    repository.git("stash", "push", "-q", "other.py")
    repository.git("checkout", "-q", "main.py")
    assert repository.edited() == dict(added=4, deleted=4, censored=8, others=12, others_kept=12)
    assert repository.events("undo") == []


def test_restoring_later_than_ten_minutes_is_no_undo(repository):
    repository.session()
    assert repository.edited() == KEPT
    repository.write("main.py", SOURCE)
    assert repository.edited(3600) == dict(added=4, deleted=4, others=6, others_kept=6)
    assert repository.events("undo") == []


def test_a_deleted_file_loses_what_was_added(repository):
    repository.session()
    (repository.root / "main.py").unlink()
    assert repository.edited() == dict(added=4, deleted=4, deleted_kept=4, others=6)


def test_partly_lost(repository):
    repository.session()
    repository.replace("    return text.rjust(width, fill)\n", "    return text.ljust(width, fill)\n")
    repository.replace("import os\n\n\n", "import os\n\n\n    total = 0\n")
    repository.replace("    return default\n", "")
    assert repository.edited() == dict(added=4, added_kept=3, deleted=4, deleted_kept=4, others=6, others_kept=5)


def test_a_deleted_line_that_is_back_counts(repository):
    repository.session()
    repository.replace("    return sum(", "    total = 0\n    return sum(")
    assert repository.edited() == KEPT | dict(deleted_kept=3)


def test_new_deleted_and_renamed_files_of_the_agent(repository):
    repository.write("old.py", "gone = one(1)\ngone = two(2)\n")
    repository.commit("old")
    repository.tracker.start("s", "http://127.0.0.1:9")
    repository.git("mv", "main.py", "other.py")
    repository.replace("return total", "return total or None", "other.py")
    repository.write("new.py", "fresh = call(1)\n")
    (repository.root / "old.py").unlink()
    repository.tracker.stop("s")
    kept = dict(added=2, added_kept=2, deleted=3, deleted_kept=3, others=9, others_kept=9)
    assert repository.edited() == kept
    repository.write("old.py", "gone = one(1)\n")
    (repository.root / "new.py").unlink()
    assert repository.edited(3600) == kept | dict(added_kept=1, deleted_kept=2)


def test_dirty_files_before_the_start_are_not_the_agents(repository):
    repository.replace("total = 0", "total = 1.5")
    repository.write("untracked.py", "mine = call(1)\nalso = mine(2)\n")
    repository.session({"untracked.py": "mine = call(1)\nalso = mine(2)\nagents = call(3)\n"})
    assert repository.edited() == dict(added=1, added_kept=1, others=2, others_kept=2)


def test_a_session_without_edits_is_measured_too(repository):
    repository.session({})
    assert repository.edited() == {}


def test_a_session_that_goes_on_counts_all_its_lines_and_none_of_the_users(repository):
    repository.session()
    repository.now += 50
    repository.replace("import os\n", "import os\nimport json as the_users\n")
    repository.tracker.start("s", "http://127.0.0.1:9")
    repository.replace('"nothing"', "None")
    repository.now += 50
    repository.tracker.stop("s")
    assert repository.edited() == KEPT | dict(others=7, others_kept=7)


def test_a_file_that_the_user_renames_between_two_stops_keeps_its_authors(repository):
    repository.session({"utils.py": AGENT})
    repository.git("add", "utils.py")
    repository.git("mv", "utils.py", "helpers.py")
    repository.tracker.start("s", "http://127.0.0.1:9")
    repository.write("helpers.py", AGENT + "last = call(1)\n")
    repository.tracker.stop("s")
    assert repository.edited() == dict(added=11, added_kept=11)


def test_a_file_that_the_agent_renames_twice_has_only_its_new_lines(repository):
    repository.tracker.start("s", "http://127.0.0.1:9")
    repository.git("mv", "main.py", "n.py")
    repository.tracker.stop("s")
    repository.tracker.start("s", "http://127.0.0.1:9")
    repository.git("mv", "n.py", "o.py")
    repository.write("o.py", SOURCE + "last = call(1)\n")
    repository.tracker.stop("s")
    assert repository.edited() == dict(added=1, added_kept=1, others=10, others_kept=10)


LEFT_OUT = {
    "package-lock.json": b"{}\n",
    "app.min.js": b"x=1\n",
    "api_pb2.py": b"x = 1\n",
    "image.png": b"\x89PNG\0\0",
    "made.go": b"// Code generated by a tool. DO NOT EDIT.\npackage made\n",
    "huge.txt": b"line of text\n" * 100_000,
    "many.py": b"".join(b"value_%d = %d\n" % (index, index) for index in range(1001)),
}


def test_what_is_no_source_is_left_out(repository):
    repository.write("huge.txt", b"line of text\n" * 10)
    repository.commit("huge")
    repository.session(LEFT_OUT | {"main.py": AGENT})
    session = repository.tracker.store.load("s")
    assert set(session.left_out) == set(LEFT_OUT)
    assert repository.edited() == KEPT


def test_links_and_submodules_are_no_files(repository, tmp_path):
    secret = tmp_path / "outside.py"
    secret.write_text("outside = call(1)\n")
    inner = repository.root / "inner"
    inner.mkdir()
    repository.tracker.start("s", "http://127.0.0.1:9")
    (repository.root / "link.py").symlink_to(secret)
    repository.git("init", "-q", "inner")
    repository.write("inner/a.py", "inner = call(1)\n")
    repository.write("main.py", AGENT)
    repository.tracker.stop("s")
    assert repository.edited() == KEPT
    (repository.root / "main.py").unlink()
    (repository.root / "main.py").symlink_to(secret)
    assert repository.edited(3600) == dict(added=4, deleted=4, deleted_kept=4, others=6)


def test_a_file_that_grew_is_not_read_whole(repository):
    repository.session()
    with (repository.root / "main.py").open("wb") as file:
        file.truncate(1 << 40)
    assert repository.edited() == ALL_CENSORED


def test_a_folder_that_became_a_link_is_not_followed(repository, tmp_path):
    repository.session({"folder/a.py": "line = call(1)\n"})
    (repository.root / "folder").rename(tmp_path / "outside")
    (repository.root / "folder").symlink_to(tmp_path / "outside")
    assert repository.edited() == dict(added=1)


def test_random_histories_of_a_file_in_git(repository):
    """With a commit, a new name and a formatter, each in a part of the histories."""
    for seed in range(16):
        chance = random.Random(seed)
        history = History(chance, duplicates=False)
        history.play()
        name, path = f"s{seed}", f"file_{seed}.py"
        repository.write(path, flat(history.before))
        repository.commit("before")
        repository.session({path: flat(history.after)}, name)
        if seed % 2:
            repository.commit("after")
        if seed % 3 == 0:
            (repository.root / path).rename(repository.root / f"renamed_{path}")
            repository.tracker.check(name)
            path = f"renamed_{path}"
        repository.write(path, formatted(history.later, chance) if seed % 4 else flat(history.later))
        repository.commit("later")
        edited = repository.edited(name=name)
        counts = tuple(edited.get(field, 0) for field in ("added", "added_kept", "deleted", "deleted_kept"))
        assert counts == history.truth(), seed
        assert "censored" not in edited


@pytest.mark.parametrize(
    "text", ["naïve = 'grüße'\nmore = 1\n".encode("latin-1"), "π = 'ж'\r\nmore = 1\r\n".encode(), b"a = 1\rb = 2\r"]
)
def test_encodings_and_line_ends(repository, text):
    repository.session({"new file é.py": text})
    assert repository.edited() == dict(added=2, added_kept=2)
    repository.write("new file é.py", text.replace(b"\r\n", b"\n").replace(b"1", b"3"))
    assert repository.edited(3600) == dict(added=2, added_kept=1)


def test_a_linked_working_tree_has_sessions_of_its_own(repository, tmp_path):
    repository.session()
    repository.git("worktree", "add", "-q", "-b", "other", str(tmp_path / "linked"))
    with pytest.raises(Exception, match="not tracked"):
        type(repository.tracker)(tmp_path / "linked").check("s")


def test_a_binary_file_where_the_agent_deleted_one_is_censored(repository):
    (repository.root / "main.py").unlink()
    repository.git("checkout", "-q", "main.py")
    repository.tracker.start("s", "http://127.0.0.1:9")
    (repository.root / "main.py").unlink()
    repository.tracker.stop("s")
    repository.git("checkout", "-q", "-b", "other")
    repository.write("main.py", b"\0")
    assert repository.edited() == dict(censored=10)
