"""Scripted users have a known truth, which labels at one age estimate without bias."""

import dataclasses
import math
import sqlite3
import statistics

import numpy as np
import pytest

from composer_jax.errors import UserError
from composer_jax.realtime.labels.label_sessions import label_sessions
from composer_jax.realtime.labels.signal_types import LabelContext
from composer_jax.realtime.simulation import AGES_S, SimulatedCycle, SimulatedPolicy, SimulatedText, SimulatedWorld
from composer_jax.serve.traffic.records import EVENT_FIELDS

H = 3600.0
SEEDS = 20
CONTEXT = LabelContext(SimulatedText())
SLOW_REVERTS = SimulatedWorld(sessions=60, reverted_delay_s=3500.0)
"""What users have reverted is reported later than what they keep, within the grace."""


def z(values):
    return statistics.fmean(values) / (statistics.stdev(values) / len(values) ** 0.5)


def label_every_ten_minutes(cycle):
    """Labels made by runs that see only what has arrived: session -> signals."""
    database = sqlite3.connect(":memory:")
    labels = {}
    for now in np.arange(1e9, cycle.ended.max() + 2 * H + 3000, 600.0):
        run = label_sessions(cycle.at(now), database, H, context=CONTEXT, clock=lambda now=now: now)
        labels |= {one.session: one.signals for one in run.labels}
    return labels


def value(signals, name):
    """The observed values of a signal."""
    return [one[name].value for one in signals if one[name].value is not None]


@pytest.mark.parametrize("world", [SimulatedWorld(sessions=60), SLOW_REVERTS], ids=["even delays", "slow reverts"])
def test_labels_at_one_age_are_unbiased_however_often_labels_are_made(world):
    keep, corrected, undone = [], [], []
    for seed in range(SEEDS):
        cycle = SimulatedCycle(world, SimulatedPolicy(), seed)
        labels = label_every_ten_minutes(cycle)
        assert len(labels) == world.sessions
        keep.append(statistics.fmean(value(labels.values(), "keep")) - cycle.expected_keep(H))
        survival = cycle.other_survivors[:, AGES_S.index(H)] / cycle.other_lines
        truth = np.nanmean(np.minimum(1, cycle.keep_at(H) / np.maximum(0.5, survival)))
        corrected.append(statistics.fmean(value(labels.values(), "keep_corrected")) - truth)
        true_undo = (cycle.revert_after <= 600) & (cycle.lines > 0)
        undone.append(statistics.fmean(value(labels.values(), "undo")) - true_undo.mean())
    assert abs(z(keep)) < 2
    assert abs(z(corrected)) < 2
    assert undone == pytest.approx([0.0] * SEEDS)


def test_many_runs_and_one_late_run_make_the_same_labels():
    world = dataclasses.replace(SLOW_REVERTS, reverted_delay_s=4500.0, reply_s=1200.0)  # arrives until the last moment
    cycle = SimulatedCycle(world, SimulatedPolicy(), 5)
    late = label_sessions(cycle, sqlite3.connect(":memory:"), H, context=CONTEXT, clock=lambda: cycle.all_aged)
    assert label_every_ten_minutes(cycle) == {one.session: one.signals for one in late.labels}


def test_what_is_known_by_now_is_biased():
    """The same labeller, which takes every session for old enough: early bad ends count before the others."""
    at_age, by_now = [], []
    for seed in range(SEEDS):
        cycle = SimulatedCycle(SimulatedWorld(sessions=120, censored=0.0, late=0.0), SimulatedPolicy(), seed)
        for view, clock, differences in (
            (cycle, lambda cycle=cycle: cycle.all_aged, at_age),
            (cycle.at(cycle.opened.max()), lambda: math.inf, by_now),
        ):
            own = {"outcome": "benchmarks.traffic:known_outcome"}
            run = label_sessions(view, sqlite3.connect(":memory:"), H, context=CONTEXT, own_signals=own, clock=clock)
            outcomes = value([one.signals for one in run.labels], "outcome")
            differences.append(statistics.fmean(outcomes) - cycle.expected_keep(H))
    assert abs(z(at_age)) < 2
    assert z(by_now) < -3


def test_the_closed_form_is_the_mean_of_the_draws():
    cycle = SimulatedCycle(SimulatedWorld(users=20_000, sessions=20_000, concentration=1e6), SimulatedPolicy(), 1)
    for age in AGES_S:
        kept = cycle.keep_at(age)
        kept = kept[~np.isnan(kept)]
        assert abs(kept.mean() - cycle.expected_keep(age)) < 4 * kept.std() / len(kept) ** 0.5


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
    early = cycle.at(1e9 + 7200)
    assert len(early.sessions()) < 40
    for record in early.sessions():
        traffic = early.read(record.session)
        assert all(turn.time <= early.now for turn in traffic.turns)
        assert all(event.arrival <= early.now for event in traffic.events)


def test_a_rate_out_of_range():
    with pytest.raises(UserError, match="invalid_rate"):
        SimulatedPolicy(invalid_rate=2.0)
