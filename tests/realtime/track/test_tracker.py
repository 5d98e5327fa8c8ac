"""Sessions over a day: what is sent when, after restarts, without a server, by two agents, and with bad input."""

import dataclasses
import json
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import composer_jax.git
import composer_jax.realtime.track.session_diff
import composer_jax.realtime.track.working_tree
from composer_jax.errors import UserError
from composer_jax.realtime.track.event_sender import check_server
from composer_jax.realtime.track.tracker import EXPIRY_S, Tracker
from composer_jax.serve.traffic.records import EVENT_FIELDS
from tests.realtime.track.test_kept_lines import KEPT
from tests.realtime.track.tracked_repository import AGENT, NOWHERE, SOURCE

DAY = 86400


def start_and_stop(repository, server, text=AGENT, name="s"):
    repository.tracker.start(name, server.url, "KEY", "answer-1")
    repository.write("main.py", text)
    repository.tracker.stop(name)


def follow(repository, tracker=None, until=DAY, act=lambda age: None):
    """Follows the session `s`; `act` is called with the age after every sleep, and at `until` Ctrl-C is pressed."""
    began = repository.now

    def sleep(seconds):
        repository.now += seconds
        act(repository.now - began)
        if repository.now - began > until:
            raise KeyboardInterrupt

    (tracker or repository.tracker).follow("s", sleep)


def test_a_day_of_a_session(repository, server):
    start_and_stop(repository, server)

    def act(age):
        if age == 300:
            repository.commit("the agent's work")
        if age == 2400:
            repository.replace("    return text.rjust(width, fill)\n", "")

    follow(repository, act=act)
    assert [(event["kind"], event["age"], event["turn"]) for event in server.events()] == [
        ("commit", 0, "answer-1"),
        *[("edited_after", 0, "answer-1")] * 3,
    ]
    commit, *edited = [event["payload"] for event in server.events()]
    assert commit == {"added_kept": 4}
    assert [payload["horizon"] for payload in edited] == [600, 3600, 86400]
    assert [payload["added_kept"] for payload in edited] == [4, 3, 3]
    assert all(event["payload"].keys() == EVENT_FIELDS[event["kind"]].keys() for event in server.events())
    assert len({event["id"] for event in server.events()}) == 4
    path, headers, _ = server.requests[0]
    assert path == "/events" and headers["Authorization"] == "Bearer KEY"
    # Nothing is left of a session that is done.
    assert repository.tracker.store.load_all() == [] and not (repository.tracker.tree.folder / "objects").exists()
    assert "composer_jax" not in repository.git("status", "--short", "--ignored")
    repository.git("fsck")


def test_nothing_of_the_code_leaves_the_machine(repository, server):
    planted = "planted_secret_identifier"
    repository.write("main.py", SOURCE + f"{planted}_before = 1\n")
    repository.write(f"{planted}_path.py", "x = 1\n")
    start_and_stop(repository, server, AGENT + f"{planted}_agent = 2\n")
    repository.tracker.test("s", ["sh", "-c", f": {planted}"])
    repository.commit(f"{planted} message")
    repository.git("branch", "-m", planted)
    repository.tracker.check("s")
    repository.write("main.py", SOURCE + f"{planted}_before = 1\n")
    repository.tracker.check("s")
    follow(repository)
    assert {event["kind"] for event in server.events()} == {"tests_run", "commit", "undo", "edited_after"}
    for path, headers, body in server.requests:
        sent = "\n".join((path, json.dumps(headers), body.decode()))
        assert (
            planted not in sent and "main.py" not in sent and "rjust" not in sent and str(repository.root) not in sent
        )


def test_a_restart_sends_nothing_twice(repository, server):
    start_and_stop(repository, server)
    with pytest.raises(KeyboardInterrupt):
        follow(repository, until=1000)
    assert len(server.events()) == 1
    follow(repository, repository.new_tracker())
    ids = [event["id"] for event in server.events()]
    assert len(ids) == len(set(ids)) == 3


