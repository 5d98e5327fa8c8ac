"""From groups to batches: every sampled token of every branch is trained exactly once, with its own numbers."""

import numpy as np
import pytest

from composer_jax.errors import UserError
from composer_jax.rl import policy_update
from composer_jax.rl.algorithm import GroupAdvantage
from composer_jax.rl.batch import FIELDS, Group, WeightedRow, empty_batch, pack_rows
from tests.rl.made_up import conversation, episode, sampled_tokens

SHAPES = ((24, 2), (48, 3))


def group(first: int, rewards, **kwargs) -> Group:
    """Episodes whose sampled tokens are first + 100 i ..."""
    transcripts = [conversation(first + 100 * i, **kwargs) for i in range(len(rewards))]
    return Group([episode(r, t) for r, t in zip(rewards, transcripts, strict=True)], rewards)


def weighted_rows(groups, chosen) -> list[WeightedRow]:
    return [row for rows in policy_update.weighted_rows(groups, chosen) for row in rows]


def learner_batches(rows, shapes):
    return pack_rows(rows, shapes).batches


def trained_tokens(batches) -> dict[int, tuple[float, float]]:
    """token -> (advantage, sampler logprob) of everything with a loss weight; a token may occur once."""
    found = {}
    for batch in batches:
        for b, t in zip(*np.nonzero(batch["weights"]), strict=True):
            token = int(batch["tokens"][b, t])
            assert token not in found, f"token {token} is trained twice"
            assert batch["weights"][b, t] == 1
            found[token] = batch["advantages"][b, t], batch["sampler_logprobs"][b, t]
    return found


@pytest.mark.parametrize("shapes", [SHAPES, ((48, 1),)], ids=str)
def test_every_sampled_token_is_trained_once_with_its_own_logprob_and_its_episodes_advantage(shapes):
    """Episodes with one to three branches; a summary belongs to the branch it ends."""
    groups = [
        group(1000, [1.0, 0.0, 0.0], turns=2, summaries=2),
        group(2000, [0.2, 0.9], turns=3, summaries=0),
        group(3000, [1.0, 0.0], turns=1, summaries=1),
    ]
    found = trained_tokens(learner_batches(weighted_rows(groups, GroupAdvantage()), shapes))
    wanted = {}
    for g in groups:
        mean = np.mean(g.rewards)
        for one, reward in zip(g.episodes, g.rewards, strict=True):
            for token, logprob in sampled_tokens(one.transcript).items():
                wanted[token] = np.float32(reward - mean), logprob
    assert found == wanted
    assert len(found) == 3 * (18 + 4) + 2 * 9 + 2 * (6 + 2)


def test_the_context_of_a_trained_token_is_what_the_sampler_had_seen():
    """Rows of a batch hold whole branches, at positions from 0, and no branch sees another."""
    groups = [group(1000, [1.0, 0.0], turns=2, summaries=1)]
    branches = [
        np.concatenate([node.tokens for node in path]).tolist()
        for one in groups[0].episodes
        for path in one.transcript.branches()
    ]
    found = []
    for batch in learner_batches(weighted_rows(groups, GroupAdvantage()), SHAPES):
        for b in range(len(batch["tokens"])):
            for segment in range(1, batch["segments"][b].max() + 1):
                inside = batch["segments"][b] == segment
                np.testing.assert_array_equal(batch["positions"][b][inside], np.arange(inside.sum()))
                found.append(batch["tokens"][b][inside].tolist())
            padding = batch["segments"][b] == 0
            for name in FIELDS:
                assert not batch[name][b][padding].any()
    assert len(found) == len(branches)
    # A row ends with the last token it trains; answers that nothing followed are not part of it.
    for row, branch in zip(sorted(found), sorted(branches), strict=True):
        assert branch[: len(row)] == row and len(branch) - len(row) in (0, 3)


def test_batches_have_the_given_shapes_and_types():
    rows = weighted_rows(
        [group(1000, [1.0, 0.0], turns=2, summaries=1), group(2000, [0, 1], turns=6)], GroupAdvantage()
    )
    batches = learner_batches(rows, SHAPES)
    assert {b["tokens"].shape for b in batches} == {(2, 24), (3, 48)}
    for batch in [*batches, empty_batch(24, 2)]:
        assert {name: values.dtype for name, values in batch.items()} == {n: np.dtype(d) for n, d in FIELDS.items()}
        assert len({values.shape for values in batch.values()}) == 1
    assert empty_batch(24, 2)["tokens"].shape == (2, 24)


def test_a_row_longer_than_every_shape_is_named():
    rows = weighted_rows([group(1000, [1.0, 0.0], turns=9)], GroupAdvantage())
    with pytest.raises(UserError, match="row of 63 tokens"):
        learner_batches(rows, SHAPES)
