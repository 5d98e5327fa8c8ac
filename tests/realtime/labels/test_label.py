"""Labels are made once, at one age, unbiased, and the same after a run that was killed."""

import dataclasses
import sqlite3

import pytest

from composer_jax.errors import UserError
from composer_jax.realtime.labels import label_sessions as labelling
from composer_jax.realtime.labels.judge import JudgeError, RuleJudge
from composer_jax.realtime.labels.label_sessions import label_sessions
from composer_jax.realtime.labels.reward import BucketStatistics, RewardWeights, clip_reward, reward_terms
from composer_jax.realtime.labels.signal_table import SIGNALS
from composer_jax.realtime.labels.signal_types import LabelContext, censored, observed, undefined
from composer_jax.realtime.labels.store import LabelStore
from composer_jax.realtime.labels.window import GRACE_S, WRITE_MARGIN_S
from composer_jax.realtime.simulation import SimulatedCycle, SimulatedPolicy, SimulatedWorld
from tests.realtime.labels.sessions import OPENED, TEXT, H, event, measured, session, turn

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
    one = session([turn("a1", 100, "Fix it", version=4)], [measured(100 + H, added=4, added_kept=kept)], name=name)
    return one


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
    LabelStore(database).insert([dataclasses.replace(stored, reward=9.0)])  # a second insert changes nothing
    assert LabelStore(database).read(H) == [stored]


def test_other_ages_and_labellers_have_labels_of_their_own(database):
    traffic = Traffic(played())
    label_sessions(traffic, database, H, context=CONTEXT, clock=at(DUE))
    label_sessions(traffic, database, 600.0, context=CONTEXT, clock=at(DUE))
    other = label_sessions(traffic, database, H, context=CONTEXT, weights=RewardWeights(keep=0.5), clock=at(DUE + 1))
    store = LabelStore(database)
    assert store.horizons() == [600.0, H]
    assert store.newest_labeller(H) == other.labeller
    assert database.execute("SELECT count(*) FROM labels").fetchone() == (3,)


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

    def __init__(self, works_every=0):
        self._calls, self._works_every = 0, works_every

    def vote(self, follow_up):
        self._calls += 1
        if self._works_every and self._calls % self._works_every == 0:
            return RuleJudge().vote(follow_up)
        raise JudgeError("no route to the judge")


def talkative(count):
    return SimulatedCycle(SimulatedWorld(sessions=count, says_so=1.0, patience_s=1e9), SimulatedPolicy(), 0)


def test_a_judge_that_never_answers_ends_the_run_before_a_label_is_made(database):
    cycle = talkative(labelling.JUDGE_FAILURES * 2)
    context = LabelContext(TEXT, BrokenJudge())
    with pytest.raises(UserError, match="no route"):
        label_sessions(cycle, database, H, context=context, clock=lambda: cycle.all_aged)
    assert LabelStore(database).read(H) == []


def test_a_judge_that_fails_now_and_then_censors(database):
    cycle = talkative(40)
    run = label_sessions(cycle, database, H, context=LabelContext(TEXT, BrokenJudge(2)), clock=lambda: cycle.all_aged)
    states = [one.signals["follow_up"].state for one in run.labels]
    assert states.count("censored") == 20
    for one in run.labels:
        if one.signals["follow_up"].state == "censored":
            assert one.terms["follow_up"] == 0
    assert {one.judge for one in run.labels} == {"broken"}


def signals(**values):
    return {name: undefined("nothing") for name in SIGNALS} | {k: observed(v) for k, v in values.items()}


def test_the_reward_is_the_weighted_sum_of_what_was_seen():
    good = signals(keep_corrected=0.9, accept_share=1.0, follow_up=1, undo=0, invalid_calls=0.5, tokens=200)
    bad = signals(keep_corrected=0.1, accept_share=0.0, follow_up=-1, undo=1, needless_question=1, tokens=800)
    table = BucketStatistics([("b", good), ("b", bad), ("b", signals(tokens=200))])
    weights = RewardWeights()
    terms = reward_terms(weights, good, "b", table)
    assert terms == pytest.approx(
        {
            "keep_corrected": 0.4,
            "follow_up": 0.5,
            "accept_share": 0.125,
            "undo": 0,
            "invalid_calls": -0.25,
            "needless_question": 0,
            "cost": 0,
        }
    )
    assert reward_terms(weights, bad, "b", table)["cost"] == pytest.approx(-0.05 * 1.3862943611)
    assert reward_terms(weights, signals(tokens=100), "b", table)["cost"] == 0
    # cheaper than the median earns nothing, and what is missing adds nothing
    assert set(reward_terms(weights, signals(), "b", table).values()) == {0.0}
    assert clip_reward({"a": 3.0, "b": 0.5}, 2.0) == 2.0
    assert clip_reward({"a": -3.0}, 2.0) == -2.0


def test_terms_are_relative_to_their_bucket_if_it_is_large_enough():
    easy = [("easy", signals(keep_corrected=1.0))] * 20
    hard = [("hard", signals(keep_corrected=0.0))] * 20
    few = [("few", signals(keep_corrected=0.5))] * 2
    table = BucketStatistics([*easy, *hard, *few])
    for bucket, mean in (("easy", 1.0), ("hard", 0.0), ("few", 0.5), ("new", 0.5)):
        assert table.mean(bucket, "keep_corrected") == pytest.approx(mean)


def test_own_weights_and_costs():
    table = BucketStatistics([("b", signals(thumb=1.0)), ("b", signals(thumb=-1.0))])
    terms = reward_terms(RewardWeights(own={"thumb": 0.2}), signals(thumb=1.0), "b", table)
    assert terms["own.thumb"] == pytest.approx(0.2)
    assert (
        reward_terms(RewardWeights(own={"thumb": 0.2}), {**signals(), "thumb": censored("x")}, "b", table)["own.thumb"]
        == 0
    )
    for bad in ({"keep": -1.0}, {"cost_signal": "euros"}, {"limit": float("nan")}, {"own": {"x": float("inf")}}):
        with pytest.raises(UserError):
            RewardWeights(**bad)


def test_an_unknown_weight_is_refused(database):
    with pytest.raises(UserError, match="smiles"):
        label_sessions(Traffic(), database, H, weights=RewardWeights(own={"smiles": 1.0}))


def test_one_user_cannot_push_a_reward_beyond_the_limit(database):
    """Forged events of one's own session: the reward stays in its bounds, other sessions' centres hardly move."""
    forged = [event("thumb", 150 + i, "a1", value=1, name=f"t{i}") for i in range(100)]
    forged += [event("commit", 160, added_kept=10**9), measured(100 + H, added=10**9, added_kept=10**9)]
    attacker = session([turn("a1", 100, "Fix it")], forged, name="x")
    weights = RewardWeights(own={"thumb": 1.0, "edit_weight": 1.0})
    run = label_sessions(Traffic(attacker, played()), database, H, context=CONTEXT, weights=weights, clock=at(DUE))
    assert all(abs(one.reward) <= weights.limit for one in run.labels)
