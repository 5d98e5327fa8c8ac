"""Labels are made once, at one age, and the same after a run that was killed; sessions wait for their judge."""

import dataclasses
import itertools
import sqlite3

import pytest

from composer_jax.errors import UserError
from composer_jax.realtime.labels import label_sessions as labelling
from composer_jax.realtime.labels.judge import JudgeError, JudgeUnavailable, RuleJudge
from composer_jax.realtime.labels.label_sessions import label_sessions
from composer_jax.realtime.labels.signal_table import SIGNALS
from composer_jax.realtime.labels.signal_types import LabelContext
from composer_jax.realtime.labels.store import LabelStore
from composer_jax.realtime.labels.window import GRACE_S, WRITE_MARGIN_S
from composer_jax.realtime.simulation import SimulatedCycle, SimulatedPolicy, SimulatedWorld
from tests.realtime.labels.sessions import OPENED, TEXT, H, measured, session, turn

CONTEXT = LabelContext(text=TEXT)


class Traffic:
    """Sessions in memory, with those that are forgotten."""

    def __init__(self, *traffic, forgotten=()):
        self._by_name = {one.record.session: one for one in traffic}
        self._forgotten = forgotten

    def sessions(self):
        return [one.record for one in self._by_name.values()]

    def read(self, name):
        return self._by_name[name]

    def is_forgotten(self, name):
        return name in self._forgotten


@pytest.fixture
def database(tmp_path):
    with sqlite3.connect(tmp_path / "traffic.sqlite") as connection:
        yield connection
    connection.close()


def played(name="s", kept=3):
    return session([turn("a1", 100, "Fix it", version=4)], [measured(100 + H, added=4, added_kept=kept)], name=name)


def at(time):
    return lambda: OPENED + time


DUE = 100 + H + GRACE_S + WRITE_MARGIN_S


def test_a_session_is_labelled_once_and_not_before_its_age(database):
    traffic = Traffic(played())
    early = label_sessions(traffic, database, H, context=CONTEXT, clock=at(DUE - 1))
    assert (early.labels, early.waiting) == ([], 1)
    first = label_sessions(traffic, database, H, context=CONTEXT, clock=at(DUE))
    again = label_sessions(traffic, database, H, context=CONTEXT, clock=at(DUE + 9))
    assert (len(first.labels), first.waiting, again.labels) == (1, 0, [])
    (stored,) = LabelStore(database).read(H)
    assert stored == first.labels[0]
    assert stored.signals.keys() == SIGNALS.keys()
    assert (stored.version, stored.judge, stored.start, stored.made) == ("4", "rules-1", OPENED + 100, OPENED + DUE)
    LabelStore(database).insert([dataclasses.replace(stored, late=9)])  # a second insert changes nothing
    assert LabelStore(database).read(H) == [stored]


def test_other_ages_and_labellers_have_labels_of_their_own(database):
    traffic = Traffic(played())
    label_sessions(traffic, database, H, context=CONTEXT, clock=at(DUE))
    label_sessions(traffic, database, 600.0, context=CONTEXT, clock=at(DUE))
    other = label_sessions(traffic, database, H, context=LabelContext(), clock=at(DUE + 1))
    assert LabelStore(database).newest_labeller(H) == other.labeller
    assert database.execute("SELECT count(*) FROM labels").fetchone() == (3,)


def test_a_labeller_changes_with_its_format_its_grace_and_the_files_of_own_signals(tmp_path):
    def version(context=CONTEXT, own=None, grace=GRACE_S):
        return label_sessions(Traffic(), sqlite3.connect(":memory:"), H, context=context, own_signals=own, grace=grace)

    class OtherText(type(TEXT)):
        version = "other"

    versions = [version(), version(grace=1.0), version(LabelContext(OtherText()))]
    file = tmp_path / "own.py"
    for body in ("return 1", "return 2"):
        file.write_text(f"def turns(traffic, horizon, context):\n    {body}\n")
        versions.append(version(own={"mine": f"{file}:turns"}))
    assert len({one.labeller for one in versions}) == 5
    assert version().labeller == versions[0].labeller