def test_an_event_that_was_sent_but_not_noted_keeps_its_id(repository, server):
    start_and_stop(repository, server)
    repository.now += 600
    file = next((repository.tracker.tree.folder / "sessions").glob("*.json"))
    server.answer = (500, "", {})
    repository.tracker.check("s")
    queued = file.read_bytes()
    server.answer = (200, "{}", {})
    repository.new_tracker().check("s")
    file.write_bytes(queued)  # as if the process had been killed before it noted that the event was sent
    repository.now += 60
    repository.new_tracker().check("s")
    first, second, third = server.events()
    assert first["id"] == second["id"] == third["id"]
    assert (first["age"], third["age"]) == (0, 60)


def test_without_a_server_events_wait_and_keep_their_time(repository, server):
    start_and_stop(repository, server)
    server.answer = (503, "restarting", {})
    with pytest.raises(KeyboardInterrupt):
        follow(repository, until=5000)
    attempts = len(server.requests)
    # Pauses of a minute, doubled up to an hour.
    assert attempts == 7 and any("503 (restarting); 1 events wait" in report for report in repository.reports)
    server.answer = (200, "{}", {})
    follow(repository)
    sent = {event["id"]: event for event in server.events()}.values()
    assert [event["payload"]["horizon"] for event in sent] == [600, 3600, 86400]
    late = server.events()[-3]
    assert late["payload"]["horizon"] == 600 and late["age"] > 4000


def test_events_that_wait_too_long_are_dropped_and_counted(repository, server):
    repository.session()
    repository.edited()
    repository.now += EXPIRY_S + 1
    repository.tracker.check("s")
    session = repository.tracker.store.load("s")
    assert session.dropped == 1 and len(session.queue) == 2
    assert "1 dropped" in repository.tracker.status()[0]


@pytest.mark.parametrize(
    ("status", "sentence"),
    [
        (401, "refuses the key for session 's'"),
        (403, "refuses the key for session 's'"),
        (404, "does not know session 's'"),
        (400, "refuses events of session 's' \\(400: because\\)"),
        (302, "redirects to http://elsewhere/; name the server itself"),
    ],
)
def test_a_refusal_ends_with_a_sentence_and_keeps_the_events(repository, server, status, sentence):
    start_and_stop(repository, server)
    server.answer = (status, "because", {"Location": "http://elsewhere/"})
    with pytest.raises(UserError, match=sentence):
        follow(repository)
    assert len(repository.queue()) == 1 and len(server.requests) == 1


def test_a_measurement_that_comes_late_says_that_nobody_can_judge(repository):
    repository.session()
    repository.now += 3600
    repository.tracker.check("s")
    early, late = repository.events("edited_after")
    assert (early["horizon"], early["censored"], early["added"], early["others"]) == (600, 8, 0, 0)
    assert (late["horizon"], late["censored"], late["added_kept"]) == (3600, 0, 4)


