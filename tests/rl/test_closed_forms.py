"""What is known about the objective in closed form."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.agent.transcript import Transcript
from composer_jax.rl.algorithm import GroupAdvantage
from composer_jax.rl.batch import Group, pack_rows
from composer_jax.rl.policy_update import weighted_rows
from composer_jax.rl.reference import sum_later_tokens
from composer_jax.train.losses import PolicyLoss, PolicyLossConfig
from tests.models.small import LLAMA, random_weights, relative_error, small
from tests.rl.made_up import conversation, episode
from tests.rl.small_learner import small_learner
from tests.train.table_decoder import TableDecoder, log_softmax

WIDE = PolicyLoss(PolicyLossConfig(ratio_low=1.0, ratio_high=1e9, dual_clip=np.inf))


# -- the KL in the reward -----------------------------------------------------------------------------------------

N_WORDS, LENGTH = 3, 2
SEQUENCES = jnp.array(list(itertools.product(range(N_WORDS), repeat=LENGTH)))
RNG = np.random.default_rng(0)
TABLES = [jnp.asarray(RNG.standard_normal((1 + N_WORDS, N_WORDS)), jnp.float32) for _ in range(2)]
"""Logits of the policy and of the reference: row 0 for the first word, row 1 + w for the one after w."""


@jax.jit
def logprobs(table, sequence):
    """log p of each word of a sequence."""
    rows = jax.nn.log_softmax(table)
    return jnp.stack([rows[0, sequence[0]], rows[1 + sequence[0], sequence[1]]])


gradients = jax.jit(jax.jacobian(logprobs))


@jax.jit
def kl(table):
    now, reference = (jax.vmap(logprobs, (None, 0))(each, SEQUENCES).sum(1) for each in (table, TABLES[1]))
    return (jnp.exp(now) * (now - reference)).sum()


def expected_gradient(weigh):
    """sum over sequences x of p(x) sum_t w_t(x) grad log p(x_t), with w = weigh(k1 of each word)."""
    table, total = TABLES[0], 0.0
    for sequence in SEQUENCES:
        now, reference = logprobs(table, sequence), logprobs(TABLES[1], sequence)
        weights = np.asarray(weigh(np.asarray(now - reference, np.float64)), np.float32)
        total += np.exp(np.asarray(now).sum()) * np.einsum("t,tij->ij", weights, gradients(table, sequence))
    return total


def test_k1_of_later_words_in_the_advantage_is_the_gradient_of_the_kl():
    """What rl.algorithm.kl.form "sequence" charges; "token" has a bias, and k1 as a loss has no gradient at all."""
    (rows,) = weighted_rows([Group([episode(1.0), episode(0.0)], [1.0, 0.0])], GroupAdvantage())
    exact = np.asarray(jax.grad(kl)(TABLES[0]))
    sequence = expected_gradient(lambda k1: sum_later_tokens(rows[:1], [k1])[0])
    assert relative_error(sequence, exact) < 1e-5
    assert relative_error(expected_gradient(lambda k1: k1), exact) > 0.05
    assert np.abs(expected_gradient(np.ones_like)).max() < 1e-6


# -- a bandit -----------------------------------------------------------------------------------------------------


def test_the_expected_gradient_on_a_bandit_is_that_of_the_expected_reward():
    """Arms sampled from a stale policy: summed over all arms with its probabilities, against autodiff of E[R]."""
    states = jnp.asarray(RNG.standard_normal((1, 2, 5)), jnp.float32)
    stale = log_softmax(np.asarray(states) + 0.5 * RNG.standard_normal((1, 2, 5)))[0, 0]
    rewards = np.arange(5) / 4
    advantages = rewards - (np.exp(stale) * rewards).sum()
    gradient_of = jax.jit(jax.grad(lambda states, batch: WIDE(TableDecoder(states), batch, jnp.float32(1)).loss))
    total = 0.0
    for arm in range(5):
        at_1 = np.array([[0, 1]], np.float32)
        batch = {
            "tokens": np.array([[0, arm]], np.int32),
            "positions": np.array([[0, 1]], np.int32),
            "segments": np.ones((1, 2), np.int32),
            "weights": at_1,
            "advantages": (advantages[arm] * at_1).astype(np.float32),
            "sampler_logprobs": (stale[arm] * at_1).astype(np.float32),
        }
        total += np.exp(stale[arm]) * np.asarray(gradient_of(states, batch))[0, 0]
    expected = jax.grad(lambda logits: -(jax.nn.softmax(logits) * rewards).sum())(states[0, 0])
    assert relative_error(total, expected) < 1e-5


# -- rows and lengths ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gradient_of():
    """(rows, normaliser) -> the gradient of the policy loss over all batches."""
    config = small(**LLAMA, n_layers=1, vocab_size=128)
    weights = random_weights(config)
    learner = small_learner(config)

    def gradient(rows, normaliser=10.0):
        parts = [learner.gradient(*weights, b, normaliser)["gradient"] for b in pack_rows(rows, ((48, 2),)).batches]
        return jax.tree.map(lambda *g: sum(map(np.asarray, g)), *parts)

    return gradient


def in_rows(starts: list[int]) -> Transcript:
    """Six sampled words after a prompt; a new branch with the same context begins at each of `starts`.

    The context of every word is the same in all cases, because a branch repeats what came before.
    """
    transcript = Transcript()
    prompt = transcript.append("prompt", [1, 2, 3])
    words = list(range(20, 26))
    cuts = [0, *starts, len(words)]
    for first, end in itertools.pairwise(cuts):
        transcript.branch(prompt)
        transcript.append("assistant", words[:first], words[first:end], [-4.0] * (end - first), [0] * (end - first))
    return transcript


def test_one_or_five_rows_of_an_episode_have_the_same_gradient(gradient_of):
    """Every row carries the episode's advantage, and the normaliser does not know the number of rows."""
    gradients = []
    for starts in ([], [1, 2, 3, 4]):
        graded = Group([episode(1.0, in_rows(starts)), episode(0.0, conversation(40, turns=1))], [1.0, 0.0])
        (rows,) = weighted_rows([graded], GroupAdvantage())
        assert len(rows) == len(starts) + 2
        gradients.append(gradient_of(rows))
    assert min(np.abs(leaf).max() for leaf in jax.tree.leaves(gradients)) > 0
    errors = jax.tree.map(relative_error, *gradients)
    assert max(jax.tree.leaves(errors)) < 1e-5


