"""Servers that refuse or are busy, agents that do not start, and sessions that cannot be measured."""

import pytest

from composer_jax.errors import UserError
from composer_jax.realtime.track import event_sender
from composer_jax.realtime.track.event_sender import ServerUnavailable, queued_event
from tests.realtime.track.tracked_repository import AGENT, NOWHERE


def test_batches_that_the_server_took_are_not_sent_again(repository, monkeypatch):
    repository.session()
    repository.now += 86400
    session = repository.tracker.store.load("s")
    for i in range(700):
        session.add(queued_event("s", "tests_run", "", repository.now, {"exit_code": i, "phase": "after"}, 0.0))
    repository.tracker.store.save(session)
    requests = []

    def limited(*arguments):  # 500 events at once, as the server's limit of a session
        requests.append(arguments)
        if len(requests) % 6 == 0:
            raise ServerUnavailable("429")

    monkeypatch.setattr(event_sender, "_post", limited)
    repository.tracker.check("s")
    assert len(requests) == 6 and len(repository.queue()) == 203  # 3 measurements among them
    repository.now += 60
    repository.tracker.check("s")
    assert len(requests) == 9 and repository.tracker.store.load("s") is None


def test_the_exit_code_is_the_agents_also_where_the_server_refuses(repository, server, tmp_path):
    (tmp_path / "agent.py").write_text(AGENT)
    server.answer = (404, "", {})
    command = ["sh", "-c", f"cp {tmp_path}/agent.py {repository.root}/main.py; exit 3"]

    def sleep(seconds):
        repository.now += seconds

    assert repository.tracker.run("s", command, server.url, sleep=sleep) == 3
    assert "does not know session 's' (404)" in repository.reports[-1]
    assert len(repository.queue()) == 1


def test_an_agent_that_does_not_start_is_not_at_work(repository, tmp_path):
    program = tmp_path / "agent"
    program.write_bytes(b"\0\1\2")
    program.chmod(0o755)
    for _ in range(2):
        with pytest.raises(UserError, match="agent' does not start"):
            repository.tracker.run("s", [str(program)], NOWHERE)
    assert repository.tracker.store.load_all() == []


def test_a_session_that_cannot_be_measured_does_not_keep_others_back(repository):
    repository.session({"b.py": "first = call(1)\n"}, name="bad")
    repository.now += 1
    repository.session(name="good")
    bad = repository.tracker.store.load("bad")
    bad.tree = "1" * 40  # a snapshot that git has lost; it is read to see where the file was renamed to
    repository.tracker.store.save(bad)
    (repository.root / "b.py").unlink()
    repository.now += 600
    with pytest.raises(UserError, match="session 'bad' cannot be measured"):
        repository.tracker.check()
    assert [payload["added_kept"] for payload in repository.events("edited_after", "good")] == [4]


def test_branches_in_a_reftable_are_asked_of_git(repository, monkeypatch):
    """HEAD is the same file on each branch then; git before 2.45 writes no such repository, so its answer is ours."""
    tree, answer = repository.tracker.tree, ["refs/heads/main"]
    (tree.git_folder / "HEAD").write_text("ref: refs/heads/.invalid\n")
    monkeypatch.setattr(tree, "_git", lambda *arguments: f"{answer[0]}\n".encode())
    assert tree.branch() == "refs/heads/main"
    answer[0] = "refs/heads/other"
    assert tree.branch() == "refs/heads/other"
    (tree.git_folder / "reftable").mkdir()
    before = tree.fingerprint([])
    (tree.git_folder / "reftable" / "tables.list").write_text("0x1-0x2-a.ref\n")
    assert tree.fingerprint([]) != before, "a checkout or commit is noticed"