def test_forgotten_sessions_get_no_label(database):
    traffic = Traffic(played("a"), played("b"), forgotten={"a"})
    run = label_sessions(traffic, database, H, context=CONTEXT, clock=at(DUE))
    assert ([one.session for one in run.labels], run.forgotten) == (["b"], 1)


class Withdrawing(Traffic):
    """Its user withdraws while labels are made: after the list of sessions, or after the session was read."""

    def __init__(self, *traffic, read):
        super().__init__(*traffic)
        self._is_read, self._gone = read, False

    def sessions(self):
        return [] if self._gone else super().sessions()

    def read(self, name):
        self._gone = True
        if not self._is_read:
            raise UserError(f"no session {name!r}")
        return super().read(name)

    def is_forgotten(self, name):
        return self._gone


@pytest.mark.parametrize("read", [False, True])
def test_a_user_who_withdraws_meanwhile_leaves_no_label(database, read):
    run = label_sessions(Withdrawing(played(), read=read), database, H, context=CONTEXT, clock=at(DUE))
    assert (run.labels, run.forgotten, LabelStore(database).read(H)) == ([], 1, [])


class Damaged(Traffic):
    def read(self, name):
        raise UserError("turns/000 is missing")


def test_a_session_that_cannot_be_read_is_an_error(database):
    with pytest.raises(UserError, match="turns/000"):
        label_sessions(Damaged(played()), database, H, clock=at(DUE))


def test_a_session_that_spans_an_update_says_so(database):
    traffic = Traffic(session([turn("a1", 100, "Fix it", version=4), turn("a2", 200, version=5)]))
    assert label_sessions(traffic, database, H, clock=at(9 * H)).labels[0].version == "4-5"


def test_a_killed_run_is_continued_with_the_same_labels(database, monkeypatch):
    cycle = SimulatedCycle(SimulatedWorld(sessions=60, users=20), SimulatedPolicy(), 3)
    clock = lambda: cycle.all_aged  # noqa: E731
    whole = label_sessions(cycle, sqlite3.connect(":memory:"), H, context=CONTEXT, clock=clock)
    monkeypatch.setattr(labelling, "AT_ONCE", 10)
    insert, calls = LabelStore.insert, []

    def fail_later(self, labels, is_forgotten):
        calls.append(labels)
        if len(calls) == 4:
            raise KeyboardInterrupt
        insert(self, labels, is_forgotten)

    monkeypatch.setattr(LabelStore, "insert", fail_later)
    with pytest.raises(KeyboardInterrupt):
        label_sessions(cycle, database, H, context=CONTEXT, clock=clock)
    assert len(LabelStore(database).read(H)) == 30
    rest = label_sessions(cycle, database, H, context=CONTEXT, clock=clock)
    assert len(rest.labels) == 30
    assert LabelStore(database).read(H) == sorted(whole.labels, key=lambda one: one.session)


@pytest.mark.parametrize("options", [{"retention_days": 0.08}, {"grace": -1.0}])
def test_a_horizon_that_sessions_do_not_reach(database, options):
    with pytest.raises(UserError):
        label_sessions(Traffic(), database, H, **options)
    for horizon in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(UserError):
            label_sessions(Traffic(), database, horizon)
    label_sessions(Traffic(), database, H, retention_days=0.09)


class BrokenJudge:
    version = "broken"

    def __init__(self, broken=lambda call: True, error=JudgeUnavailable):
        self._calls, self._broken, self._error = itertools.count(), broken, error

    def vote(self, follow_up):
        if self._broken(next(self._calls)):
            raise self._error("no route to the judge")
        return RuleJudge().vote(follow_up)


def talkative(count):
    return SimulatedCycle(SimulatedWorld(sessions=count, says_so=1.0, patience_s=1e9), SimulatedPolicy(), 0)