def test_following_looks_only_at_what_changed(repository, monkeypatch):
    repository.session()
    calls = count_git_calls(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        follow(repository, until=590)
    first = len(calls)
    assert first == 1  # one look at the commit, although 59 times 10 seconds passed
    repository.replace("rjust", "ljust")
    repository.tracker.check("s", only_changed=True)
    assert len(calls) > first


def count_git_calls(monkeypatch):
    calls, start_git = [], composer_jax.git.start_git

    def counted(*arguments, **options):
        calls.append(arguments)
        return start_git(*arguments, **options)

    monkeypatch.setattr(composer_jax.git, "start_git", counted)
    return calls


@pytest.mark.parametrize("act", [lambda repository: None, lambda repository: repository.git("mv", "main.py", "b.py")])
def test_the_cost_of_measuring_does_not_grow_with_the_repository(repository, monkeypatch, act):
    """git runs as often, and is given and answers as many bytes, whether there are 2 other files or 2,000."""
    costs = []
    for files in (2, 2000):
        for index in range(files):
            repository.write(f"package_{index % 10}/file_{index}.py", f"value = {index}\n" * 20)
        repository.commit(f"{files} files")
        repository.session(name=f"s{files}")
        act(repository)
        cost = {"calls": 0, "bytes": 0}
        run_git = composer_jax.git.run_git

        def counted(*arguments, stdin=b"", cost=cost, run_git=run_git, **options):
            output = run_git(*arguments, stdin=stdin, **options)
            cost["calls"] += 1
            cost["bytes"] += len(stdin) + len(output)
            return output

        with monkeypatch.context() as patch:
            patch.setattr(composer_jax.realtime.track.working_tree, "run_git", counted)
            assert repository.edited(name=f"s{files}")["added_kept"] == 4
        costs.append(cost)
        repository.git("reset", "-q", "--hard")
        repository.write("main.py", SOURCE)
        repository.commit("again") if repository.git("status", "--short") else None
    assert costs[0] == costs[1]


def two_agents(repository, marks):
    """Two agents at work at once, each in a function of its own."""
    repository.tracker.start("one", NOWHERE)
    repository.tracker.start("two", NOWHERE)
    repository.replace("total = 0", "total = start_of(values)")
    if marks:
        repository.tracker.mark("one")
    repository.replace("return default", "return default or name")
    if marks:
        repository.tracker.mark("two")
    repository.tracker.stop("one")
    repository.tracker.stop("two")


def test_two_agents_at_once_with_marks_have_their_own_lines(repository):
    two_agents(repository, marks=True)
    repository.replace("total = start_of(values)", "total = 0")
    assert repository.edited(name="one") == dict(added=1, deleted=1, others=8, others_kept=8)
    assert repository.edited(name="two") == dict(
        added=1, added_kept=1, deleted=1, deleted_kept=1, others=8, others_kept=8
    )


def test_a_file_is_aligned_as_often_as_it_changed_whatever_is_marked(repository, monkeypatch):
    versions, diff_file = {}, composer_jax.realtime.track.session_diff.diff_file

    def counted(path, texts, authors):
        versions[path] = len(texts)
        return diff_file(path, texts, authors)

    monkeypatch.setattr(composer_jax.realtime.track.session_diff, "diff_file", counted)
    repository.tracker.start("s", NOWHERE)
    for number in range(5):
        repository.write("other.py", f"number = {number}\n")
        repository.tracker.mark("s")
        repository.tracker.mark("s")
    assert len(repository.tracker.store.timeline()) == 6
    repository.write("main.py", AGENT)
    repository.tracker.stop("s")
    assert versions == {"main.py": 2, "other.py": 6}
    assert repository.edited() == KEPT | dict(added=5, added_kept=5)


def test_two_agents_at_once_without_marks_are_censored(repository):
    two_agents(repository, marks=False)
    assert repository.edited(name="one") == dict(censored=4, others=8, others_kept=8)
    assert repository.edited(name="two") == dict(censored=4, others=8, others_kept=8)


def test_lines_that_another_agent_overwrote_are_censored(repository):
    repository.session(name="one")
    repository.now += 100
    repository.tracker.start("two", NOWHERE)
    repository.replace("text = second(name, default=", "text = second(name, default=name or ")
    repository.now += 100
    repository.tracker.stop("two")
    repository.replace("return text.rjust(width, fill)", "return text")
    one = dict(added=3, added_kept=2, deleted=4, deleted_kept=4, censored=1, others=6, others_kept=6)
    assert repository.edited(name="one") == one
    assert repository.edited(name="two")["added_kept"] == 1


def test_lines_that_an_agent_at_work_overwrites_are_censored(repository):
    repository.session(name="one")
    repository.now += 100
    repository.tracker.start("two", NOWHERE)
    repository.write("main.py", SOURCE)
    assert repository.edited(name="one") == dict(censored=8, others=6, others_kept=6)
    assert repository.events("undo", "one") == []


def test_tests_before_and_after(repository, server):
    command = "! grep -q third main.py"
    repository.tracker.start("s", server.url, test_command=command)
    assert repository.tracker.test("s", ["sh", "-c", "exit 5"]) == 5
    assert server.requests == []  # the server may not know the session before its end
    repository.write("main.py", AGENT)
    assert repository.tracker.test("s", ["sh", "-c", "kill -9 $$"]) == 137
    repository.tracker.stop("s", test_command=command)
    payloads = [event["payload"] for event in server.events() if event["kind"] == "tests_run"]
    assert [(payload["phase"], payload["exit_code"]) for payload in payloads] == [
        ("before", 0),
        ("before", 5),
        ("after", 137),
        ("after", 1),
    ]


def test_a_session_that_is_started_already_runs_no_tests(repository):
    repository.tracker.start("s", NOWHERE)
    with pytest.raises(UserError, match="already started"):
        repository.tracker.start("s", NOWHERE, test_command="touch ran")
    assert not (repository.root / "ran").exists()


def test_a_commit_is_one_event_however_it_is_rewritten(repository):
    repository.session()
    repository.write("main.py", repository.read().replace("return text.rjust(width, fill)", "return text"))
    repository.commit("three of the four lines")
    repository.tracker.check("s")
    repository.git("commit", "-q", "--amend", "-m", "better words")
    repository.tracker.check("s")
    repository.replace('    text = second(name, default="nothing")\n', "")
    repository.commit("one line less")
    repository.tracker.check("s")
    assert repository.events("commit") == [{"added_kept": 3}]
    repository.write("main.py", AGENT)
    repository.commit("all of it")
    repository.tracker.check("s")
    assert repository.events("commit") == [{"added_kept": 3}, {"added_kept": 4}]


def test_what_the_agent_committed_itself_is_no_event(repository):
    repository.tracker.start("s", NOWHERE)
    repository.replace("total = 0", "total = 0.0")
    repository.commit("by the agent")
    repository.write("main.py", AGENT)
    repository.tracker.stop("s")
    repository.git("commit", "-q", "--amend", "-m", "better words")
    repository.tracker.check("s")
    assert repository.events("commit") == []
    repository.commit("the user's")
    assert repository.edited() == KEPT
    assert repository.events("commit") == [{"added_kept": 4}]


@pytest.mark.parametrize("has_file", [False, True])
def test_a_checkout_of_an_older_branch_is_no_commit(repository, monkeypatch, has_file):
    monkeypatch.setenv("GIT_COMMITTER_DATE", "@500 +0000")
    repository.git("checkout", "-q", "--orphan", "old")
    repository.git("rm", "-q", "-r", "-f", ".")
    repository.write("main.py" if has_file else "other.py", "import os\n")
    repository.commit("without the lines that the agent deletes")
    repository.git("checkout", "-q", "main")
    repository.session()
    repository.git("stash", "-q")
    repository.git("checkout", "-q", "old")
    repository.edited()
    assert repository.events("commit") == []


def test_what_the_user_committed_before_the_session_goes_on_is_an_event(repository):
    repository.session()
    repository.commit("the user's")
    repository.session({})
    assert repository.events("commit") == [{"added_kept": 4}]


def test_a_new_commit_without_the_file_is_no_commit_of_its_lines(repository):
    repository.session()
    repository.git("stash", "-q")
    repository.git("checkout", "-q", "--orphan", "new")
    repository.git("rm", "-q", "-r", "-f", ".")
    repository.write("other.py", "other = 1\n")
    repository.commit("something else")
    repository.edited()
    assert repository.events("commit") == []


def test_a_repository_without_a_commit(repository, tmp_path):
    (tmp_path / "empty").mkdir()
    repository.root = tmp_path / "empty"
    repository.git("init", "-q")
    repository.tracker = repository.new_tracker()
    repository.session()
    assert repository.edited() == dict(added=10, added_kept=10)
    repository.commit("first")
    repository.tracker.check("s")
    assert repository.events("commit") == [{"added_kept": 10}]


def test_a_snapshot_after_one_that_was_killed(repository):
    repository.session({})
    for name in ("index", "index.lock"):
        (repository.tracker.tree.folder / name).write_text("half of it")
    repository.session()
    assert repository.edited() == KEPT


@pytest.mark.parametrize("settings", [".gitconfig", ".config/git/config"])
def test_a_folder_inside_a_repository_and_settings_of_the_user(repository, settings):
    (repository.root.parent / settings).parent.mkdir(parents=True, exist_ok=True)
    (repository.root.parent / settings).write_text("[core]\n\texcludesFile = ~/ignored\n")
    (repository.root.parent / "ignored").write_text("*.log\n")
    repository.write("folder/a.py", "x = call(1)\n")
    repository.tracker = Tracker(repository.root / "folder", clock=lambda: repository.now, report=print)
    assert repository.tracker.tree.root == repository.root
    repository.session({"run.log": "line = call(1)\n", "folder/b.py": "y = call(2)\n"})
    assert repository.edited() == dict(added=1, added_kept=1)


def test_no_program_of_the_repository_runs(repository, tmp_path):
    trap = tmp_path / "trap"
    repository.git("config", "filter.trap.clean", f"touch {trap}; cat")
    repository.git("config", "core.fsmonitor", f"touch {trap}")
    repository.write(".git/hooks/post-index-change", f"#!/bin/sh\ntouch {trap}\n")
    (repository.root / ".git/hooks/post-index-change").chmod(0o755)
    repository.write(".gitattributes", "trapped.py filter=trap\n*.py diff=trap\n")
    repository.write("trapped.py", "one = call(1)\n")
    repository.session({"main.py": AGENT, "trapped.py": "two = call(2)\n"})
    session = repository.tracker.store.load("s")
    assert session.left_out == {"trapped.py": "filtered by git"}
    assert repository.edited() == KEPT
    assert not trap.exists()


def test_the_state_is_the_owners_alone(repository):
    repository.session()
    assert stat.S_IMODE(repository.tracker.tree.folder.stat().st_mode) == 0o700


def test_a_repository_that_disappears_is_an_event(repository, server):
    start_and_stop(repository, server)

    def act(age):
        if age == 720:
            shutil.rmtree(repository.root)

    follow(repository, act=act)
    assert [event["kind"] for event in server.events()] == ["edited_after", "repo_unreachable"]
    assert "is gone" in repository.reports[-1] and not repository.root.exists()


def test_the_agents_command(repository, server, tmp_path):
    (tmp_path / "agent.py").write_text(AGENT)

    def sleep(seconds):
        repository.now += seconds

    command = ["sh", "-c", f"cp {tmp_path}/agent.py {repository.root}/main.py; exit 3"]
    assert repository.tracker.run("s", command, server.url, sleep=sleep, test_command="true") == 3
    assert [event["kind"] for event in server.events()] == ["tests_run"] * 2 + ["edited_after"] * 3
    with pytest.raises(UserError, match="no program 'no-such-agent'"):
        repository.tracker.run("s", ["no-such-agent"], server.url)
    assert repository.tracker.store.load_all() == []


def test_two_followers_of_one_session(repository):
    repository.session()
    with repository.tracker.store.follow("s"), pytest.raises(UserError, match="is already followed by process"):
        repository.new_tracker().follow("s")


def test_a_clock_that_goes_back(repository):
    repository.session()
    repository.now -= 30
    repository.tracker.check("s")
    repository.now -= 100
    with pytest.raises(UserError, match="the clock is 130 seconds before what it was"):
        repository.tracker.check("s")


@pytest.mark.parametrize(
    ("act", "sentence"),
    [
        (lambda r: r.tracker.start("", NOWHERE), "--session='' is not a session"),
        (lambda r: r.tracker.start("a\nb", NOWHERE), "is not a session"),
        (lambda r: r.tracker.start("s", "localhost:8000"), "--server=localhost:8000 is not an address"),
        (lambda r: r.tracker.start("s", "http://[::1"), r"--server=http://\[::1 is not an address"),
        (lambda r: r.tracker.start("s", "http://host:x"), "--server=http://host:x is not an address"),
        (lambda r: r.tracker.start("s", ""), "--server= is not an address"),
        (lambda r: r.tracker.stop("s"), r"session 's' is not tracked in .* \(tracked: none\); start it first"),
        (lambda r: r.tracker.check("s"), "is not tracked"),
        (lambda r: r.tracker.follow("s"), "is not tracked"),
        (lambda r: (r.tracker.start("s", NOWHERE), r.tracker.start("s", NOWHERE)), "'s' is already started"),
        (lambda r: (r.session(), r.tracker.stop("s")), "'s' is stopped; start it again"),
        (lambda r: (r.session(), r.tracker.test("s", ["no-such-program"])), "no program 'no-such-program'"),
        (lambda r: Tracker(r.root / "nowhere"), "nowhere is not a folder"),
        (lambda r: Tracker(r.root.parent), "is in no git repository"),
        (lambda r: Tracker(r.root / ".git"), "has no working tree"),
    ],
)
def test_bad_input(repository, act, sentence):
    with pytest.raises(UserError, match=sentence):
        act(repository)


def test_a_bare_repository_and_no_git(repository, tmp_path, monkeypatch):
    repository.git("init", "-q", "--bare", str(tmp_path / "bare.git"))
    with pytest.raises(UserError, match="has no working tree"):
        Tracker(tmp_path / "bare.git")
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with pytest.raises(UserError, match="needs git, which is not installed"):
        Tracker(repository.root)


def test_state_of_another_version(repository):
    repository.session()
    file = next((repository.tracker.tree.folder / "sessions").glob("*.json"))
    file.write_text(json.dumps(json.loads(file.read_text()) | {"schema": 0}))
    with pytest.raises(UserError, match="written by another version"):
        repository.tracker.check("s")


@pytest.mark.parametrize("everything", [True, False])
def test_content_that_git_lost(repository, everything):
    repository.write("lost.py", "lost = call(1)\n")
    repository.tracker.start("s", NOWHERE)
    blob = repository.git("hash-object", "lost.py").strip()
    if everything:
        shutil.rmtree(repository.tracker.tree.folder / "objects")
    else:
        (repository.tracker.tree.folder / "objects" / blob[:2] / blob[2:]).unlink()
    repository.write("lost.py", "lost = call(2)\n")
    with pytest.raises(UserError, match="git has lost"):
        repository.tracker.stop("s")


@pytest.mark.parametrize("url", ["http://host:8000/", "https://host/prefix"])
def test_addresses(url):
    assert check_server(url) == url.rstrip("/")


def test_it_runs_where_no_jax_is(repository):
    """In a process, because this one has imported JAX."""
    code = (
        "import sys; sys.modules['jax'] = None; from composer_jax.realtime.track import tracker; "
        f"from pathlib import Path; tracker.Tracker(Path({str(repository.root)!r})).status(); "
        "print('jaxlib' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[3], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"


def test_payloads_have_the_counts_of_the_records(repository):
    repository.session()
    repository.edited()
    (payload,) = repository.events("edited_after")
    assert payload.keys() == EVENT_FIELDS["edited_after"].keys()
    assert dataclasses.is_dataclass(repository.queue()[0])


def test_a_session_that_is_refused_does_not_keep_others_back(repository, server):
    start_and_stop(repository, server, name="good")
    repository.now += 1
    repository.tracker.start("bad", f"{server.url}/elsewhere")
    repository.tracker.stop("bad")
    repository.now += 1000
    server.answer = (404, "", {})
    with pytest.raises(UserError, match="'good'"):
        repository.tracker.check()
    assert [path for path, _, _ in server.requests] == ["/events", "/elsewhere/events"]


def test_a_forgotten_session_leaves_nothing_and_is_no_longer_at_work(repository):
    repository.session(name="one")
    repository.tracker.start("two", NOWHERE)
    repository.tracker.forget("two")
    repository.write("main.py", SOURCE)
    assert repository.edited(name="one") == dict(added=4, deleted=4, others=6, others_kept=6)
    with repository.tracker.store.follow("one"):
        repository.tracker.forget("one")
    assert [path.name for path in repository.tracker.tree.folder.rglob("*")] == ["lock"]


def test_a_repository_of_sha256_objects(repository, tmp_path):
    repository.root = tmp_path / "sha256"
    repository.root.mkdir()
    repository.git("init", "-q", "--object-format=sha256")
    repository.write("main.py", SOURCE)
    repository.write("old.py", "x = call(1)\n")
    repository.commit("first")
    repository.tracker = repository.new_tracker()
    (repository.root / "old.py").unlink()
    repository.session()
    assert repository.edited() == KEPT
