"""Drawn episodes, roles of a fleet, splits of chips, and what to buy next."""

import dataclasses
import math
import sys

import numpy as np
import pytest

from composer_jax.errors import UserError
from composer_jax.rl.config import RLConfig
from composer_jax.sampler.config import make_limits
from composer_jax.sampler.session_gate import SessionGate
from composer_jax.scale.simulation.assumptions import Assumptions
from composer_jax.scale.simulation.roles import Fleet, Speeds, TokenBytes, make_roles, turn_seconds
from composer_jax.scale.simulation.simulation import Simulation
from composer_jax.scale.simulation.study import (
    VARIANTS,
    Study,
    parse_splits,
    run_study,
    simulate_table,
    split_chips,
    token_bytes_of,
)
from composer_jax.scale.simulation.table import advise, format_study
from composer_jax.scale.simulation.workload import FINISHED, HUNG, LOST, Attempt, DrawnWorkload
from composer_jax.schema.run_config import run_config
from configs.kimi_k2_5 import get_config
from tests.scale.configuration import small_config
from tests.scale.simulation.test_simulation import ConstantWorkload

SPEEDS = Speeds(100.0, 4, ((8, 0.02), (16, 0.03)), prefill_s=1e-4, weight_bytes=4e9, mean_context=1000)
SIZES = TokenBytes(route=0, batch=0, batch_tokens=0, call_tokens=8)
KIMI = TokenBytes(route=960, batch=992, batch_tokens=16_777_216, call_tokens=8)
ENGINES = {"engines": ("10.0.0.6:9000",), "publish": "weights"}
"""Fields of RLConfig: engines that share no process."""
QUIET = Assumptions(lost_fraction=0.0, hung_fraction=0.0, grade_s=0.0, command_s=0.0, tool_spread=0.0)


def drawn(assumed: Assumptions, groups: int = 4000, **options) -> np.ndarray:
    """[episodes, 4]: tool_s, sampled, row_tokens, fate."""
    options = dict(group_size=16, max_model_len=32_768, max_turns=10**6) | options
    workload = DrawnWorkload(assumed, **options)
    return np.array([attempt for group in range(groups) for attempt in workload.attempts(group)])


@pytest.mark.parametrize("tail", ["lognormal", "pareto"])
def test_turns_have_the_median_and_the_99th_percentile_that_were_asked_for(tail):
    turns = drawn(dataclasses.replace(QUIET, turns_tail=tail))[:, 1] / QUIET.turn_tokens
    assert np.median(turns) == pytest.approx(50, rel=0.02)
    assert np.percentile(turns, 99) == pytest.approx(250, rel=0.05)


def test_seconds_and_rows_follow_from_the_turns():
    attempts = drawn(dataclasses.replace(QUIET, turns_p99=50.0), groups=10)  # every episode has 50 turns
    answers = 50 * (300 + 600)
    contexts = math.ceil(answers / (32_768 - 4096))
    assert np.allclose(attempts[:, :3], [50 * 2.0, 50 * 300, answers + contexts * 4096])
    workload = DrawnWorkload(
        dataclasses.replace(QUIET, turns_p99=50.0), group_size=2, max_model_len=32_768, max_turns=10**6
    )
    assert workload.prefilled_per_sampled == pytest.approx((50 * 600 + contexts * 4096) / (50 * 300))


def test_the_mean_of_tool_seconds_does_not_depend_on_their_spread():
    wide = drawn(dataclasses.replace(QUIET, tool_spread=0.5))
    assert np.mean(wide[:, 0]) == pytest.approx(np.mean(wide[:, 1]) / 300 * 2.0, rel=0.02)


def test_faults_have_their_fractions_and_lost_attempts_are_cut_short():
    attempts = drawn(dataclasses.replace(QUIET, turns_p99=50.0, lost_fraction=0.2, hung_fraction=0.1))
    fates = attempts[:, 3]
    assert [np.mean(fates == fate) for fate in (FINISHED, LOST, HUNG)] == pytest.approx([0.7, 0.2, 0.1], abs=0.01)
    assert np.mean(attempts[fates == LOST, 1]) == pytest.approx(7500, rel=0.02)


def test_equal_groups_are_spread_evenly():
    workload = DrawnWorkload(Assumptions(equal_groups=0.3), group_size=2, max_model_len=8000, max_turns=50)
    for first in (0, 1000, 123_456):
        assert sum(workload.is_trained(group) for group in range(first, first + 100)) in range(67, 74)


