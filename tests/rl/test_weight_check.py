"""The fixed row that sampler and learner score: its gap by dtype, who disagrees, and bounds that no run can keep."""

import asyncio
import dataclasses
import types

import jax
import numpy as np
import pytest

from composer_jax.errors import UserError
from composer_jax.models.model_def import ModelDef
from composer_jax.parallel.mesh import make_mesh
from composer_jax.rl.config import RLConfig
from composer_jax.rl.policy_update import PolicyUpdate
from composer_jax.rl.weight_check import WeightCheck, check_row, expected_gap, gap_bound
from composer_jax.sampler.config import SamplerConfig
from composer_jax.sampler.runner import RowScores
from composer_jax.sampler.sampler import Sampler
from composer_jax.schema.run_config import RunConfig, config_dict, run_config
from tests.compilations import compiles_nothing
from tests.models.small import LLAMA, random_weights, small

EXPERTS = small(n_mtp_modules=0, n_layers=2, vocab_size=256, dispatch="ring", max_context=128)
DENSE = small(**LLAMA | {"vocab_size": 256, "n_layers": 2, "max_context": 128})


def both_sides(model, dtype, **rl):
    """(sampler with weights of seed 0 as version 0, PolicyUpdate, check with the default bound)."""
    config = RLConfig(batches=((80, 1), (128, 1)), **rl)
    mesh, sizes = make_mesh(jax.devices()[:1]), SamplerConfig(slots=2, max_model_len=96, prefill_shapes=((2, 24),))
    sizes = dataclasses.replace(sizes, param_dtype=dtype)
    sampler = Sampler(ModelDef(config.rollout_network(model)), mesh, sizes, end_tokens=())
    sampler.update(*random_weights(model), version=0)
    update = PolicyUpdate(config, types.SimpleNamespace(definition=ModelDef(model), mesh=mesh))
    row = check_row(0, model, sizes, config.batches[0][0])
    return sampler, update, WeightCheck(update, sampler, row, gap_bound(config, model, sizes))


def measure(check, weights) -> float:
    state = types.SimpleNamespace(params=weights[0], router_bias=weights[1])
    return asyncio.run(check.measure(state, 0))


@pytest.mark.parametrize(
    ("model", "compute", "dtype", "least"),
    [
        (EXPERTS, "bfloat16", "int8", 1e-2),
        (DENSE, "float32", "bfloat16", 1e-3),
    ],
    ids=["int8", "bfloat16"],
)
def test_the_gap_is_what_the_dtypes_explain(model, compute, dtype, least):
    model = dataclasses.replace(model, compute_dtype=compute)
    _, _, check = both_sides(model, dtype)
    gap = measure(check, random_weights(model))
    assert least <= gap <= expected_gap(RLConfig(), model, SamplerConfig(param_dtype=dtype))


