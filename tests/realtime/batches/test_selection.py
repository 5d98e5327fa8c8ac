"""What is trained of sessions that a server wrote; every turn that is not has its reason."""

import contextlib
import dataclasses
import hashlib
import sqlite3
import weakref

from composer_jax.realtime.batches.selection import (
    REASONS,
    LabelledSession,
    SelectionRules,
    read_window,
    select_sessions,
)
from composer_jax.realtime.batches.versions import CanarySpan, TrainableVersions
from composer_jax.realtime.labels.label_sessions import label_sessions
from composer_jax.realtime.labels.signal_types import LabelContext
from composer_jax.realtime.labels.store import LabelStore
from composer_jax.realtime.simulation import SimulatedCycle, SimulatedPolicy, SimulatedText, SimulatedWorld
from composer_jax.serve.traffic.database import open_database
from composer_jax.serve.traffic.retention import forget
from tests.realtime.batches.conftest import BEGAN, H
from tests.realtime.batches.test_turn_tree import SHAPE, routes_of

VERSIONS = TrainableVersions(frozenset((2, 3)))


def candidates(folder):
    with contextlib.closing(open_database(folder.path)) as database:
        labels = {label.session: label for label in LabelStore(database).read(H)}
    organisations = folder.policy.organisations
    return [
        LabelledSession(labels[record.session], record, folder,
                        organisations[record.organisation].consent if record.organisation in organisations else None)
        for record in folder.sessions()
    ]  # fmt: skip


def select(folder, versions=VERSIONS, **rules):
    return select_sessions(candidates(folder), SelectionRules(H, versions, **rules))


def trained(selection):
    """session -> the answers that are trained, as (tokens, later, is rejected)."""
    return {
        one.candidate.record.session: [
            (turn.tokens, turn.place.later if turn.place else None, bool(turn.chosen)) for turn in one.turns
        ]
        for one in selection.sessions
    }


def test_a_plain_session_is_trained_whole(new_traffic):
    traffic = new_traffic()
    _, after = traffic.answer("s", [1, 2], [10, 11])
    traffic.answer("s", [*after, 3, 4], [12, 13, 14], version=(2, 3, 3))
    traffic.answer("s", [50], [51], kind="side")
    selection = select(traffic.label())
    assert trained(selection) == {"s": [(2, 1, False), (3, 0, False)]}
    first, second = selection.sessions[0].turns
    assert (first.prompt_tokens, second.prompt_tokens, second.request_tokens) == (2, 6, 2)
    assert (first.number, second.number, second.versions) == (0, 1, (2, 3))
    assert first.began <= BEGAN + 60 and selection.sessions[0].answers == 2
    assert selection.dropped_turns == {"side": 1} and not selection.dropped_sessions


def test_forks_are_left_and_asked_for_answers_are_compared(new_traffic):
    traffic = new_traffic()
    _, after = traffic.answer("fork", [1, 2], [10])
    traffic.answer("fork", [*after, 3], [11])  # a branch with which the user did not go on
    traffic.answer("fork", [*after, 4], [12])
    traffic.answer("retry", [1, 2], [10])  # the client asks again, and no user said so
    traffic.answer("retry", [1, 2], [11])
    rejected, _ = traffic.answer("again", [1, 2], [10, 11])
    traffic.event("again", "regenerate", rejected)
    traffic.answer("again", [1, 2], [12])
    _, first = traffic.answer("two", [1, 2], [10, 11, 12], choices=2)
    traffic.answer("two", [*first, 3], [13])
    traffic.answer("open", [1, 2], [10, 11], choices=2)  # nobody knows which one the user liked
    _, first = traffic.answer("both", [1, 2], [10, 11], choices=2)
    traffic.answer("both", [*first, 3], [13])
    traffic.answer("both", [*first[:-1], 401, 3], [14])  # the user went on with both
    kept, after = traffic.answer("back", [1, 2], [10])
    traffic.event("back", "regenerate", kept)
    traffic.answer("back", [1, 2], [11, 12])
    traffic.answer("back", [*after, 3], [13])
    selection = select(traffic.label())
    assert trained(selection) == {
        "fork": [(1, 1, False), (1, 0, False)],
        "retry": [(1, 0, False)],
        "again": [(2, None, True), (1, 0, False)],
        "two": [(3, 1, False), (3, None, True), (1, 0, False)],
        "open": [(2, 0, False)],
        "both": [(2, 1, False), (1, 0, False)],
        "back": [(1, 1, False), (2, None, True), (1, 0, False)],
    }
    assert selection.dropped_turns == {"left": 5}
    by_name = {one.candidate.record.session: one.turns for one in selection.sessions}
    assert by_name["again"][0].chosen == by_name["again"][1].id
    assert by_name["back"][1].chosen == by_name["back"][0].id


