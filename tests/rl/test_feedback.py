"""Updates with feedback: the term is the dense KL, and the rest of the loss is what it is without."""

import dataclasses
from functools import partial

import jax
import numpy as np
import pytest

from composer_jax.errors import UserError
from composer_jax.models.model_def import ModelDef
from composer_jax.observe.compilations import count_compilations
from composer_jax.parallel.mesh import make_mesh
from composer_jax.rl.algorithm import GroupAdvantage
from composer_jax.rl.batch import FIELDS, Group, pack_rows
from composer_jax.rl.config import AlgorithmConfig, NormaliserConfig, RLConfig
from composer_jax.rl.feedback import FeedbackConfig, HintFinder
from composer_jax.rl.hint_detectors import DETECTORS
from composer_jax.rl.policy_update import PolicyUpdate, weighted_rows
from composer_jax.rl.reference import ReferenceKLConfig
from composer_jax.train.learner import Learner
from composer_jax.train.losses import LanguageLoss
from composer_jax.train.optimizer import OptimizerConfig, make_optimizer
from tests.models.small import LLAMA, forward, random_weights, rows, small
from tests.rl import test_policy_update
from tests.rl.hinted_episodes import BAD, CHAT, FINISH, READ, episode_of
from tests.rl.small_learner import small_learner
from tests.train.table_decoder import log_softmax

CONFIG = small(**LLAMA, n_layers=1, vocab_size=320, max_context=512)
WITH_EXPERTS = small(n_layers=1, n_dense_layers=0, n_mtp_modules=0, embedding_taps=0, vocab_size=320, max_context=512)
WEIGHTS = random_weights(CONFIG)
SHAPES = ((320, 2),)
FEEDBACK = FeedbackConfig(weight=0.5)
EPISODES = [episode_of(READ, BAD, FINISH, reward=1.0), episode_of(BAD, READ, BAD), episode_of(READ, FINISH)]
GROUP = Group(EPISODES, [1.0, 0.0, 0.0])
EQUAL = Group(EPISODES[1:], [0.0, 0.0])
CLEAN = Group([episode_of(READ, FINISH, reward=1.0), episode_of(READ, READ)], [1.0, 0.0])


def finder() -> HintFinder:
    return HintFinder(FEEDBACK, CHAT, 1000)


# -- updates ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def learner():
    return small_learner(CONFIG, 1e-2)


def new_update(learner, *, algorithm=None, replay="off", shapes=SHAPES, **fields) -> PolicyUpdate:
    feedback = dataclasses.replace(FEEDBACK, **fields)
    rl = RLConfig(
        group_size=2,
        batches=shapes,
        tokens_per_episode=8.0,
        router_replay=replay,
        algorithm=algorithm or AlgorithmConfig(),
        feedback=feedback,
    )
    return PolicyUpdate(rl, learner, CHAT)


def step(learner, update, *groups, weights=WEIGHTS):
    """Returns the state after an update of `weights`, and its metrics."""
    state, result = update.step(learner.init_state(*weights), list(groups), sum(len(g.episodes) for g in groups), 0)
    return state, result.metrics


