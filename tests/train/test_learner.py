"""The Learner on one device: what a step does, what adds up, and that it stops compiling."""

import copy

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from composer_jax.errors import UserError
from composer_jax.models.router import updated_bias
from composer_jax.train.losses import LanguageLoss, LanguageLossConfig, PolicyLoss, PolicyLossConfig
from tests.compilations import compiles_nothing
from tests.models.small import GROUPED_QUERY, LLAMA, forward, random_weights, relative_error, small
from tests.train.small_step import BIAS_RATE, CONFIG, OPTIMIZER, OPTIMIZER_CONFIG, full_gradient, make_batch

BATCH = make_batch(1)
NORMALISER = float(BATCH["weights"].sum())
HALVES = [{name: values[half] for name, values in BATCH.items()} for half in (slice(0, 8), slice(8, 16))]


def steps(learner, weights, batches, normaliser=NORMALISER):
    state, metrics = learner.step(learner.init_state(*weights), batches, normaliser)
    return jax.tree.map(np.asarray, state), metrics


@pytest.fixture(scope="module")
def whole(learner, weights):
    return steps(learner, weights, [BATCH])


def test_two_halves_are_one_batch(learner, weights, whole):
    state, metrics = steps(learner, weights, HALVES)
    errors = jax.tree.map(relative_error, (state.params, state.optimizer), (whole[0].params, whole[0].optimizer))
    assert max(jax.tree.leaves(errors)) < 1e-5
    chex.assert_trees_all_equal(state.router_bias, whole[0].router_bias)
    for name, value in metrics.items():
        assert value == pytest.approx(whole[1][name], rel=1e-5), name


def test_the_loss_is_that_of_the_forward_pass(weights, whole):
    out = forward(CONFIG)(*weights, {k: BATCH[k] for k in ("tokens", "positions", "segments")})
    logprobs = jax.nn.log_softmax(out["logits"][:, :-1])
    chosen = np.take_along_axis(np.asarray(logprobs), BATCH["tokens"][:, 1:, None], -1)[..., 0]
    nll = -(BATCH["weights"][:, 1:] * chosen).sum()
    assert whole[1]["nll"] == pytest.approx(nll, rel=1e-5)
    others = 0.3 * whole[1]["mtp_kl"] + 0.1 * whole[1]["sequence_balance"]
    assert whole[1]["loss"] == pytest.approx((nll + others) / NORMALISER, rel=1e-5)
    assert whole[1]["mtp_kl"] > 0
    assert whole[1]["sequence_balance"] > 0


def test_weights_after_three_steps_are_those_of_optax_adamw(learner, weights):
    """With the gradients of the learner; norms do not decay, matrices do."""
    params, bias = weights
    plain = optax.chain(
        optax.clip_by_global_norm(OPTIMIZER_CONFIG.clip),
        optax.adamw(
            lambda step: jnp.array([OPTIMIZER.learning_rate(s) for s in range(3)])[step],
            b1=0.9,
            b2=0.95,
            eps=1e-3,
            weight_decay=0.1,
            mask=jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key != "scale", params),
        ),
    )

    @jax.jit
    def plain_step(params, state, gradient):
        update, state = plain.update(gradient, state, params)
        return optax.apply_updates(params, update), state, optax.tree.norm(gradient)

    plain_state = jax.jit(plain.init)(params)
    state = learner.init_state(*weights)
    for seed in range(3):
        batch = make_batch(seed)
        total = float(batch["weights"].sum())
        gradient = full_gradient(learner, (params, state.router_bias), batch, total)
        params, plain_state, norm = plain_step(params, plain_state, gradient)
        state, metrics = learner.step(state, [batch], total)
        assert metrics["learning_rate"] == OPTIMIZER.learning_rate(seed)
        assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-5)
    assert int(state.step) == 3
    assert max(jax.tree.leaves(jax.tree.map(relative_error, state.params, params))) < 1e-5


NOT_DECAYED = {
    "mla": {"scale"},
    "gqa": {"scale", "sinks", "logit_bias"} | {f"{name}_bias" for name in ("q", "k", "v", "out", "gate", "up", "down")},
}


