"""The KL to a teacher at chosen outputs: its closed form, where it has a gradient, and every mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.models.model_def import ModelDef
from composer_jax.train.losses import LossTermNormalisers, PolicyLoss, PolicyLossConfig
from composer_jax.train.scoring import OutputStates
from tests.compilations import compiles_nothing
from tests.models.small import forward, random_weights, relative_error, small
from tests.train.small_step import make_batch
from tests.train.table_decoder import TableDecoder, log_softmax

RNG = np.random.default_rng(0)
B, S, W, N = 2, 7, 5, 4
STATES = jnp.asarray(RNG.standard_normal((B, S, W)), jnp.float32)
TOKENS = RNG.integers(0, W, (B, S)).astype(np.int32)
SAMPLED = np.zeros((B, S), np.float32)
SAMPLED[:, 2:] = 1
POLICY_ROWS = {
    "tokens": TOKENS,
    "positions": np.broadcast_to(np.arange(S, dtype=np.int32), (B, S)),
    "segments": np.ones((B, S), np.int32),
    "weights": SAMPLED,
    "advantages": SAMPLED * RNG.standard_normal((B, S)).astype(np.float32),
    "sampler_logprobs": SAMPLED * np.float32(-1.6),
}
OUTPUTS = np.array([[3, 1, -1, 2], [-1, 5, -1, -1]], np.int32)
"""Hinted outputs: 1 to 3 of the first row, in no order, and 5 of the second; -1 is an empty slot."""
WEIGHTS = np.where(OUTPUTS >= 0, np.float32(0.25), 0)
TEACHER = RNG.standard_normal((B, N, W)).astype(np.float32)
FEEDBACK = {"feedback_outputs": OUTPUTS, "feedback_weights": WEIGHTS, "teacher_states": TEACHER}
HINTED = np.zeros((B, S), bool)
HINTED[0, 1:4] = HINTED[1, 5] = True
Z = LossTermNormalisers(4.0, 1.0, 4.0, 3.0)
LOSS = PolicyLoss(PolicyLossConfig(ratio_low=1.0, ratio_high=1e9, dual_clip=np.inf))


def gradient(batch, loss=LOSS):
    return np.asarray(jax.grad(lambda s: loss(TableDecoder(s), batch, Z).loss)(STATES))


def oracle(states, outputs=OUTPUTS):
    """(weighted KL over Z, its gradient [B,S,W]) by a loop over slots, float64."""
    value, grad = 0.0, np.zeros((B, S, W))
    for b, n in np.argwhere(OUTPUTS >= 0):
        q, p = log_softmax(TEACHER[b, n]), log_softmax(states[b, outputs[b, n]])
        value += WEIGHTS[b, n] * (np.exp(q) * (q - p)).sum() / Z.feedback
        grad[b, outputs[b, n]] += WEIGHTS[b, n] * (np.exp(p) - np.exp(q)) / Z.feedback
    return value, grad


def test_the_gradient_is_student_minus_teacher_at_hinted_outputs_and_zero_elsewhere():
    silent = POLICY_ROWS | {"weights": np.zeros((B, S), np.float32), "advantages": np.zeros((B, S), np.float32)}
    actual, (_, expected) = gradient(silent | FEEDBACK), oracle(np.asarray(STATES))
    assert relative_error(actual, expected) < 1e-6
    np.testing.assert_array_equal(np.abs(actual).max(-1) > 0, HINTED)


def test_the_value_is_the_dense_kl_and_is_measured_before_it_is_weighted():
    with_teacher, without = (LOSS(TableDecoder(STATES), POLICY_ROWS | extra, Z) for extra in (FEEDBACK, {}))
    value, _ = oracle(np.asarray(STATES))
    assert float(with_teacher.loss - without.loss) == pytest.approx(value, rel=1e-5)
    assert float(with_teacher.sums["feedback_weighted"]) == pytest.approx(3.0 * value, rel=1e-5)
    assert float(with_teacher.sums["feedback_kl"]) == pytest.approx(3.0 * value / 0.25, rel=1e-5)
    assert float(with_teacher.sums["feedback_tokens"]) == 4
    assert not without.sums.keys() & {"feedback_kl", "feedback_weighted", "feedback_tokens"}
    for name, value in without.sums.items():
        jax.tree.map(np.testing.assert_array_equal, value, with_teacher.sums[name])


def test_the_policy_gradient_is_bit_identical_where_no_hint_applies():
    with_teacher, without = gradient(POLICY_ROWS | FEEDBACK), gradient(POLICY_ROWS)
    np.testing.assert_array_equal(with_teacher[~HINTED], without[~HINTED])
    assert (np.abs(with_teacher - without).max(-1) > 1e-3)[HINTED].all()
    assert np.abs(without[~HINTED]).max() > 0.01


@pytest.mark.parametrize("shift", [-1, 1])
def test_outputs_that_are_off_by_one_are_another_loss(shift):
    shifted = np.where(OUTPUTS >= 0, OUTPUTS + shift, OUTPUTS)
    silent = POLICY_ROWS | {"weights": np.zeros((B, S), np.float32)}
    actual = gradient(silent | FEEDBACK | {"feedback_outputs": shifted})
    assert relative_error(actual, oracle(np.asarray(STATES), shifted)[1]) < 1e-6
    assert relative_error(actual, oracle(np.asarray(STATES))[1]) > 0.3


def test_no_gradient_reaches_the_teacher_and_an_equal_teacher_gives_none():
    def loss(teacher, states):
        return LOSS(TableDecoder(states), POLICY_ROWS | FEEDBACK | {"teacher_states": teacher}, Z).loss

    np.testing.assert_array_equal(jax.grad(loss)(jnp.asarray(TEACHER), STATES), 0)
    own = np.where(OUTPUTS[..., None] >= 0, np.take_along_axis(np.asarray(STATES), OUTPUTS[..., None], 1), 0)
    equal = gradient(POLICY_ROWS | FEEDBACK | {"teacher_states": own})
    np.testing.assert_allclose(equal, gradient(POLICY_ROWS), atol=1e-8)


@pytest.mark.parametrize("chunk", [1, 3, 7])
def test_chunks_of_slots_change_nothing(chunk):
    def gradient_in(head_chunk):
        def objective(states):
            decoder = TableDecoder(states)
            decoder.config.head_chunk = head_chunk
            return LOSS(decoder, POLICY_ROWS | FEEDBACK, Z).loss

        return jax.grad(objective)(STATES)

    assert relative_error(gradient_in(chunk), gradient_in(None)) < 1e-6


# -- a network, and meshes ----------------------------------------------------------------------------------------

CONFIG = small(n_layers=2, n_mtp_modules=0, embedding_taps=1)
BATCH = make_batch(1)
SIZES = [
    {"data": 2, "context": 2, "tensor": 2},
    pytest.param({"replica": 2, "context": 2, "expert": 2}, marks=pytest.mark.slow),
]


def hinted_outputs(n_slots=3):
    """int32 [B,N]: up to n_slots outputs of real tokens in each row; some rows have none."""
    rng = np.random.default_rng(3)
    outputs = np.full((len(BATCH["tokens"]), n_slots), -1, np.int32)
    for row, segments in enumerate(BATCH["segments"]):
        candidates = np.flatnonzero((BATCH["positions"][row] > 0) & (segments > 0)) - 1
        chosen = rng.permutation(candidates)[: rng.integers(0, n_slots + 1)]
        outputs[row, : len(chosen)] = chosen
    assert (outputs >= 0).sum() > 12 and (outputs < 0).any()
    return outputs


@pytest.fixture(scope="module")
def hinted():
    """(weights, the student's batch, a batch of other tokens for the teacher, hinted outputs)."""
    weights, outputs = random_weights(CONFIG), hinted_outputs()
    sampled = (BATCH["positions"] > 0).astype(np.float32)
    batch = BATCH | {"weights": sampled, "advantages": sampled, "sampler_logprobs": -4.2 * sampled}
    other = BATCH | {"tokens": np.where(BATCH["segments"] > 0, (BATCH["tokens"] + 1) % 64, 0).astype(np.int32)}
    return weights, batch, other, outputs


def scored(new_learner, hinted, sizes, **how):
    """(states of the teacher, gradient, sums) on a mesh."""
    weights, batch, other, outputs = hinted
    learner = new_learner(sizes, config=CONFIG, loss=PolicyLoss(PolicyLossConfig()), **how)
    states = OutputStates(learner.definition, learner.mesh)(*weights, other, outputs)
    batch = batch | {
        "feedback_outputs": outputs,
        "feedback_weights": np.where(outputs >= 0, np.float32(0.5), 0),
        "teacher_states": states,
    }
    part = learner.gradient(*weights, batch, LossTermNormalisers(50.0, 1.0, 50.0, 7.0))
    return states, jax.tree.map(np.asarray, part["gradient"]), part["sums"]


@pytest.fixture(scope="module")
def expected(new_learner, hinted):
    return scored(new_learner, hinted, {})


def test_the_teachers_states_are_those_of_its_forward_pass(hinted, expected):
    """And an equal context gives the logits of the same row, which a shift by one does not."""
    weights, _, other, outputs = hinted
    logits = np.asarray(forward(CONFIG)(*weights, {k: other[k] for k in ("tokens", "positions", "segments")})["logits"])
    head = np.asarray(ModelDef(CONFIG).bind(*weights).head_weight())
    actual = expected[0] @ head
    rows, slots = np.nonzero(outputs >= 0)
    at = outputs[rows, slots]
    assert relative_error(actual[rows, slots], logits[rows, at]) < 1e-5
    assert relative_error(actual[rows, slots], logits[rows, at + 1]) > 0.1
    np.testing.assert_array_equal(expected[0][outputs < 0], 0)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_term_on_every_mesh_is_that_of_one_device(new_learner, hinted, expected, sizes):
    dispatch = "ring" if sizes.get("expert") else "dense"
    states, gradient, sums = scored(new_learner, hinted, sizes, dispatch=dispatch)
    assert states.shape == expected[0].shape and relative_error(states, expected[0]) < 1e-5
    jax.tree.map(lambda f, w: np.testing.assert_array_less(relative_error(f, w), 1e-5), gradient, expected[1])
    for name in ("feedback_kl", "feedback_weighted", "feedback_tokens"):
        assert float(sums[name]) == pytest.approx(float(expected[2][name]), rel=1e-5), name
    assert float(sums["feedback_tokens"]) == (hinted[3] >= 0).sum()


def test_other_outputs_compile_nothing(new_learner, hinted, expected):
    weights, batch, other, outputs = hinted
    scorer = OutputStates(ModelDef(CONFIG), new_learner({}).mesh)
    scorer(*weights, other, outputs)
    with compiles_nothing():
        scorer(*weights, other, np.full_like(outputs, -1))