def test_an_episode_does_not_depend_on_which_groups_were_asked_for_before():
    workload = DrawnWorkload(Assumptions(), group_size=4, max_model_len=32_768, max_turns=400)
    later = [workload.attempts(group) for group in range(20_000)][19_999]
    assert DrawnWorkload(Assumptions(), group_size=4, max_model_len=32_768, max_turns=400).attempts(19_999) == later


def test_roles_follow_from_what_was_bought():
    roles = make_roles(Fleet(10, 9, 50), SPEEDS, dataclasses.replace(QUIET, packing=0.5), 2.0, 24, SIZES)
    assert roles.sessions == 2 * 24 and roles.sandboxes == 50  # two replicas of four chips
    assert 1 / roles.rates[32] == pytest.approx(0.03 + 16 * 2 * 1e-4)
    assert 1 / roles.rates[24] == pytest.approx(0.025 + 12 * 2 * 1e-4)
    assert 48 * roles.rates[48] == pytest.approx(32 * roles.rates[32]), "slots are shared"
    assert roles.rates[1] == roles.rates[2]  # one conversation for each replica
    assert roles.learn_s_per_token == pytest.approx(1 / (0.5 * 100 * 10))
    encode, send, decode = 4e9 / (1e9 * 2.5), 2 * 0.02 * 4e9 / 12.5e9, 4e9 / 1.1e9
    assert roles.publish_s == pytest.approx(encode + send + decode)


def test_messages_calls_and_batches_take_the_seconds_of_their_bytes():
    rates = {"message_bytes_per_s": 1e9, "batch_send_bytes_per_s": 2e9, "batch_receive_bytes_per_s": 1.2e9}
    assumed = dataclasses.replace(QUIET, message_s=0.001, packing=0.5, **rates)
    assert turn_seconds(KIMI, assumed) == pytest.approx(0.001 + (900 * 960 + 300 * 8 + 600 * 4 + 1024) / 1e9)
    slow = dataclasses.replace(assumed, network_bytes_per_s=1e6)
    assert turn_seconds(KIMI, slow) == pytest.approx(0.874, rel=0.01), "the network is slower than the host"
    for chips in (8, 1024):
        roles = make_roles(Fleet(chips, 4, 50), SPEEDS, assumed, 0.0, 16, KIMI)
        others = (chips / 4 - 1) / (chips / 4)
        learning, sending = 1 / (100 * chips), max(992 * others / 2e9, 992 / (chips / 4) / 1.2e9)
        assert roles.learn_s_per_token == pytest.approx(max(learning, sending) / 0.5)
        assert roles.learn_s == pytest.approx(16_777_216 * sending), "of the first batch nothing is hidden"
        assert roles.message_s_per_token * 300 == pytest.approx(turn_seconds(KIMI, assumed))
    assert make_roles(Fleet(4, 4, 50), SPEEDS, assumed, 0.0, 16, KIMI).learn_s == 0, "one host has all of its batch"
    busy = make_roles(Fleet(4, 4, 50), SPEEDS, dataclasses.replace(assumed, call_s=0.8), 0.0, 16, KIMI)
    assert busy.rates[1] == pytest.approx(8 / 0.8), "an engine waits for a host that takes longer than its devices"


@pytest.mark.parametrize("engines", [2, 20])
def test_engines_of_one_process_wait_where_their_calls_together_take_its_python_longer_than_the_devices(engines):
    """A call of 8 tokens takes the devices 0.16 s for up to 8 conversations and 0.24 s for 16; the host 0.02 s."""
    assumed, fleet = dataclasses.replace(QUIET, call_s=0.02), Fleet(4, 4 * engines, 50)
    apart = make_roles(fleet, SPEEDS, assumed, 0.0, 16, SIZES)
    together = make_roles(fleet, SPEEDS, assumed, 0.0, 16, SIZES, one_process=True)
    for rate, each in zip(together.rates[1:], apart.rates[1:], strict=True):
        assert 8 / rate == pytest.approx(max(8 / each, 0.02 * engines))
    assert (together == apart) == (engines * 0.02 < 0.16)


