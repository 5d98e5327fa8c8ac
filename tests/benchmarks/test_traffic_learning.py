"""The benchmark of simulated users: differences over users, what rows say, and what the arms change."""

import json

import numpy as np
import pytest

from benchmarks import traffic, traffic_arms, traffic_hack, traffic_learning, traffic_learning_rows
from benchmarks.control_algorithms import AcceptedSessions
from benchmarks.traffic_learning_kills import compare
from benchmarks.traffic_learning_rows import clustered_difference, summarize, write_rows
from composer_jax.realtime.simulation import SimulatedWorld
from composer_jax.rl.batch import Group
from tests.rl.made_up import conversation, episode


def row(arm="loop", seed=0, kept=(0.2, 0.5), cycles=9, population="first", **other):
    """A row whose share of kept lines goes from one number to the other in six cycles, with four users."""
    means = [kept[0] + (kept[1] - kept[0]) * i / 5 for i in range(6)] + [kept[0], *[kept[1]] * 2]
    content = [
        {
            "cycle": i + 1,
            "kept": mean,
            "edit_rate": 1 - mean,
            "malformed_call_rate": 0.1,
            "users": {f"u{j}": [10, 10 * mean + j % 2, 4, 2] for j in range(4)},
        }
        for i, mean in enumerate(means[:cycles])
    ]
    return {"population": population, "seed": seed, "arm": arm, "cycles": content, "releases": [], **other}


def test_the_interval_over_users_covers_the_truth_as_often_as_it_says():
    """Users differ, sessions of one user are alike, and both sides have the same users."""
    rng, covered, runs = np.random.default_rng(0), 0, 400
    for _ in range(runs):
        skill, sides = rng.normal(0.5, 0.2, 60), []
        for gain in (0.1, 0.0):
            counts = rng.integers(1, 6, 60)
            sides.append(
                {str(i): (float(rng.normal(skill[i] + gain, 0.3, n).sum()), int(n)) for i, n in enumerate(counts)}
            )
        result = clustered_difference(*sides)
        assert result is not None
        covered += result["low"] <= 0.1 <= result["high"]
    assert 0.92 <= covered / runs <= 0.98
    assert clustered_difference({"a": (0.0, 0)}, {"a": (1.0, 1)}) is None


def test_rows_say_gains_differences_and_what_is_regained():
    rows = [row(seed=seed) for seed in (0, 1)] + [
        row("none", kept=(0.2, 0.2)),
        row("rejection", kept=(0.2, 0.3), cycles=6),
    ]
    out = summarize(rows)
    assert out["kept"]["loop"]["difference"] == pytest.approx(0.3)
    assert out["kept"]["none"]["difference"] == 0 and out["kept"]["loop"]["users"] == 8
    assert out["kept_above"]["none"]["difference"] == pytest.approx(0.3)  # of seed 0, which both have
    assert out["kept_above"]["rejection"]["difference"] == pytest.approx(0.2)
    assert out["satisfied"]["loop"]["difference"] == 0 and "prompt" not in out["kept_above"]
    assert out["recovered"] == [1.0, 1.0] and "hack_stopped_at" not in out and "second" not in out
    second = summarize([*rows, row(population="second", kept=(0.1, 0.2))])["second"]
    assert second["kept"]["loop"]["difference"] == pytest.approx(0.1)


def test_a_hack_counts_as_stopped_only_if_it_is_in_every_seed():
    stopped = row("edits_priced", cycles=4, stopped_at=[0.01, "edited"])
    assert summarize([stopped])["hack_stopped_at"] == 0.01
    assert summarize([stopped, row("edits_priced", 1, cycles=4, stopped_at=None)])["hack_stopped_at"] is None
    loops = [row(stopped_at=None), row(seed=1, stopped_at=[0.25, "edited"])]
    assert summarize(loops)["loop_stopped_at"] == 0.25 and summarize(loops[:1])["loop_stopped_at"] is None


def test_the_bound_of_poison_is_that_of_the_caps():
    shares = {"yew": {"traffic": 0.3, "tokens": 0.2, "advantages": 0.25}}
    release = {"monitors": {"organisations": shares, "mean_advantage": 1.2}}
    poisoned = row("poison_capped", cycles=4, cap_organisation=0.2, advantage_limit=3.0) | {"releases": [release]}
    assert summarize([poisoned])["poison"]["poison_capped"] == shares["yew"] | {
        "bound": 0.5,
        "kept": pytest.approx([0.2, 0.26, 0.32, 0.38]),
    }


def test_rows_are_printed_at_once_by_both_benchmarks(tmp_path, capsys):
    file = tmp_path / "traffic_learning.json"
    write_rows(file, [row(), {"name": "kills", "kills": 20, "lost": 0}])
    traffic_learning.main([f"--rows={file}", "--arms=", f"--picture={tmp_path / 'kept.png'}"])
    *lines, last = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("| first | loop | +0.300 [") and (tmp_path / "kept.png").stat().st_size > 10_000
    printed = json.loads(last)
    assert printed["kept"]["loop"]["difference"] == pytest.approx(0.3)
    assert (printed["learning_kills"], printed["learning_lost"]) == (20, 0)
    (tmp_path / "traffic.json").write_text(json.dumps([{"name": name} for name in traffic.MEASURES]))
    traffic.main([f"--rows={tmp_path / 'traffic.json'}"])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["kept"] == printed["kept"]
    with pytest.raises(SystemExit):
        traffic_learning.main(["--arms=nothing"])


