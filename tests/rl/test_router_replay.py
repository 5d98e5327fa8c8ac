"""From the engine to the loss: routes stay with their tokens through turns, branches, shared prefixes and packing."""

import asyncio
import dataclasses

import jax
import numpy as np
import pytest

from composer_jax.agent.transcript import Transcript, TranscriptError
from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.errors import UserError
from composer_jax.models.model_def import ModelDef
from composer_jax.models.route_dtypes import replay_dtype
from composer_jax.parallel.mesh import make_mesh
from composer_jax.rl.algorithm import GroupAdvantage
from composer_jax.rl.batch import Group, WeightedRow, empty_batch, pack_rows
from composer_jax.rl.config import RLConfig
from composer_jax.rl.policy_update import PolicyUpdate, replay_metrics, weighted_rows
from composer_jax.sampler.config import SamplerConfig
from composer_jax.sampler.sampler import Sampler
from tests.models.routes import chosen_routes
from tests.models.small import WITHOUT_EXPERTS, random_weights, rows, small
from tests.rl.made_up import conversation, episode
from tests.rl.small_learner import small_learner

CONFIG = small(vocab_size=24, n_layers=3, n_dense_layers=0, dense_layers=(1,), n_mtp_modules=0)
ROUTES = (CONFIG.n_moe_layers, CONFIG.experts_per_token)
WEIGHTS = random_weights(CONFIG)
SHAPES = ((64, 2),)
ASKED = SamplingParams(5, return_routing=True)


async def play(sampler: Sampler, seed: int) -> Transcript:
    """Two branches of three turns each below one prompt, as an episode with a summary samples them."""
    session, transcript = await sampler.open(seed), Transcript()
    prompt = transcript.append("prompt", [3, 1, 4, 1, 5, 9, 2, 6])
    for branch in range(2):
        transcript.branch(prompt)
        for turn in range(3):
            context = [*transcript.tokens, 7]
            start = transcript.routes_known
            sample = await session.sample(context, dataclasses.replace(ASKED, routing_start=start), branch)
            assert sample.routing_start == start
            assert len(sample.routing) == len(context) + len(sample.tokens) - 1 - start
            transcript.append(
                "assistant",
                [7],
                sample.tokens,
                sample.logprobs,
                sample.versions,
                routes=sample.routing,
                routes_start=sample.routing_start,
            )
            transcript.append("tool", [8, 10 + seed + turn])
    session.close()
    return transcript


@pytest.fixture(scope="module")
def transcripts() -> list[Transcript]:
    """Four episodes that share their prompt's pages with each other and with themselves."""
    sizes = SamplerConfig(slots=4, max_model_len=64, decode_steps=4, page_size=4, prefill_shapes=((4, 8),))
    definition = ModelDef(dataclasses.replace(CONFIG, cache_routing=True))
    sampler = Sampler(definition, make_mesh(jax.devices()[:1]), sizes, end_tokens=(0,))
    sampler.update(*WEIGHTS, version=0)

    async def main():
        async with sampler.serving():
            return [await play(sampler, 0), *await asyncio.gather(*(play(sampler, seed) for seed in (1, 2, 3)))]

    return asyncio.run(main())


@pytest.fixture(scope="module", params=[CONFIG.n_experts, 256], ids=["one byte", "two bytes"])
def n_experts(request):
    return request.param


@pytest.fixture(scope="module")
def batches(transcripts, n_experts):
    weighted = [WeightedRow.of(row, 1.0) for transcript in transcripts for row in transcript.rows()]
    return pack_rows(weighted, SHAPES, route_shape=ROUTES, n_experts=n_experts).batches


def new_update(config=CONFIG, **changes) -> PolicyUpdate:
    return PolicyUpdate(RLConfig(group_size=2, batches=SHAPES, **changes), small_learner(config, ratio_low=0.9))


@pytest.fixture(scope="module")
def update():
    return new_update()


def test_the_routes_of_a_row_are_those_of_its_training_forward(transcripts, monkeypatch):
    found = [row for transcript in transcripts for row in transcript.rows()]
    assert len(found) == 8 and all(len(row.tokens) > 20 for row in found)
    own = chosen_routes(monkeypatch, CONFIG, WEIGHTS, rows([[row.tokens.tolist()] for row in found], 64))
    for row, expected in zip(found, own, strict=True):
        n = len(row.tokens)
        assert row.routes.shape == (n, *ROUTES) and len(row.tokens_without_routes()) == 0
        np.testing.assert_array_equal(row.routes[: n - 1], expected[: n - 1])