@pytest.mark.parametrize(("kind", "changes"), [("mla", {"q_lora_rank": 8}), ("gqa", GROUPED_QUERY)])
def test_weight_decay_moves_matrices_only(new_learner, kind, changes):
    """A batch without loss tokens has no gradient, so that decay alone moves weights."""
    weights = random_weights(config := small(embedding_taps=1, **changes))
    empty = BATCH | {"weights": np.zeros_like(BATCH["weights"])}
    loss = LanguageLoss(LanguageLossConfig(mtp_weight=0.3))
    state, _ = steps(new_learner(config=config, loss=loss), weights, [empty], 1.0)
    rate, unchanged = OPTIMIZER.learning_rate(0) * OPTIMIZER_CONFIG.weight_decay, set()
    for (path, after), before in zip(jax.tree.leaves_with_path(state.params), jax.tree.leaves(weights[0]), strict=True):
        if np.array_equal(after, before):
            unchanged.add(path[-1].key)
        else:
            assert path[-1].key not in NOT_DECAYED[kind]
            np.testing.assert_allclose(after, before * (1 - rate), rtol=1e-5)
    assert unchanged == NOT_DECAYED[kind]


POLICY_BATCH = BATCH | {name: BATCH["weights"] - 0.5 for name in ("advantages", "sampler_logprobs")}
TRUSTING = PolicyLoss(PolicyLossConfig(ratio_low=2.0))  # every ratio below 1 is in the trust region


@pytest.mark.parametrize(
    ("loss", "batch", "sizes"),
    [(LanguageLoss(), BATCH, {}), (TRUSTING, POLICY_BATCH, {"data": 2, "expert": 2})],
    ids=["language", "policy"],
)
def test_a_loss_without_mtp_leaves_the_mtp_modules_as_they_are(new_learner, weights, loss, batch, sizes):
    """Bit for bit: neither momentum nor weight decay moves them."""
    learner = new_learner(sizes, loss=loss)
    state = learner.init_state(*weights)
    for _ in range(4):
        state, _ = learner.step(state, [batch], NORMALISER)
    after = jax.tree.map(np.asarray, state.params)
    chex.assert_trees_all_equal(after.pop("mtp"), weights[0]["mtp"])
    chex.assert_trees_all_equal(state.router_bias["mtp"], weights[1]["mtp"])
    trained = {name: subtree for name, subtree in weights[0].items() if name != "mtp"}
    assert not any(jax.tree.leaves(jax.tree.map(np.array_equal, after, trained)))


def test_a_network_without_experts_learns_and_has_no_metrics_of_experts(new_learner):
    config, batch = small(**LLAMA, n_layers=2, qkv_bias=True), POLICY_BATCH
    weights = random_weights(config)
    learner = new_learner(config=config, loss=TRUSTING)
    state = learner.init_state(*weights)
    rows = []
    for _ in range(3):
        state, metrics = learner.step(state, [batch, batch], 2 * NORMALISER)
        rows.append(metrics)
    assert rows[-1]["loss"] != rows[0]["loss"]
    assert not rows[0].keys() & {"counts", "dropped", "load_imbalance", "router_entropy"}
    assert all(np.isfinite(list(row.values())).all() for row in rows)
    assert state.router_bias == {}
    of_steps = {"grad_norm", "learning_rate", "skipped", "log_ratio"}
    assert learner.evaluate(state, [batch]).keys() == rows[0].keys() - of_steps
    assert not any(jax.tree.leaves(jax.tree.map(np.array_equal, jax.device_get(state.params), weights[0])))