def test_advice_names_whose_repairs_users_kept():
    def truth(followed, kept, consent="training"):
        return {"followed": followed, "kept": {"3600": kept}, "consent": consent}

    truths = [truth(["ann"], 0.1), truth(["bob"], 0.9), truth(["eve"], 1.0, "none"), truth(["eve"], 1.0, "none")]
    assert traffic_arms.advice(truths) == "Follow the notes of bob."
    assert traffic_arms.advice([]) == "" == traffic_arms.advice(truths[:1])


def test_accepted_sessions_are_imitated_and_the_others_left_out():
    weights = []
    for reward in (0.4, -0.1):
        talk = conversation(0)
        made = episode(reward, talk, advantages=(1.0,) * len(talk.trained_spans()))
        (rows,) = AcceptedSessions().weigh(Group([made], [reward]), 0)
        weights.append({float(w) for one in rows for w in one.ce_weights[one.row.trained]})
        assert not any(one.advantages.any() for one in rows)
    assert weights == [{1.0}, {0.0}]
    (solved, other) = AcceptedSessions().weigh(Group([episode(1.0), episode(0.0)], [1.0, 0.0]), 0)
    assert solved[0].ce_weights.any() and not other[0].ce_weights.any()


@pytest.mark.slow
def test_a_canary_on_scripted_users_stops_a_policy_that_asks_in_place_of_editing():
    """Its edits are as good as before, so that only the rate of edits is lower."""
    world = SimulatedWorld(users=4000, sessions=4000)
    before, after = ({"edit_rate": rate, "good": 0.6 * rate, "malformed_call_rate": 0.02} for rate in (0.9, 0.2))
    assert traffic_hack.canary_fraction(before, before, 0, world) == (traffic_hack.RELEASED, "")
    fraction, reason = traffic_hack.canary_fraction(before, after, 0, world)
    assert fraction <= 0.05 and reason.startswith("edited: effect -")


def test_scripted_users_get_the_differences_that_sessions_show():
    """Of 240 sessions each: 0.95 and 0.93 differ by one standard error, 0.95 and 0.7 by ten."""
    users = {str(i): [8, 4.0, 0, 0] for i in range(30)}
    before = {"edit_rate": 0.95, "good": 0.4, "malformed_call_rate": None, "users": users}
    after = {"edit_rate": 0.93, "good": 0.6, "malformed_call_rate": 0.3, "users": users}
    assert traffic_hack.rates_after(before, after) == {"edit_rate": 0.95, "good": 0.6, "malformed_call_rate": 0.3}
    assert traffic_hack.rates_after(before, {**after, "edit_rate": 0.7})["edit_rate"] == 0.7


def test_a_gate_with_monitors_stops_before_any_user():
    held = {"release": 1, "state": "released", "monitored": {"verdict": "hold", "reasons": ["attempted"]}}
    assert traffic_hack.stopped_at(row() | {"releases": [held]}) == (0.0, "attempted")
    failed = {"release": 1, "state": "failed", "monitored": {"verdict": "pass", "reasons": []}}
    assert traffic_hack.stopped_at(row() | {"releases": [failed]}) is None
    refused = {"release": 1, "state": "rolled_back", "monitored": {"verdict": "fail", "reasons": ["worse"]}}
    assert traffic_hack.stopped_at(row("edits_priced") | {"releases": [refused]}) == (0.0, "worse")
    assert traffic_hack.stopped_at(row() | {"releases": [refused]}) is None, "the loop's own gate refused it, too"


def test_a_change_of_taste_is_not_taken_for_a_release(monkeypatch):
    """Cycle 7 has other users than cycle 6, with release 6 between them."""
    seen = []
    monkeypatch.setattr(traffic_hack, "rates_after", lambda before, after: {"edit_rate": 0.0})
    monkeypatch.setattr(
        traffic_hack, "canary_fraction", lambda before, rates, seed: seen.append(before["cycle"]) or (1.0, "")
    )
    passed = {"state": "released", "monitored": {"verdict": "pass", "reasons": []}}
    releases = [{"release": number, **passed} for number in range(1, 9)]
    assert traffic_hack.stopped_at(row(kept=(0.2, 0.3)) | {"releases": releases}) is None
    assert seen == [1, 2, 3, 4, 5, 7, 8]


def test_kills_are_compared_by_version():
    expected = {"weights": {0: 1, 1: 2}, "states": ["released"]}
    assert compare(expected, expected) == {"lost": 0, "problems": []}
    assert compare(expected, {"weights": {0: 1, 1: 3, 2: 4}, "states": []}) == {"lost": 2, "problems": ["states"]}


def test_the_committed_rows_are_of_known_arms():
    rows = traffic_learning_rows.read_rows(traffic_learning_rows.ROWS)
    assert all(one.get("name") == traffic_learning_rows.KILLS or one["arm"] in traffic_arms.ARMS for one in rows)
    summarize(rows)