def learned(learner, batches, shift=0):
    parts = [
        learner.gradient(*WEIGHTS, batch | {"routes": np.roll(batch["routes"], shift, axis=1)}, 1.0)
        for batch in batches
    ]
    sums = {n: sum(float(p["sums"][n]) for p in parts) for n in ("tokens", "replayed", "replay_foreign", "sampler_kl")}
    return sums, max(float(p["maxima"]["log_ratio"]) for p in parts)


def test_packed_routes_give_the_samplers_probabilities_and_shifted_ones_do_not(batches, transcripts, update):
    assert any((batch["segments"].max(1) > 1).any() for batch in batches), "no row holds two segments"
    sums, largest = learned(update.learner, batches)
    assert sums["tokens"] == sum(t.total_sampled for t in transcripts)
    routes = [np.asarray(batch["routes"]).astype(np.uint16) for batch in batches]
    is_known = [(ids < CONFIG.n_experts).all((2, 3)) for ids in routes]
    known = sum((is_real & (batch["segments"] > 0)).sum() for is_real, batch in zip(is_known, batches, strict=True))
    assert sums["replayed"] == known * np.prod(ROUTES) and sums["replay_foreign"] == 0
    assert largest < 1e-4
    for shift in (-1, 1):
        sums, largest = learned(update.learner, batches, shift)
        assert largest > 0.1 and sums["replay_foreign"] > 0.2 * sums["replayed"]


def test_padding_and_empty_batches_have_no_routes(batches, n_experts):
    unknown = {np.dtype(np.uint8): 255, np.dtype(np.int16): -1}[replay_dtype(n_experts)]
    for batch in batches:
        assert batch["routes"].dtype == replay_dtype(n_experts)
        assert batch["routes"].shape == (*batch["tokens"].shape, *ROUTES)
        assert (np.asarray(batch["routes"])[batch["segments"] == 0] == unknown).all()
    empty = empty_batch(64, 2, route_shape=ROUTES, n_experts=n_experts)
    assert {n: (a.shape, a.dtype) for n, a in empty.items()} == {n: (a.shape, a.dtype) for n, a in batches[0].items()}
    assert (empty["routes"] == unknown).all()


def graded(transcripts):
    episodes = [episode(float(i % 2), transcript) for i, transcript in enumerate(transcripts)]
    return [Group(episodes, [e.reward for e in episodes])]


def test_a_step_replays_by_default_and_says_what_it_did(transcripts, update):
    state = update.learner.init_state(*WEIGHTS)
    _, result = update.step(state, graded(transcripts), 4, 0)
    assert result.is_updated
    assert result.metrics["replay_foreign"] == 0 and result.metrics["replay_filtered"] == 0
    assert result.metrics["log_ratio_max"] < 1e-4
    assert replay_metrics(None) == {"replay_foreign": None, "replay_filtered": None}


def test_without_replay_there_are_no_routes_and_no_metrics_of_them():
    assert new_update(router_replay="off").route_shape is None
    dense = small(**WITHOUT_EXPERTS, n_layers=2)
    assert new_update(dense).route_shape is None
    (weighted,) = weighted_rows(graded([conversation(5, 1), conversation(10, 1)]), GroupAdvantage())
    assert "routes" not in pack_rows(weighted, SHAPES).batches[0]


def test_rows_with_a_gap_or_of_another_network_are_refused(transcripts):
    row = transcripts[0].rows()[0]
    routes = row.routes
    for wrong in ([(0, routes[:5]), (6, routes[6:])], [], [(0, routes[:, :, :2])]):
        broken = dataclasses.replace(WeightedRow.of(row, 1.0), row=dataclasses.replace(row, route_parts=wrong))
        with pytest.raises(TranscriptError):
            pack_rows([broken], SHAPES, route_shape=ROUTES)


def test_replay_in_a_network_without_experts_is_refused():
    with pytest.raises(UserError, match="needs a network with experts"):
        RLConfig(router_replay="on").route_shape(small(**WITHOUT_EXPERTS, n_layers=2))
    assert RLConfig().rollout_network(CONFIG).cache_routing
    assert not RLConfig(router_replay="off").rollout_network(CONFIG).cache_routing
