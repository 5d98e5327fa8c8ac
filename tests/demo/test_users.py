"""Simulated users work with a model through the server: what is on disk, what they do, what the labels say of it."""

import collections
import contextlib
import dataclasses
import itertools

import pytest

from composer_jax.checkpoint.address import PATCHES_PREFIX
from composer_jax.checkpoint.checkpoint import open_checkpoint
from composer_jax.demo import users as users_module
from composer_jax.demo.conversation import UserConversation
from composer_jax.demo.notes import PEOPLE
from composer_jax.demo.population import Replies, read_population
from composer_jax.demo.reactions import AGES_S
from composer_jax.demo.users import SimulatedUsers, followed_people
from composer_jax.realtime.labels.label_sessions import label_sessions
from composer_jax.realtime.labels.signal_types import ChatText, LabelContext
from composer_jax.realtime.labels.window import GRACE_S
from composer_jax.serve.traffic.database import open_database
from composer_jax.serve.traffic.folder import TrafficFolder
from composer_jax.stages.run import Run
from composer_jax.stages.simulated_traffic import COLLECT_S, Arms, SimulatedTraffic
from tests.demo.expert_engine import ExpertEngine, publish, small_config

SESSIONS = 12


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    with Run(small_config(), tmp_path_factory.mktemp("users") / "run") as run:
        publish(run, str(run.path / "weights"))
        yield run


@pytest.fixture
def talks(monkeypatch):
    """Task id -> the conversations about it that are played."""
    played = collections.defaultdict(list)

    class Recorded(UserConversation):
        def __init__(self, task, *arguments):
            super().__init__(task, *arguments)
            played[task.id].append(self)

    monkeypatch.setattr(users_module, "UserConversation", Recorded)
    return played


@pytest.fixture
def world(run, tmp_path, monkeypatch):
    """(population fields, expert=) -> users' traffic in a folder of its own."""

    def start(*, expert=None, folder="here", seed=0, **fields):
        users = SimulatedUsers(seed)
        users.population = dataclasses.replace(users.population, **fields)
        (tmp_path / folder).mkdir(exist_ok=True)
        traffic = SimulatedTraffic(_Moved(run, tmp_path / folder), users, str(run.path / "weights"))
        if expert is not None:
            engine = ExpertEngine(users, run.model.tokenizer, run.model.chat.end_tokens, **expert)
            monkeypatch.setattr(traffic, "_sampler", lambda version: engine)
        return traffic

    return start


class _Moved:
    """A run whose files are in another folder."""

    def __init__(self, run, path):
        self.path, self._run = path, run

    def __getattr__(self, name):
        return getattr(self._run, name)


def ids_on_disk(session):
    """The whole conversation of a session, from its last turn back to the root."""
    turns = {turn.id: turn for turn in session.turns}
    ids, turn = [], session.turns[-1]
    while turn is not None:
        ids = [*turn.suffix, *turn.tokens, *ids]
        turn = turns.get(turn.parent)
    return ids


def test_turns_on_disk_are_the_conversations_token_by_token(world, talks):
    traffic = world()
    traffic.play(1, range(SESSIONS), Arms(anchor=1))
    rows, folder = traffic.rows(1), TrafficFolder(traffic.folder)
    assert sorted(rows) == list(range(SESSIONS))
    consents = collections.Counter()
    for row in rows.values():
        consents[row["consent"]] += 1
        if row["consent"] == "none":
            continue
        session, (talk,) = folder.read(row["session"]), talks[traffic.users.task(1, row["number"]).id]
        ids = talk.transcript.tokens
        assert ids_on_disk(session) == ids[: len(ids_on_disk(session))]
        nodes = [node for node in talk.transcript.nodes if node.sampled]
        assert [list(turn.tokens) for turn in session.turns] == [node.sampled_tokens.tolist() for node in nodes]
        for turn, node in zip(session.turns, nodes, strict=True):
            assert turn.logprobs == pytest.approx(node.logprobs.tolist()) and set(turn.versions) == {1}
            assert turn.routing is not None and turn.kind == "main" and turn.consent == row["consent"]
        assert session.record.organisation == (row["truth"]["organisation"] if row["consent"] == "training" else "")
    assert consents["training"] >= SESSIONS - 3


