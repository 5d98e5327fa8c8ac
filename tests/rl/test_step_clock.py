"""StepClock: a row has what was spent since the start of its step only."""

import types

import pytest

from composer_jax.rl import step_clock
from composer_jax.rl.step_clock import StepClock


@pytest.mark.parametrize(("train_s", "sandbox_s"), [(2.0, 5.0), (9.0, 0.0)], ids=["in turns", "overlapping"])
def test_columns_are_differences_to_the_start(monkeypatch, train_s, sandbox_s):
    now = types.SimpleNamespace(perf_counter=lambda: 100.0)
    monkeypatch.setattr(step_clock, "time", now)
    monkeypatch.setattr(step_clock, "count_compilations", lambda: 7)
    policy, cache = types.SimpleNamespace(busy_seconds=40.0), types.SimpleNamespace(runs=11, hits=5)
    clock = StepClock.start(policy, cache)
    now.perf_counter = lambda: 110.0
    policy.busy_seconds, cache.runs, cache.hits = 43.0, 15, 6
    assert clock.read(policy, cache, train_s) == {
        "sandbox_runs": 4,
        "sandbox_hits": 1,
        "rollout_s": 3.0,
        "sandbox_s": sandbox_s,
        "train_s": train_s,
        "step_s": 10.0,
        "compilations": 0,
    }