def test_the_router_bias_moves_by_the_counts_of_the_global_batch(learner, weights):
    """And not by those of a part: two halves about different tokens disagree with the whole."""
    batch = dict(BATCH)
    batch["tokens"] = np.where(np.arange(16)[:, None] < 8, 3, 60) * (BATCH["segments"] > 0)
    halves = [{name: values[half] for name, values in batch.items()} for half in (slice(0, 8), slice(8, 16))]

    def by_counts(part):
        out = forward(CONFIG)(*weights, {k: part[k] for k in ("tokens", "positions", "segments")})
        assert out["counts"].sum() == (part["segments"] > 0).sum() * CONFIG.experts_per_token
        router = weights[1]["moe_layers"]["feed_forward"]["router"]["bias"]
        mtp = weights[1]["mtp"]["block"]["feed_forward"]["router"]["bias"]
        return updated_bias(router, out["counts"], BIAS_RATE), updated_bias(mtp, out["mtp_counts"], BIAS_RATE)

    for batches in ([batch], halves):
        moved = steps(learner, weights, batches)[0].router_bias
        biases = (
            moved["moe_layers"]["feed_forward"]["router"]["bias"],
            moved["mtp"]["block"]["feed_forward"]["router"]["bias"],
        )
        for bias, whole, *parts in zip(biases, by_counts(batch), *map(by_counts, halves), strict=True):
            np.testing.assert_allclose(bias, whole, atol=1e-7)
            for part in (*parts, (parts[0] + parts[1]) / 2):
                assert np.abs(bias - part).max() > 0.1 * BIAS_RATE


def test_a_bias_rate_of_zero_freezes_the_bias(learner, weights):
    frozen = copy.copy(learner)
    frozen.router_bias_update_rate = 0.0
    state, _ = steps(frozen, weights, [BATCH])
    chex.assert_trees_all_equal(state.router_bias, weights[1])


@pytest.mark.parametrize("sizes", [{}, pytest.param({"data": 2, "expert": 2}, marks=pytest.mark.slow)], ids=str)
def test_mtp_modules_can_learn_alone(new_learner, weights, sizes):
    """Their gradient is that of joint training, and the rest of the network and its router bias stay as they are."""
    losses = [LanguageLoss(LanguageLossConfig(mtp_weight=0.3, trained=trained)) for trained in ("all", "mtp")]
    dispatch = "ring" if sizes else "dense"
    joint, alone = (new_learner(sizes, loss=loss, dispatch=dispatch) for loss in losses)
    joint_gradient, gradient = (full_gradient(learner, weights, BATCH, NORMALISER) for learner in (joint, alone))
    assert any(np.any(leaf) for leaf in jax.tree.leaves(joint_gradient["moe_layers"]))
    for name in gradient:
        if name == "mtp":
            chex.assert_trees_all_close(gradient[name], joint_gradient[name], rtol=1e-5, atol=1e-7)
        else:
            assert not any(np.any(leaf) for leaf in jax.tree.leaves(gradient[name])), name
    state, first = steps(alone, weights, [BATCH])
    chex.assert_trees_all_equal(without_mtp(state.params), without_mtp(weights[0]))
    chex.assert_trees_all_equal(without_mtp(state.router_bias), without_mtp(weights[1]))
    assert np.any(state.router_bias["mtp"]["block"]["feed_forward"]["router"]["bias"])
    _, second = alone.step(alone.init_state(state.params, state.router_bias), [BATCH], NORMALISER)
    assert second["mtp_kl"] < first["mtp_kl"] and second["nll"] == first["nll"]


def without_mtp(params):
    return {name: jax.device_get(subtree) for name, subtree in params.items() if name != "mtp"}


def test_a_step_does_not_consume_the_weights_it_started_from(learner, weights, whole):
    """A step donates its state; the checkpoint or the sampler may still hold what the state was made from."""
    again, _ = steps(learner, weights, [BATCH])
    chex.assert_trees_all_equal(again.params, whole[0].params)


def test_evaluate_sums_over_batches_and_changes_nothing(learner, weights, whole):
    state = learner.init_state(*weights)
    sums = learner.evaluate(state, HALVES)
    assert sums["nll"] == pytest.approx(whole[1]["nll"], rel=1e-5)
    assert sums["tokens"] == pytest.approx(NORMALISER, rel=1e-5)
    chex.assert_trees_all_equal(state.params, weights[0])
    assert int(state.step) == 0