def logprobs_after(context, tokens, params=WEIGHTS):
    """float64 [n,W]: log-probabilities of what follows, at each of the n tokens after a context."""
    whole = [*context, *tokens]
    length = 32 * -(-len(whole) // 32)
    logits = np.asarray(forward(CONFIG)(*params, rows([[whole]], length))["logits"])[0]
    return log_softmax(logits)[len(context) - 1 : len(whole) - 1]


def dense_kl(group):
    """Sum of the KL over all hinted tokens, from one forward pass per context, and the number of tokens."""
    total, count = 0.0, 0
    for one in group.episodes:
        for number, spans in finder()(one).items():
            row = one.transcript.rows()[number]
            for span in spans:
                q = logprobs_after(span.context.tolist(), span.tokens.tolist())
                p = logprobs_after(row.tokens[: span.start].tolist(), span.tokens.tolist())
                total, count = total + float((np.exp(q) * (q - p)).sum()), count + len(span.tokens)
    return total, count


def test_the_metrics_are_those_of_the_dense_kl(learner):
    _, metrics = step(learner, new_update(learner), GROUP)
    total, count = dense_kl(GROUP)
    assert count == 3 * len(BAD) == metrics["feedback_tokens"] and total / count > 0.01
    assert metrics["feedback_kl"] == pytest.approx(total / count, rel=1e-4)
    assert metrics["feedback_loss"] == pytest.approx(0.5 * total / (3 * 8.0), rel=1e-4)
    turns = {name: metrics[f"feedback_turns_{name}"] for name in DETECTORS}
    assert metrics["feedback_turns"] == 3 and metrics["feedback_too_long"] == 0
    assert turns == {"malformed_call": 3, "unknown_tool": 0, "failed_call": 0}
    by_tokens = AlgorithmConfig(normalisers=NormaliserConfig(feedback="tokens"))
    _, metrics = step(learner, new_update(learner, algorithm=by_tokens), GROUP)
    assert metrics["feedback_loss"] == pytest.approx(0.5 * total / count, rel=1e-4)


def test_few_slots_take_more_passes_to_the_same_weights(learner):
    (wide, _), (narrow, metrics) = (step(learner, new_update(learner, tokens_per_row=n), GROUP) for n in (1024, 2))
    assert metrics["feedback_tokens"] == 3 * len(BAD) > 2 * 2
    for w, n in zip(jax.tree.leaves(wide.params), jax.tree.leaves(narrow.params), strict=True):
        np.testing.assert_allclose(w, n, atol=2e-5)


def test_a_group_of_equal_rewards_is_trained_for_its_hints_alone(learner):
    state, metrics = step(learner, new_update(learner), EQUAL)
    assert metrics["groups_used"] == 0 and metrics["trained_tokens"] == 0
    assert metrics["feedback_turns"] == 2 and metrics["grad_norm"] > 0 and int(state.step) == 1
    (chosen,) = weighted_rows([EQUAL], GroupAdvantage(), find_hints=finder())
    assert [len(row.hints) for row in chosen] == [2], "the row without a hint is not trained"
    for stream in ("weights", "advantages", "ce_weights", "kl_weights"):
        assert not getattr(chosen[0], stream).any()


def test_after_the_first_step_nothing_compiles_with_hints_or_without(learner):
    """Every shape has its programs after the first step, whichever rows have hints later."""
    update, state = new_update(learner, shapes=((64, 2), (320, 2))), learner.init_state(*WEIGHTS)
    longest = max(len(span.context) for one in EPISODES for spans in finder()(one).values() for span in spans)
    assert max(len(one.transcript.tokens) for one in EPISODES) <= 64 < longest < 300, "the teacher's row is longer"
    counts = [count_compilations()]
    for groups in ((CLEAN,), (GROUP,), (GROUP, EQUAL), (CLEAN, EQUAL)):
        state, _ = update.step(state, list(groups), 4, 0)
        counts.append(count_compilations())
    assert counts[0] < counts[1] == counts[-1]


def test_without_mistakes_the_weights_are_those_without_feedback(learner):
    (on, metrics), (off, plain) = (step(learner, new_update(learner, weight=weight), CLEAN) for weight in (0.5, 0.0))
    assert metrics["feedback_kl"] is None and metrics["feedback_loss"] is None and metrics["feedback_tokens"] == 0
    assert not [name for name in plain if name.startswith("feedback")]
    # Two programs, whose sums XLA may round in different orders. The peak of the learning rate is 1e-2.
    jax.tree.map(partial(np.testing.assert_allclose, rtol=0, atol=1e-5), on.params, off.params)


class RecordingLearner(test_policy_update.RecordingLearner):
    definition = ModelDef(CONFIG)
    mesh = make_mesh(jax.devices()[:1])


def test_off_means_the_same_arguments_of_the_same_programs():
    """No field, no further normaliser: what the Learner gets with weight=0 is what it got before there was feedback."""
    learner = RecordingLearner()
    PolicyUpdate(dataclasses.replace(new_update(learner).config, feedback=FeedbackConfig()), learner).step(
        None, [GROUP], 3, 0
    )
    (chosen,) = weighted_rows([GROUP], GroupAdvantage())
    expected = pack_rows(chosen, SHAPES, every_shape=True).batches
    assert len(learner.batches) == len(expected)
    for batch, other in zip(learner.batches, expected, strict=True):
        assert batch.keys() == FIELDS.keys()
        jax.tree.map(np.testing.assert_array_equal, batch, other)
    assert jax.tree.leaves(learner.normalisers) == [24.0, 1.0, 24.0]


def test_rows_with_rewards_keep_their_places_beside_rows_that_only_have_hints(learner):
    packed = []
    for weight in (0.5, 0.0):
        update = new_update(learner, weight=weight)
        find = update._find_hints
        chosen = [r for group in weighted_rows([EQUAL, CLEAN], GroupAdvantage(), find_hints=find) for r in group]
        packed.append(update._pack(sorted(chosen, key=lambda row: not row.has_signal), None))
    with_hints, without = packed
    assert len(with_hints.rows) == len(without.rows) + 1
    assert list(with_hints.places[: len(without.places)]) == list(without.places)


def test_feedback_needs_a_chat_format_and_a_loss_that_knows_it():
    config = dataclasses.replace(new_update(RecordingLearner()).config)
    with pytest.raises(ValueError, match="chat format"):
        PolicyUpdate(config, RecordingLearner())

    update = PolicyUpdate(config, RecordingLearner(), CHAT)
    update._teacher.add_states = lambda student, teacher, batches, policy: batches
    state = dataclasses.make_dataclass("State", ["params", "router_bias"])(None, None)
    with pytest.raises(UserError, match="rl.loss.name"):
        update.step(state, [GROUP], 3, 0)


def test_hints_go_together_with_a_reference_and_the_teacher_replays_no_routes():
    """The student replays the routes of its row; the teacher has none for the hint and chooses its own experts."""
    weights, rng = random_weights(WITH_EXPERTS), np.random.default_rng(0)
    choices = [rng.permutation(WITH_EXPERTS.n_experts)[: WITH_EXPERTS.experts_per_token] for _ in range(400)]
    foreign = np.stack(choices)[:, None].astype(np.int16)
    algorithm = AlgorithmConfig(kl=ReferenceKLConfig(0.1, "sequence"))
    update, kl, states = new_update(small_learner(WITH_EXPERTS, 1e-2), replay="on", algorithm=algorithm), [], []
    update.set_reference(*weights)
    score = update._teacher._score

    def record(*arguments):
        states.append(score(*arguments))
        return states[-1]

    update._teacher._score = record
    for routes in (lambda n: foreign[:n], lambda n: foreign[400 - n :]):
        episodes = [episode_of(*said, routes=routes) for said in ([READ, BAD], [BAD, FINISH])]
        _, metrics = step(update.learner, update, Group(episodes, [1.0, 0.0]), weights=weights)
        assert metrics["feedback_turns"] == 2 and metrics["replay_foreign"] > 0 and metrics["skipped"] == 0
        assert metrics["kl_reference"] is not None
        kl.append(metrics["feedback_kl"])
    np.testing.assert_array_equal(*states)
    assert kl[0] > 0 and kl[0] != pytest.approx(kl[1], rel=1e-3)


@pytest.mark.slow
def test_an_update_on_a_mesh_is_that_of_one_device(learner):
    """Rows are spread over devices by their cost, so that hinted rows are elsewhere than on one device."""
    expected, want = step(learner, new_update(learner), GROUP, EQUAL)
    sharded = small_learner(CONFIG, 1e-2, make_mesh(jax.devices()[:8], data=2, context=2, tensor=2))
    actual, got = step(sharded, new_update(sharded), GROUP, EQUAL)
    assert got["feedback_kl"] == pytest.approx(want["feedback_kl"], rel=1e-4)
    assert got["feedback_tokens"] == want["feedback_tokens"]
    for w, g in zip(jax.tree.leaves(expected.params), jax.tree.leaves(actual.params), strict=True):
        np.testing.assert_allclose(g, w, atol=1e-4)


# -- learning -----------------------------------------------------------------------------------------------------

TINY = small(**LLAMA, n_layers=2, vocab_size=320, max_context=256)
HABIT = episode_of(READ, BAD)


@pytest.fixture(scope="module")
def habit():
    """(weights, HintedSpan of the bad turn, row): a network that forgets the arguments of finish unless reminded."""
    (span,) = finder()(HABIT)[0]
    (row,) = HABIT.transcript.rows()
    reminded = [*span.context.tolist(), *FINISH]
    batch = rows([[row.tokens.tolist()], [reminded]], 224)
    weights = np.zeros((2, 224), np.float32)
    weights[0, : len(row.tokens)] = row.trained
    weights[1, len(span.context) : len(reminded)] = 1
    optimizer = make_optimizer(OptimizerConfig(peak=1e-2), steps=150)
    teaching = Learner(ModelDef(TINY), optimizer, LanguageLoss(), make_mesh(jax.devices()[:1]))
    state = teaching.init_state(*random_weights(TINY))
    for _ in range(150):
        state, _ = teaching.step(state, [batch | {"weights": weights}], float(weights.sum()))
    return (state.params, state.router_bias), span, row


@pytest.mark.slow
def test_a_network_unlearns_a_malformed_call_and_keeps_its_other_turns(habit):
    """After five updates of this term alone it writes the arguments without the reminder."""
    taught, span, row = habit
    first = HABIT.transcript.trained_spans()[1]

    def probabilities(weights):
        """(of the end of the message after `finish`, of the arguments there, log-probabilities of the first turn)."""
        logits = np.asarray(forward(TINY)(*weights, rows([[row.tokens.tolist()]], 224))["logits"])
        logprobs = log_softmax(logits[0])
        after_name = logprobs[span.stop - 2]
        kept = logprobs[np.arange(first.start, first.stop) - 1, row.tokens[first.start : first.stop]]
        return np.exp(after_name[CHAT.end]), np.exp(after_name[FINISH[len(BAD) - 1]]), kept

    bad, good, kept_before = probabilities(taught)
    assert bad > 0.99 and good < 0.01, "the habit is there"
    learner = small_learner(TINY)
    algorithm = AlgorithmConfig(normalisers=NormaliserConfig(feedback="tokens"))
    update, state, kl = new_update(learner, weight=1.0, algorithm=algorithm), learner.init_state(*taught), []
    for _ in range(5):
        state, result = update.step(state, [Group([HABIT, HABIT], [0.0, 0.0])], 2, 0)
        kl.append(result.metrics["feedback_kl"])
    bad, good, kept = probabilities((state.params, state.router_bias))
    assert kl[0] > 1 and kl[-1] < 0.3 * kl[0]
    assert bad < 0.3 and good > 0.6
    np.testing.assert_allclose(kept, kept_before, atol=0.03)