def test_a_study_knows_whether_its_engines_share_a_process():
    """Ten engines whose hosts take 0.4 s for a call."""
    steps = []
    for engines in ({}, ENGINES):
        study = small_study(**engines)
        slow = dataclasses.replace(study, assumed=dataclasses.replace(study.assumed, call_s=0.4))
        steps.append(slow.simulate(Fleet(1000, 40, 200)).steps_per_day)
    assert steps[0] < 0.3 * steps[1]


def test_sizes_follow_from_the_network_and_from_what_is_replayed():
    config = run_config(get_config())
    assert token_bytes_of(config) == KIMI
    off = dataclasses.replace(config, rl=dataclasses.replace(config.rl, router_replay="off"))
    assert (token_bytes_of(off).route, token_bytes_of(off).batch) == (0, 32)


@pytest.mark.parametrize(
    ("cache_tokens", "context", "sessions"),
    [(0, 32.0, 16), (0, 16.0, 25), (4096, 32.0, 128), (4096, 8.0, 409), (256, 32.0, 16)],
)
def test_the_cache_of_a_replica_holds_the_sessions_that_the_gate_would_open(cache_tokens, context, sessions):
    """16 slots of one replica and max_model_len=32; 0 is room for 16 contexts of that length."""
    config = run_config(small_config(sampler__cache_tokens=cache_tokens))
    assert Study(dataclasses.replace(config, rl=small_study().config.rl), SPEEDS, QUIET).sessions(context) == sessions

    def open_sessions() -> int:
        """A gate that has learned what a session needs opens as many."""
        sizes = dataclasses.replace(config.sampler, slots=16, page_size=1, cache_tokens=cache_tokens or 16 * 32)
        gate = SessionGate(make_limits(sizes, 1, config.model), lambda: False, lambda: 0)
        for _ in range(1000):
            place = gate.open(ahead=False)
            gate.note(place, int(context))
            gate.close(place)
        while gate.has_room(ahead=False) and gate.n_open < 500:
            gate.open(ahead=False)
        return gate.n_open

    assert open_sessions() == sessions


@pytest.mark.parametrize(("sessions", "at_least", "at_most"), [(64, 0.2, 0.25), (256, 0.85, 1.0)])
def test_engines_are_used_while_tools_run_where_they_hold_more_sessions_than_slots(sessions, at_least, at_most):
    """64 slots, and episodes that sample for 10 s, if nobody waits for a slot, and run tools for 30 s."""
    speeds = dataclasses.replace(SPEEDS, decode_steps=((64, 0.02),), prefill_s=0.0)
    roles = make_roles(Fleet(1, 4, 1000), speeds, dataclasses.replace(QUIET, install_pause_s=0.0), 0.0, sessions, SIZES)
    config = RLConfig(groups={"repository": 64}, group_size=8, max_staleness=4)
    workload = ConstantWorkload(Attempt(30.0, 500.0, 0.0), group_size=8)
    outcome = Simulation(config, roles, workload, parts=4).run(20_000, warm_up_s=1000)
    assert at_least <= outcome.engine_utilisation <= at_most


@pytest.mark.parametrize("fleet", [Fleet(0, 8, 8), Fleet(8, 3, 8), Fleet(8, 8, 0)])
def test_a_fleet_without_a_role_is_refused(fleet):
    with pytest.raises(UserError, match="are too few; a learner has at least one chip, rollout 4"):
        make_roles(fleet, SPEEDS, QUIET, 1.0, 16, SIZES)


def test_splits_of_chips():
    assert split_chips(64, parse_splits(["1:7", "1:1", "3:1"]), 8) == [(8, 56), (32, 32), (48, 16)]
    assert split_chips(64, [(1, 2)], 8) == [(24, 40)]  # 42.7 chips are five replicas
    with pytest.raises(UserError, match="--splits=3:1 of --chips=64 leaves rollout 0 chips; a replica .* has 32"):
        split_chips(64, [(3, 1)], 32)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (dict(turn_tokens=0.0), "--turn_tokens=0.0 is out of range"),
        (dict(tool_s=-1.0), "--tool_s=-1.0 is out of range"),
        (dict(lost_fraction=1.0), "--lost_fraction=1.0 is out of range"),
        (dict(message_bytes_per_s=0.0), "--message_bytes_per_s=0.0 is out of range"),
        (dict(packing=0.0), "--packing=0.0 is out of range"),
        (dict(turns_p99=20.0), "--turns_p99=20.0 is below --turns_median=50.0"),
        (dict(turns_tail="normal"), "--turns_tail='normal' is unknown; use lognormal or pareto"),
        (dict(lost_fraction=0.6, hung_fraction=0.5), "leave no attempt that ends"),
    ],
)
def test_assumptions_out_of_range_are_refused(changes, sentence):
    with pytest.raises(UserError, match=sentence):
        Assumptions(**changes)