WIDE_EXPERTS = dict(n_mtp_modules=0, vocab_size=256, d_model=64, expert_ff_dim=32, dispatch="ring", max_context=128)
WIDE_DENSE = LLAMA | {"vocab_size": 256, "d_model": 64, "max_context": 128}
NETWORKS = {
    "dense": (WIDE_DENSE, "auto"),
    "experts, replay": (WIDE_EXPERTS, "on"),
    "experts, own routes": (WIDE_EXPERTS, "off"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("network", "layers", "compute", "dtype", "median"),
    [
        ("dense", 2, "bfloat16", "int8", 0.028),
        ("dense", 2, "float32", "bfloat16", 0.011),
        ("dense", 16, "bfloat16", "int8", 0.044),
        ("experts, replay", 2, "bfloat16", "", 0.0046),
        ("experts, replay", 2, "bfloat16", "float8_e4m3fn", 0.143),
        ("experts, replay", 16, "float32", "", 1.9e-6),
        ("experts, replay", 16, "bfloat16", "", 0.035),
        ("experts, replay", 16, "bfloat16", "int8", 0.147),
        ("experts, own routes", 16, "bfloat16", "", 0.052),
        ("experts, own routes", 16, "bfloat16", "int8", 0.227),
    ],
)
def test_gaps_are_those_of_the_documentation(network, layers, compute, dtype, median):
    """docs/design.md, "Weights that do not arrive"."""
    changes, replay = NETWORKS[network]
    model = small(**changes | {"n_layers": layers, "compute_dtype": compute})
    _, _, check = both_sides(model, dtype, router_replay=replay)
    gap = measure(check, random_weights(model))
    assert gap == pytest.approx(median, rel=0.5)
    assert gap <= expected_gap(RLConfig(router_replay=replay), model, SamplerConfig(param_dtype=dtype))


def test_the_learner_takes_the_samplers_experts_and_nothing_compiles_twice():
    sampler, update, check = both_sides(EXPERTS, "")
    assert measure(check, random_weights(EXPERTS)) <= expected_gap(RLConfig(), EXPERTS, sampler.config)
    with pytest.raises(UserError, match=r"version 0: the median gap .* beyond 0\.05"):
        measure(check, random_weights(EXPERTS, 1))
    row = check_row(0, EXPERTS, sampler.config, 80)
    routing = sampler.score(row).routing
    assert routing.shape == (63, 1, 3)
    state = types.SimpleNamespace(**dict(zip(("params", "router_bias"), random_weights(EXPERTS), strict=True)))
    own, other = update.score(state, row, routing), update.score(state, row, np.zeros_like(routing) + [5, 6, 7])
    assert np.abs(own - other)[1:].max() > 0.01
    with compiles_nothing():
        measure(check, random_weights(EXPERTS))
    update.score = lambda *_: np.full(64, np.nan, np.float32)
    with pytest.raises(UserError, match="is nan nats"):
        measure(check, random_weights(EXPERTS))


def test_the_shard_that_is_furthest_off_counts():
    logprobs_BS = np.stack([np.full(63, -1.0), np.full(63, -1.04), np.full(63, -1.01)]).astype(np.float32)
    sampler = types.SimpleNamespace(score=lambda tokens: RowScores(logprobs_BS, None))
    learner = types.SimpleNamespace(score=lambda *_: np.full(64, -1.0, np.float32))
    check = WeightCheck(learner, sampler, list(range(64)), 0.05)
    assert measure(check, ({}, {})) == pytest.approx(0.04, abs=1e-6)


def test_the_row_is_a_function_of_the_seed_and_fits_both_sides():
    sizes = SamplerConfig(max_model_len=40)
    row = check_row(0, DENSE, sizes, 80)
    assert row == check_row(0, DENSE, sizes, 80) != check_row(1, DENSE, sizes, 80)
    assert len(row) == 40 and len(check_row(0, DENSE, sizes, 32)) == 32 and max(row) < DENSE.vocab_size
    assert len(check_row(0, DENSE, SamplerConfig(), 512)) == 64


def test_a_bound_below_what_the_dtypes_allow_is_refused_with_the_expected_gap():
    int8 = SamplerConfig(param_dtype="int8")
    model = dataclasses.replace(EXPERTS, compute_dtype="bfloat16")
    bound = lambda nats: RLConfig(weight_gap_bound=nats)  # noqa: E731
    expected = expected_gap(RLConfig(), model, int8)
    assert expected == pytest.approx(4 * (2**-8 + 2**-7) * 2**0.5, rel=1e-4)
    with pytest.raises(UserError, match=rf"bound=0.01 nats is below .* {expected:.2g} .*'int8', 2 layers"):
        gap_bound(bound(0.01), model, int8)
    assert gap_bound(bound(0.1), model, int8) == 0.1
    assert gap_bound(bound(None), model, int8) == pytest.approx(4 * expected)
    assert gap_bound(bound(None), EXPERTS, SamplerConfig()) == 0.05
    assert expected_gap(RLConfig(router_replay="off"), model, int8) == pytest.approx(2 * expected, rel=1e-4)
    assert expected_gap(RLConfig(), dataclasses.replace(model, cache_dtype="int8"), int8) > 1.5 * expected
    config = config_dict(RunConfig(model))
    config.rl.weight_gap_bound = 0.001
    with pytest.raises(UserError, match="bound=0.001 .* 0.022"):
        run_config(config)
    config.rl.update({"weight_gap_bound": 0.03, "weight_check_every": -1})
    with pytest.raises(UserError, match="check_every=-1"):
        run_config(config)