def test_turns_are_dropped_by_their_reasons_and_the_others_stay(new_traffic):
    traffic = new_traffic()
    _, after = traffic.answer("hot", [1, 2], [10], temperature=0.7)
    traffic.answer("hot", [*after, 3], [11])
    for name, params in (
        ("p", {"top_p": 0.9}),
        ("k", {"top_k": 5}),
        ("min", {"min_p": 0.1}),
        ("hot2", {"temperature": 0.0}),
    ):
        traffic.answer(name, [1, 2], [10], **params)
    _, after = traffic.answer("old", [1, 2], [10], version=1)
    _, after = traffic.answer("old", [*after, 3], [11, 12], version=(1, 2))
    traffic.answer("old", [*after, 4], [13], version=2)
    _, after = traffic.answer("mixed", [1, 2], [10])
    _, after = traffic.answer("mixed", [*after, 3], [11], consent="evals")
    traffic.answer("mixed", [*after, 4], [12])
    traffic.answer("evals", [1, 2], [10], consent="evals")
    _, after = traffic.answer("cut", [1, 2], [10], finish="cancelled")
    traffic.answer("cut", [*after, 3], [11])
    traffic.answer("empty", [1, 2], [], finish="cancelled")
    selection = select(traffic.label())
    assert trained(selection) == {
        "hot": [(1, 0, False)],
        "old": [(1, 0, False)],
        "mixed": [(1, 2, False)],
        "cut": [(1, 1, False), (1, 0, False)],
    }
    assert selection.dropped_turns == {"sampling": 1, "version": 2, "consent": 2}
    assert selection.dropped_sessions == {"sampling": 4, "consent": 1, "empty": 1}
    assert selection.turns_of_dropped == {"sampling": 4, "consent": 1, "empty": 1}
    assert set(selection.dropped_turns) | set(selection.dropped_sessions) <= set(REASONS)


def test_sessions_of_old_versions_are_dropped_unread(new_traffic, monkeypatch):
    traffic = new_traffic()
    for version in (1, 2, 4):
        traffic.answer(f"s{version}", [1, 2], [10], version=version)
    folder, names = traffic.label(), []
    labelled, read = candidates(folder), folder.read
    monkeypatch.setattr(folder, "read", lambda name: names.append(name) or read(name))
    selection = select_sessions(labelled, SelectionRules(H, VERSIONS))
    assert set(trained(selection)) == {"s2"} and selection.dropped_sessions == {"version": 2}
    assert names == ["s2", "s4"] and selection.turns_of_dropped == {"version": 1}


def test_a_secret_drops_its_turn_and_all_after_it(new_traffic, text):
    secret = list(text.tokenizer.encode("password=hunter2abc9"))
    traffic = new_traffic()
    _, after = traffic.answer("s", [1, 2], [10])
    _, after = traffic.answer("s", [*after, *secret], [11])
    traffic.answer("s", [*after, 4], [12])
    selection = select(traffic.label())
    assert trained(selection) == {"s": [(1, 2, False)]} and selection.dropped_turns == {"secret": 2}


def test_summaries_share_the_end_of_the_session(new_traffic):
    traffic = new_traffic()
    _, after = traffic.answer("s", [1, 2], [10])
    _, left = traffic.answer("s", [*after, 8], [20])
    traffic.answer("s", [*left, 3], [21], kind="summary")
    _, after = traffic.answer("s", [*after, 9], [22, 23, 24])
    traffic.answer("s", [*after, 3], [11, 12], kind="summary")
    _, after = traffic.answer("s", [1, 2, 11, 12], [13])
    traffic.answer("s", [*after, 5], [14])
    selection = select(traffic.label())
    assert trained(selection) == {"s": [(1, 3, False), (3, 2, False), (2, 2, False), (1, 1, False), (1, 0, False)]}
    assert [turn.place.answer == "" for turn in selection.sessions[0].turns] == [False, False, True, False, False]
    assert selection.dropped_turns == {"left": 2}


def test_what_an_organisation_says_now_wins(new_traffic, text):
    keys = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("yes", "later", "gone")}
    traffic = new_traffic(keys=keys)
    for name in keys:
        traffic.answer(name, [1, 2], [10], key=name)
    traffic.answer("none", [1, 2], [10], key="other")
    found = {one.record.session: one for one in candidates(traffic.label())}
    assert found["later"].consent == "training" and found["none"].consent is None
    consents = {"yes": "training", "later": "evals", "gone": None, "none": None}
    now = [LabelledSession(one.label, one.record, one.reader, consents[name]) for name, one in found.items()]
    selection = select_sessions(now, SelectionRules(H, VERSIONS))
    assert set(trained(selection)) == {"yes", "none"} and selection.dropped_sessions == {"organisation": 2}