def test_a_judge_that_stops_answering_ends_the_run_and_takes_no_label_that_was_made(database):
    cycle = talkative(labelling.JUDGE_FAILURES * 2)
    due = cycle.ended.max() + 25 + H + GRACE_S + WRITE_MARGIN_S
    context = LabelContext(TEXT, BrokenJudge(lambda call: call >= 5))
    with pytest.raises(UserError, match="no route .* 5 sessions were labelled before"):
        label_sessions(cycle, database, H, context=context, clock=lambda: due)
    assert len(LabelStore(database).read(H)) == 5


def test_a_judge_that_never_answers_keeps_no_session_for_more_than_a_day(database):
    cycle = talkative(labelling.JUDGE_FAILURES * 2)
    late = cycle.ended.max() + 25 + H + GRACE_S + WRITE_MARGIN_S + labelling.JUDGE_WAIT_S
    run = label_sessions(cycle, database, H, context=LabelContext(TEXT, BrokenJudge()), clock=lambda: late)
    assert (len(run.labels), run.unjudged) == (labelling.JUDGE_FAILURES * 2, 0)


def test_labels_are_read_from_a_moment_on_and_with_the_signals_that_are_asked_for(database):
    traffic = Traffic(*(played(name) for name in "abc"))
    label_sessions(traffic, database, H, context=CONTEXT, clock=at(DUE))
    store = LabelStore(database)
    first = store.read(H)[0]
    store.insert([dataclasses.replace(first, session=f"later {i}", start=first.start + i) for i in (1, 2)])
    assert [label.session for label in store.read(H, since=first.start + 1)] == ["later 1", "later 2"]
    assert [label.session for label in store.read(H, most=1)] == ["later 2"]
    assert store.read(H, is_wanted=lambda session: session == "later 2") == store.read(H, most=1)
    (small, *_) = store.read(H, signals=("keep", "thumb", "no such signal"))
    assert small.signals == {name: first.signals[name] for name in ("keep", "thumb")}


def test_sessions_whose_judge_cannot_be_asked_wait_for_a_day(database):
    cycle = talkative(12)
    due = cycle.ended.max() + 25 + H + GRACE_S + WRITE_MARGIN_S

    def run(judge, now):
        return label_sessions(cycle, database, H, context=LabelContext(TEXT, judge), clock=lambda: now)

    down = run(BrokenJudge(), due)
    assert (down.labels, down.unjudged, down.waiting) == ([], 12, 0)
    half = run(BrokenJudge(lambda call: call % 2), due)
    assert (len(half.labels), half.unjudged) == (6, 6)
    assert {one.signals["follow_up"].state for one in half.labels} == {"observed"}
    late = run(BrokenJudge(), due + labelling.JUDGE_WAIT_S)
    assert (len(late.labels), late.unjudged) == (6, 0)
    assert {one.signals["follow_up"].state for one in late.labels} == {"censored"}


def test_a_message_without_a_vote_is_censored_at_once(database):
    cycle = talkative(30)
    judge = BrokenJudge(error=JudgeError)
    run = label_sessions(cycle, database, H, context=LabelContext(TEXT, judge), clock=lambda: cycle.all_aged)
    assert len(run.labels) == 30
    assert {one.signals["follow_up"].state for one in run.labels} == {"censored"}
    assert {one.judge for one in run.labels} == {"broken"}


def test_texts_are_decoded_once(database):
    calls = []

    class CountedText(type(TEXT)):
        def user(self, suffix):
            calls.append(suffix)
            return super().user(suffix)

    turns = [turn("a0", 100, "Fix it")]
    for number in range(1, 20):
        turns.append(turn(f"a{number}", 100 + number, "It does not work", parent=turns[-1]))
    label_sessions(Traffic(session(turns)), database, H, context=LabelContext(CountedText()), clock=at(9 * H))
    assert len(calls) == len(turns)