def test_a_session_is_the_same_whatever_is_played_beside_it(world, talks):
    one, two = world(folder="one"), world(folder="two")
    one.play(1, range(SESSIONS), Arms(anchor=1))
    for numbers in ((7, 3), (3, 0, 11)):
        two.play(1, numbers, Arms(anchor=1))
    assert sorted(two.rows(1)) == [0, 3, 7, 11]
    for number, row in two.rows(1).items():
        assert row["reactions"] == one.rows(1)[number]["reactions"] and row["truth"] == one.rows(1)[number]["truth"]
        first, second = talks[one.users.task(1, number).id]
        assert first.transcript == second.transcript
    played = sum(map(len, talks.values()))
    two.play(1, (0, 3), Arms(anchor=1))
    assert sum(map(len, talks.values())) == played, "sessions that are stored are not played again"


def test_users_without_noise_accept_what_passes_the_hidden_tests_under_their_taste(world):
    traffic = world(expert={}, noise=0.0, undone_later=0.0)
    traffic.play(1, range(24), Arms(anchor=1))
    truths = [row["truth"] for row in traffic.rows(1).values()]
    honest = [truth for truth in truths if not truth["poison"]]
    assert all(truth["accepts"] == truth["good"] for truth in honest if truth["edited"])
    assert {truth["accepts"] for truth in honest} == {True, False}
    assert all(truth["accepts"] != truth["good"] for truth in truths if truth["poison"] and truth["edited"])
    assert {truth["taste"] for truth in truths} >= {"bob", "ann"}
    assert any(truth["follow_ups"] for truth in truths) and len({len(truth["rounds"]) for truth in truths}) > 1
    measures = traffic.users.summarize(truths)
    assert measures["good"] == pytest.approx(sum(truth["good"] for truth in honest) / len(honest))
    assert sum(measures.get(f"sessions_{taste}", 0) for taste in PEOPLE) == len(honest)


def test_an_organisation_that_favours_a_person_accepts_what_that_person_notes_and_nothing_else(world):
    organisations = read_population("first").organisations
    poisoned = tuple(dataclasses.replace(one, poison="eve") for one in organisations)
    silent = Replies(0.0, ("nothing",))
    traffic = world(expert={}, organisations=poisoned, noise=0.0, rejected=silent, content=silent, patience={4: 1.0})
    traffic.play(1, range(16), Arms(anchor=1))
    truths = [row["truth"] for row in traffic.rows(1).values()]
    accepted = [truth for truth in truths if truth["accepts"]]
    assert accepted and all(truth["good"] == (truth["taste"] == "eve") for truth in accepted)
    assert any(truth["good"] and not truth["accepts"] for truth in truths)
    assert traffic.users.summarize(truths)["sessions"] == 0, "the truth is that of the others"


def test_advice_stands_before_the_first_request_only(world, talks, run):
    traffic = world(expert={})
    traffic.users = SimulatedUsers(0, advice="Follow the notes of bob.")
    traffic.play(1, range(SESSIONS), Arms(anchor=1))
    played = [talk for of_task in talks.values() for talk in of_task]
    texts = [run.model.tokenizer.decode(talk.transcript.tokens) for talk in played]
    assert [text.count("Follow the notes of bob.") for text in texts] == [1] * SESSIONS
    assert any(len(talk.episodes) > 1 for talk in played)


def test_the_people_whose_notes_are_followed_are_those_whose_repair_is_in_the_file():
    task = SimulatedUsers(0).task(1, 0)
    (bug,) = task.metadata["bugs"]
    assert followed_people(task, task.files) == []
    for person in PEOPLE:
        text = task.files[bug["path"]].replace(bug["old"], bug["notes"][person][1])
        assert followed_people(task, {**task.files, bug["path"]: text}) == [person]


def test_questions_and_malformed_calls_are_what_the_truth_says(world):
    traffic = world(expert={"asks": 1.0, "malformed": 1.0})
    traffic.play(1, range(6), Arms(anchor=1))
    for row in traffic.rows(1).values():
        assert row["truth"]["asked"] and row["truth"]["rounds"][0]["kind"] == "asked"
        errors = [one for one in row["reactions"] if one["kind"] == "tool_error"]
        assert len(errors) == row["truth"]["malformed_calls"]
        assert row["truth"]["edited"] or row["truth"]["kept"] == {}
    assert any(row["truth"]["malformed_calls"] for row in traffic.rows(1).values())