def test_forgotten_sessions_and_labels_of_another_part_are_dropped(new_traffic):
    traffic = new_traffic()
    for name in ("a", "b", "c"):
        traffic.answer(name, [1, 2], [10], user=name)
    found = candidates(traffic.label())
    forget(traffic.path, session="a")
    label = dataclasses.replace(found[1].label, start=found[1].label.start - 60)
    found[1] = dataclasses.replace(found[1], label=label)
    selection = select_sessions(found, SelectionRules(H, VERSIONS))
    assert selection.dropped_sessions == {"forgotten": 1, "window": 1} and set(trained(selection)) == {"c"}
    assert read_window(found[0], H) == "forgotten"


def test_a_canary_trains_each_arm_with_its_own_version(new_traffic):
    traffic = new_traffic(arm="candidate")
    traffic.answer("own", [1, 2], [10], version=3)
    _, after = traffic.answer("switched", [1, 2], [10], version=2)
    traffic.answer("switched", [*after, 3], [11], version=3)
    folder = traffic.label()
    arms = {"anchor": frozenset((2,)), "candidate": frozenset((3,))}
    during = TrainableVersions(VERSIONS.versions, (CanarySpan(BEGAN, BEGAN + H, arms),))
    selection = select(folder, during)
    assert trained(selection) == {"own": [(1, 0, False)], "switched": [(1, 0, False)]}
    assert selection.dropped_turns == {"arm": 1}
    assert not select(folder).dropped_turns


def test_rows_that_the_learner_cannot_take_are_dropped(new_traffic):
    traffic = new_traffic(routing=True)
    first, second = [1, 2, 10], [1, 2, 10, 3, 11, 12]
    traffic.answer("s", first[:2], first[2:], routing=routes_of(first)[:-1])
    traffic.answer("s", second[:4], second[4:], routing=routes_of(second)[:-1])
    _, cut = traffic.answer("cut", [1, 2], [10], finish="cancelled")
    traffic.answer("cut", [*cut, 3], [11], routing=routes_of([*cut, 3, 11])[:-1])
    folder = traffic.label()
    assert select(folder, longest_row=5).dropped_turns == {"long": 1}
    selection = select(folder, route_shape=SHAPE)
    assert trained(selection) == {"s": [(1, 1, False), (2, 0, False)]}
    assert selection.turns_of_dropped == {"routes": 2}
    assert select(folder, route_shape=(4, 3)).dropped_sessions == {"routes": 2}


def simulated(cycle):
    """The labelled sessions of a simulated cycle."""
    context, database = LabelContext(SimulatedText()), sqlite3.connect(":memory:")
    run = label_sessions(cycle, database, H, context=context, clock=lambda: cycle.all_aged)
    records = {record.session: record for record in cycle.sessions()}
    return [LabelledSession(label, records[label.session], cycle) for label in run.labels]


def test_bad_outcomes_stay_in():
    """Malformed calls, questions, sessions without an edit, and impatient users are what there is to learn from."""
    policy = SimulatedPolicy(version=3, question_rate=0.5, invalid_rate=0.5)
    cycle = SimulatedCycle(SimulatedWorld(users=30, sessions=120), policy, 0)
    assert min(cycle.asks.sum(), cycle.invalid.sum(), cycle.leaves.sum(), (cycle.lines == 0).sum()) > 5
    selection = select_sessions(simulated(cycle), SelectionRules(H, VERSIONS))
    assert len(selection.sessions) == 120 and not selection.dropped_sessions and not selection.dropped_turns


def test_the_turns_of_one_session_are_in_memory_at_a_time(monkeypatch):
    cycle = SimulatedCycle(SimulatedWorld(users=20, sessions=100), SimulatedPolicy(version=3), 1)
    labelled, read, references, most = simulated(cycle), cycle.read, [], 0

    def watched(session):
        nonlocal most
        traffic = read(session)
        references.append(weakref.ref(traffic))
        most = max(most, sum(one() is not None for one in references))
        return traffic

    monkeypatch.setattr(cycle, "read", watched)
    selection = select_sessions(labelled, SelectionRules(H, VERSIONS))
    assert len(selection.sessions) == len(references) == 100 and most <= 2