def test_evaluate_computes_no_gradient(learner, weights):
    """Its value is that of the gradient program, which has backward operations."""
    programs = learner.programs({name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in BATCH.items()})

    def has_backward_operations(name):
        function, arguments, keywords = programs[name]
        return "transpose(jvp(" in function.lower(*arguments, **keywords).as_text(debug_info=True)

    assert has_backward_operations("gradient")
    assert not has_backward_operations("evaluate")
    expected = learner.gradient(*weights, BATCH, 1)["sums"]
    expected["routed"] = sum(counts.sum() for counts in expected.pop("counts").values())
    sums = learner.evaluate(learner.init_state(*weights), [BATCH])
    assert sums.keys() == expected.keys()
    for name, value in sums.items():
        assert value == pytest.approx(float(expected[name]), rel=1e-6), name


def test_evaluate_on_a_mesh_is_that_of_one_device(new_learner, learner, weights):
    sharded = new_learner({"replica": 2, "context": 2, "tensor": 2}, reduction="host")
    sums = sharded.evaluate(sharded.init_state(*weights), HALVES)
    for name, value in learner.evaluate(learner.init_state(*weights), HALVES).items():
        assert sums[name] == pytest.approx(value, rel=1e-5), name


def test_nothing_compiles_after_the_first_step(new_learner, weights):
    """The loss is traced twice in each of two programs: for the shapes of its output, and in the program itself."""
    language_loss = LanguageLoss()

    @chex.assert_max_traces(n=4)
    def loss(decoder, batch, normaliser):
        return language_loss(decoder, batch, normaliser)

    learner = new_learner(loss=loss)
    state = learner.init_state(*weights)
    state, _ = learner.step(state, [BATCH, BATCH], NORMALISER)
    learner.evaluate(state, [BATCH])
    with compiles_nothing():
        for seed in range(4):
            batch = make_batch(seed)
            state, _ = learner.step(state, [batch] * (1 + seed % 3), float(batch["weights"].sum()))
        learner.evaluate(state, [BATCH])


BROKEN = BATCH | {"weights": np.where(BATCH["weights"] > 0, np.float32(np.inf), 0).astype(np.float32)}


@pytest.mark.parametrize("how", [{}, {"sizes": {"replica": 2, "expert": 2}, "reduction": "host"}], ids=["one", "mesh"])
def test_a_step_whose_gradient_is_not_finite_is_skipped(new_learner, weights, how):
    """The next step is the one that the broken step would have been without it, but for the learning rate."""
    learner = new_learner(**how)
    state, metrics = learner.step(learner.init_state(*weights), [BATCH], NORMALISER)
    before = jax.tree.map(np.array, state)
    assert metrics["skipped"] == 0
    state, metrics = learner.step(state, [BATCH, BROKEN], NORMALISER)
    assert metrics["skipped"] == 1 and not np.isfinite(metrics["grad_norm"])
    for name in ("params", "optimizer", "router_bias"):
        chex.assert_trees_all_equal(jax.tree.map(np.array, getattr(state, name)), getattr(before, name))
    assert int(state.step) == 2
    state, metrics = learner.step(state, [BATCH], NORMALISER)
    assert metrics["skipped"] == 0 and metrics["learning_rate"] == OPTIMIZER.learning_rate(2)
    changed = jax.tree.map(lambda a, b: not np.array_equal(a, b), jax.tree.map(np.array, state.params), before.params)
    assert all(jax.tree.leaves(changed))
    assert int(state.step) == 3


def test_a_step_does_not_wait_for_the_devices(learner, weights):
    """Whether it was skipped is known on the devices; the host asks when it fetches the metrics."""
    state = learner.init_state(*weights)
    learner.step(state, [BATCH], NORMALISER)
    state = learner.init_state(*weights)
    with jax.transfer_guard_device_to_host("disallow"):
        _, metrics = learner.start_step(state, [BATCH], NORMALISER, 0)
    assert metrics.fetch()["skipped"] == 0


def test_bad_arguments_are_refused(new_learner, weights):
    with pytest.raises(UserError, match="reduction='sum' is unknown"):
        new_learner(reduction="sum")
    learner = new_learner({"data": 8})
    with pytest.raises(UserError, match="batch of 12 rows does not divide over 8 devices.*multiple of 8"):
        learner.shard_batch(make_batch(0, n=12))
    with pytest.raises(ValueError, match="at least one batch"):
        learner.step(new_learner().init_state(*weights), [], 1.0)