def small_study(**rl) -> Study:
    fields = dict(groups={"repository": 8}, group_size=4, max_staleness=3) | rl
    config = dataclasses.replace(run_config(small_config()), rl=RLConfig(**fields))
    assumed = dataclasses.replace(QUIET, install_pause_s=1.0, prompt_tokens=0.0)
    return Study(config, SPEEDS, assumed, hours=24.0, warm_up_hours=2.0)


def test_a_prompt_that_fills_the_context_is_refused():
    with pytest.raises(
        UserError, match="--prompt_tokens=4096.0 leaves no room in a context of sampler.max_model_len=1000"
    ):
        DrawnWorkload(QUIET, group_size=2, max_model_len=1000, max_turns=50)


def test_what_a_study_cannot_simulate_is_refused():
    for make, words in (
        (lambda: small_study(groups={}), "rl.groups"),
        (lambda: small_study(deterministic=True), "deterministic"),
        (lambda: dataclasses.replace(small_study(), hours=0), "--hours=0"),
        (lambda: dataclasses.replace(small_study(), parts=0), "--parts=0"),
    ):
        with pytest.raises(UserError, match=words):
            make()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (dict(sandboxes=["many"]), "--sandboxes=many has a part that is not a number"),
        (dict(splits=["1:3", "1-2"]), "--splits=1-2 is not a split"),
        (dict(hours=0.0), "--hours=0.0"),
        (dict(parts=0), "--parts=0"),
        (
            dict(config=small_config(rl__groups__repository=8, rl__deterministic=True)),
            "rl.deterministic=True is not simulated",
        ),
        (dict(topology="v5e"), "--topology=v5e is unknown"),
        ({}, "libtpu, which contains the compiler for TPUs, is not installed"),
    ],
)
def test_arguments_are_checked_before_libtpu_is_needed(changes, sentence, monkeypatch):
    monkeypatch.setitem(sys.modules, "libtpu", None)
    numbers = dict(chips=64, splits=["1:3"], sandboxes=["50"], hours=2.0, warm_up_hours=1.0, seed=0, parts=4)
    config = small_config(rl__groups__repository=8)
    arguments = dict(config=config, topology="v5e:2x2", assumed=QUIET) | numbers | changes
    with pytest.raises(UserError, match=sentence):
        simulate_table(**arguments)


@pytest.mark.parametrize(
    ("fleet", "bought"),
    [
        (Fleet(1, 400, 1000), "chips for learning"),
        (Fleet(10_000, 4, 1000), "chips for rollout"),
        (Fleet(10_000, 400, 8), "sandboxes"),
    ],
    ids=str,
)
def test_what_to_buy_is_what_there_is_too_little_of(fleet, bought):
    study = small_study(**ENGINES)
    outcome = study.simulate(fleet)
    gains = study.gains(fleet, outcome)
    assert len(gains) == VARIANTS and max(gains, key=lambda name: gains[name]) == bought and gains[bought] > 0.15
    best = dataclasses.asdict(fleet) | dataclasses.asdict(outcome) | {"gains": gains}
    assert f"buy {bought} next (" in advise(best | {"more_chips": study.more_chips(fleet)})


def test_the_table_has_a_row_for_every_run():
    hours = []
    result = run_study(small_study(), [(8, 8), (4, 12)], [4, 40], lambda: hours.append(1))
    assert len(hours) == 26 * (4 + 2 * VARIANTS)
    assert [(row["sandboxes"], row["learner_chips"]) for row in result["rows"]] == [(4, 8), (4, 4), (40, 8), (40, 4)]
    assert [best["sandboxes"] for best in result["best"]] == [4, 40]
    text = format_study(result)
    assert text.count("\n| ") == 6 and "| 40 | 4:12 |" in text and "sandboxes: the learner waits" in text
    assert "the message of a turn has" in text and result["costs"]["patch_bytes"] == 0.02 * 4e9