def test_equal_rewards_give_exactly_zero_gradient_whatever_the_lengths(gradient_of):
    graded = [episode(0.1, conversation(20 + 30 * i, turns=i + 1)) for i in range(3)]
    (rows,) = weighted_rows([Group(graded, [0.1] * 3)], GroupAdvantage())
    assert rows == []
    trained = [row for episode_rows in GroupAdvantage().weigh(Group(graded, [0.1] * 3), 0) for row in episode_rows]
    for leaf in jax.tree.leaves(gradient_of(trained)):
        np.testing.assert_array_equal(leaf, 0)


def test_the_loss_weighs_tokens_of_short_and_long_episodes_alike():
    """The gradient of log p of each token over its advantage, through rows, packing and the loss."""
    graded = Group([episode(1.0, conversation(0, turns=1)), episode(0.0, conversation(40, turns=5))], [1.0, 0.0])
    (rows,) = weighted_rows([graded], GroupAdvantage())
    (batch,) = pack_rows(rows, ((48, 2),)).batches
    states = jnp.zeros((2, 48, 128))
    at_sampler = batch | {"sampler_logprobs": (batch["weights"] * -np.log(128)).astype(np.float32)}
    gradient = np.asarray(jax.jit(jax.grad(lambda s: WIDE(TableDecoder(s), at_sampler, jnp.float32(1)).loss))(states))
    chosen = np.take_along_axis(gradient[:, :-1], batch["tokens"][:, 1:, None], -1)[..., 0]
    coefficients = -chosen[batch["weights"][:, 1:] > 0] / (1 - 1 / 128)
    assert len(coefficients) == 3 + 15
    np.testing.assert_allclose(np.abs(coefficients), 0.5, rtol=1e-5)
