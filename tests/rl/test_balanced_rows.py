"""The shards of a batch have about the same work."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_jax.rl.algorithm import GroupAdvantage
from composer_jax.rl.batch import Group, balance_rows, pack_rows
from composer_jax.rl.policy_update import weighted_rows
from tests.rl.made_up import conversation, episode


def slowness(costs, order, batch_size: int, shards: int) -> float:
    """Time of all batches, each as long as its slowest shard, over that of evenly divided work."""
    by_shard = np.asarray(costs)[order].reshape(-1, shards, batch_size // shards).sum(-1)
    return float(by_shard.max(1).sum() / by_shard.mean(1).sum())


@given(st.integers(1, 4), st.sampled_from([1, 2, 4]), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_every_row_has_one_place(batches, shards, per_shard, seed):
    costs = np.random.default_rng(seed).random(n := batches * shards * per_shard)
    assert sorted(balance_rows(costs, shards * per_shard, shards)) == list(range(n))


@pytest.mark.parametrize(("batch_size", "shards"), [(8, 8), (8, 4), (16, 4), (16, 2)])
def test_the_slowest_shard_is_near_the_mean(batch_size, shards):
    """Rows of lengths from a long-tailed distribution, whose cost is 1000 n + n^2."""
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(7.5, 1.0, 8 * batch_size), 32_768)
    costs = 1000 * lengths + lengths**2
    before = slowness(costs, np.arange(len(costs)), batch_size, shards)
    after = slowness(costs, balance_rows(costs, batch_size, shards), batch_size, shards)
    assert after - 1 < 0.5 * (before - 1)


def test_lpt_is_optimal_where_the_work_can_be_divided_evenly():
    """By hand: 7 + 1 and 5 + 3; in the order given it is 7 + 5 and 3 + 1."""
    assert slowness([7, 5, 3, 1], [0, 1, 2, 3], 4, 2) == 1.5
    assert slowness([7, 5, 3, 1], balance_rows([7, 5, 3, 1], 4, 2), 4, 2) == 1


def packed(shards: int):
    rewards = [1.0, 0.0] * 6
    turns = [6, 1, 5, 1, 6, 2, 1, 1, 2, 1, 6, 1]
    episodes = [episode(r, conversation(100 * i, turns=n)) for i, (r, n) in enumerate(zip(rewards, turns, strict=True))]
    (rows,) = weighted_rows([Group(episodes, rewards)], GroupAdvantage())
    return pack_rows(rows, ((48, 4),), shards=shards, cost=work_of_row)


def work_of_row(segments) -> float:
    """n + n^2 for every document of n tokens."""
    return float(sum(n + n**2 for n in np.bincount(segments)[1:]))


def test_balanced_batches_hold_the_same_rows():
    """And the places say where; without shards to balance, rows stay in the order given."""
    plain, balanced = packed(1), packed(2)
    assert len(plain.batches) == len(balanced.batches)
    for result in (plain, balanced):
        read = result.read([batch["tokens"] for batch in result.batches])
        for tokens, row in zip(read, result.rows, strict=True):
            np.testing.assert_array_equal(tokens, row.row.tokens)

    def work(result):
        segments = np.stack([batch["segments"] for batch in result.batches])
        costs = [[work_of_row(row) for row in batch] for batch in segments]
        return slowness(np.ravel(costs), np.arange(np.size(costs)), 4, 2)

    assert work(balanced) < work(plain)
