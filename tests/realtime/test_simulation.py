"""Scripted users have a known truth, which labels at one age estimate without bias."""

import sqlite3
import statistics

import numpy as np
import pytest

from composer_jax.errors import UserError
from composer_jax.realtime.labels.label_sessions import label_sessions
from composer_jax.realtime.labels.signal_types import LabelContext
from composer_jax.realtime.labels.window import GRACE_S
from composer_jax.realtime.simulation import AGES_S, SimulatedCycle, SimulatedPolicy, SimulatedText, SimulatedWorld
from composer_jax.serve.traffic.records import EVENT_FIELDS

H = 3600.0
SEEDS = 20


def z(values):
    return statistics.fmean(values) / (statistics.stdev(values) / len(values) ** 0.5)


def test_labels_at_one_age_are_unbiased_and_what_is_labelled_by_now_is_not():
    world, policy = SimulatedWorld(sessions=120), SimulatedPolicy()
    at_age, by_now, undone = [], [], []
    for seed in range(SEEDS):
        cycle = SimulatedCycle(world, policy, seed)
        run = label_sessions(
            cycle, sqlite3.connect(":memory:"), H, context=LabelContext(SimulatedText()), clock=_aged(cycle)
        )
        assert len(run.labels) == world.sessions
        kept = [one.signals["keep"].value for one in run.labels if one.signals["keep"].value is not None]
        at_age.append(statistics.fmean(kept) - cycle.expected_keep(H))
        by_now.append(cycle.known_by(cycle.opened.max(), H).mean() - cycle.expected_keep(H))
        true_undo = (cycle.revert_after <= 600) & (cycle.lines > 0)
        undone.append(statistics.fmean(one.signals["undo"].value for one in run.labels) - true_undo.mean())
    assert abs(z(at_age)) < 2
    assert z(by_now) < -3
    assert undone == pytest.approx([0.0] * SEEDS)


def _aged(cycle):
    return lambda: cycle.all_aged


def test_the_closed_form_is_the_mean_of_the_draws():
    cycle = SimulatedCycle(SimulatedWorld(users=20_000, sessions=20_000, concentration=1e6), SimulatedPolicy(), 1)
    for age in AGES_S:
        kept = cycle.keep_at(age)
        kept = kept[~np.isnan(kept)]
        assert abs(kept.mean() - cycle.expected_keep(age)) < 4 * kept.std() / len(kept) ** 0.5


def test_a_label_run_at_any_later_time_gives_the_same_labels():
    cycle = SimulatedCycle(SimulatedWorld(sessions=50), SimulatedPolicy(), 5)
    due = cycle.ended.max() + 60 + H + GRACE_S
    early, later = (
        label_sessions(cycle, sqlite3.connect(":memory:"), H, clock=lambda now=now: now)
        for now in (due, cycle.all_aged)
    )
    assert [(one.signals, one.reward) for one in early.labels] == [(one.signals, one.reward) for one in later.labels]


def test_records_have_the_form_of_traffic():
    cycle = SimulatedCycle(SimulatedWorld(sessions=40), SimulatedPolicy(question_rate=0.5), 0)
    kinds = set()
    for record in cycle.sessions():
        traffic = cycle.read(record.session)
        assert traffic.record == record
        assert [event.time for event in traffic.events] == sorted(event.time for event in traffic.events)
        known = {""} | {turn.answer for turn in traffic.turns}
        for event in traffic.events:
            kinds.add(event.kind)
            assert event.payload.keys() == EVENT_FIELDS[event.kind].keys()
            assert event.turn in known and event.arrival >= event.time
        for turn in traffic.turns:
            assert len(turn.tokens) == len(turn.logprobs) == len(turn.versions)
    assert {"shown", "accepted", "rejected", "undo", "edited_after", "follow_up", "stop_pressed", "tests_run"} <= kinds
    assert len(cycle.sessions(opened_before=1e9 + 7200)) < 40


def test_a_rate_out_of_range():
    with pytest.raises(UserError, match="invalid_rate"):
        SimulatedPolicy(invalid_rate=2.0)