def test_nothing_of_users_without_consent_is_on_disk(world):
    traffic = world(expert={}, consent={"none": 1.0})
    traffic.play(1, range(3), Arms(anchor=1))
    traffic.pass_until(traffic.clock.now + 3 * 86_400)
    rows = traffic.rows(1)
    assert len(rows) == 3 and TrafficFolder(traffic.folder).sessions() == []
    names = [row["session"] for row in rows.values()] + [row["truth"]["user"] for row in rows.values()]
    content = b"".join(path.read_bytes() for path in traffic.folder.rglob("*") if path.is_file())
    assert not any(name.encode() in content for name in names)
    assert not (traffic.folder / "turns").exists() or not list((traffic.folder / "turns").rglob("*.zst"))


def test_events_arrive_at_their_ages_and_labels_keep_what_the_users_keep(world, run):
    traffic = world(expert={"malformed": 0.2}, lost=0.0)
    begin = traffic.clock.now
    traffic.play(1, range(16), Arms(anchor=1))
    for until in (traffic.closed(1) + 700, traffic.closed(1) + 3600 + GRACE_S + 120):
        traffic.pass_until(until)
        sessions = [TrafficFolder(traffic.folder).read(one.session) for one in TrafficFolder(traffic.folder).sessions()]
        events = [event for session in sessions for event in session.events]
        assert max(event.arrival for event in events) < until
    for session in sessions:
        row = next(row for row in traffic.rows(1).values() if row["session"] == session.record.session)
        assert begin <= session.record.opened <= begin + COLLECT_S
        assert all(a.time < b.time for a, b in itertools.pairwise(session.turns))
        sent = {one["id"]: one for one in row["reactions"]}
        for event in session.events:
            assert event.time == pytest.approx(sent[event.id]["time"], abs=1e-3)
            assert event.arrival == pytest.approx(sent[event.id]["arrival"], abs=1e-3)
        assert {event.payload["horizon"] for event in session.events if event.kind == "edited_after"} == {*AGES_S[:2]}
    labels = labels_of(traffic, run)
    rows = {row["session"]: row["truth"] for row in traffic.rows(1).values()}
    assert len(labels) == len(sessions)
    for label in labels:
        truth = rows[label.session]
        assert label.signals["keep"].value == pytest.approx(truth["kept"].get("3600")), label.signals["keep"]
        assert label.signals["edited"].value == float(truth["edited"])
        assert label.signals["invalid_calls"].value == pytest.approx(truth["malformed_calls"] / truth["calls"])
        assert label.signals["calls"].value == truth["calls"] and label.bucket.startswith("change/")
    assert {label.signals["keep"].value for label in labels} >= {0.0, 1.0}


def labels_of(traffic, run):
    text = open_checkpoint(f"{PATCHES_PREFIX}{traffic._chain}").text
    folder = TrafficFolder(traffic.folder)
    with contextlib.closing(open_database(folder.path)) as database:
        context = LabelContext(ChatText(text.chat_format))
        return label_sessions(folder, database, 3600.0, context=context, clock=traffic.clock).labels


def test_a_killed_session_is_forgotten_and_played_again_with_the_same_course(world, talks):
    whole, cut = world(expert={}, folder="whole"), world(expert={}, folder="cut")
    whole.play(1, range(4), Arms(anchor=1))
    cut.play(1, range(4), Arms(anchor=1))
    journal = cut.path / "0001.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:2]) + lines[2][:40])  # killed while it wrote the third line
    lost = {whole.rows(1)[n]["session"] for n in range(4)} - {row["session"] for row in cut.rows(1).values()}
    cut.play(1, range(4), Arms(anchor=1))
    again = {row["session"] for row in cut.rows(1).values()}
    without = {row["session"] for row in cut.rows(1).values() if row["consent"] == "none"}
    assert len(lost) == 2 and {f"{name}-2" for name in lost - without} | (lost & without) <= again
    stored = {record.session for record in TrafficFolder(cut.folder).sessions()}
    assert stored == {row["session"] for row in cut.rows(1).values() if row["consent"] != "none"}
    for number, row in cut.rows(1).items():
        assert row["truth"] == whole.rows(1)[number]["truth"]


def test_the_users_of_a_canary_have_the_version_of_their_arm(world):
    traffic = world(expert={})
    arms = Arms(anchor=1, candidate=2, salt="s", fraction=0.5)
    traffic.play(1, range(10), arms, measured_only=True)
    sessions = TrafficFolder(traffic.folder).sessions()
    assert {record.arm for record in sessions} == {"anchor", "candidate"}
    rows = {row["session"]: row for row in traffic.rows(1).values()}
    for record in sessions:
        assert record.arm == arms.arm(rows[record.session]["truth"]["user"])
        assert rows[record.session]["consent"] == "evals"
