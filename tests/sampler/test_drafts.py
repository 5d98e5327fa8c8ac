"""Speculative decoding samples the same tokens in fewer calls, and stops where it does not pay."""

import dataclasses

import numpy as np
import pytest

from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.errors import UserError
from composer_jax.sampler import drafts
from composer_jax.sampler.config import SamplerConfig
from composer_jax.sampler.drafts import PromptLookup, Speculation
from composer_jax.sampler.runner import NewTokens
from composer_jax.sampler.sequence import SequenceState
from tests.compilations import compiles_nothing
from tests.sampler.conversations import assert_same, run_all
from tests.sampler.test_requests import PARAMS, sample_all

SEEDS = list(range(100, 106))
LONG = {"turns": 2, "branches": 2, "longest": 5, "max_tokens": 20}


def test_a_draft_is_what_followed_the_last_occurrence_of_the_longest_end():
    lookup = PromptLookup()
    assert lookup.draft([5, 1, 2, 7, 8, 9], 3) == []
    assert lookup.draft([5, 1, 2, 7, 8, 9, 1, 2], 3) == [7, 8, 9]
    assert lookup.draft([5, 1, 2, 7, 8, 9, 1, 2, 4, 1, 2], 2) == [4, 1], "the last occurrence"
    assert lookup.draft([5, 1, 2, 7, 8, 9, 1, 2, 4, 1, 2, 7, 8], 9) == [9, 1, 2, 4, 1, 2, 7, 8], "of the longest end"
    assert PromptLookup().draft([3], 4) == PromptLookup().draft([3, 3], 4) == []


def test_lookup_in_pieces_equals_lookup_at_once():
    rng = np.random.default_rng(0)
    tokens, lookup = rng.integers(0, 3, 200).tolist(), PromptLookup()
    for n in sorted(rng.choice(200, 40, replace=False) + 1):
        assert lookup.draft(tokens[:n], 7) == PromptLookup().draft(tokens[:n], 7)


@pytest.fixture(scope="module")
def drafting(new_sampler):
    sampler = new_sampler(drafts="prompt_lookup", draft_tokens=3, decode_rows=(2,))
    sampler.warm_up()
    return sampler


@pytest.fixture
def always(monkeypatch):
    """Every call verifies drafts."""
    monkeypatch.setattr(drafts._Speeds, "should_verify", lambda self: True)


def test_the_tokens_are_those_of_plain_decoding(sampler, drafting, always):
    sampler.warm_up()  # again: since the session's warm-up, thousands of tests may have filled JAX's tables of programs
    with compiles_nothing():
        assert_same(run_all(drafting, SEEDS, **LONG), run_all(sampler, SEEDS, **LONG))
    drafted, accepted = map(np.array, (drafting.stats.drafted, drafting.stats.accepted))
    assert (drafted[:-1] >= drafted[1:]).all() and (accepted[:-1] >= accepted[1:]).all() and accepted[0] > 0


def test_requests_of_all_parameters_are_verified(sampler, drafting, always):
    """Greedy messages of a small network repeat themselves, so whole drafts are accepted."""
    before = sum(drafting.stats.accepted)
    for params in PARAMS:
        plain, drafted = (sample_all(s, [params])[0] for s in (sampler, drafting))
        assert drafted.tokens == plain.tokens and drafted.finish_reason == plain.finish_reason
        np.testing.assert_allclose(drafted.logprobs, plain.logprobs, atol=2e-5)
    assert sum(drafting.stats.accepted) > before


@dataclasses.dataclass
class Row:
    sequence: SequenceState
    lookup: PromptLookup
    drafts: list[int]


def sampled(tokens, accepted=()):
    """A row whose draft had three tokens, if any."""
    return NewTokens(tokens, [], [], drafted=[1] * len(accepted), accepted=accepted)


def test_drafts_are_verified_only_while_that_is_faster():
    speculation = Speculation("prompt_lookup", 4)
    row = Row(SequenceState([1, 2, 3, 1, 2], 50), PromptLookup(), [])
    speculation.draft([row], 1)
    speculation.note_prefill()
    speculation.note(False, [sampled([7, 7])], 9.0)  # waited
    for seconds in (9.0, 0.2, 0.2):  # the first call compiled
        assert speculation.draft([row], 1) is None, "the time of a step is not known yet"
        speculation.note(False, [sampled([7, 7])], seconds)
    assert speculation.draft([row], 1) == [[3, 1, 2]]
    speculation.note(True, [sampled([3, 1, 4], [1, 1, 0])], 0.15)  # three tokens in the time of one and a half
    assert speculation.accepted == [1, 1, 0, 0] and speculation.draft([row], 1) is not None
    speculation.note(True, [sampled([3, 1, 4], [1, 1, 0])], 0.15)
    speculation.note(True, [sampled([3, 1, 4], [1, 1, 0])], 0.15)
    assert count_tries(speculation, row) == 10 * drafts.RETRY - 10, "decoding is timed again"
    for _ in range(drafts.KEPT):
        speculation.note(True, [sampled([9], [0, 0, 0])], 0.15)
    assert count_tries(speculation, row) == 10
    assert speculation.draft([row], 2) is None, "other numbers of rows have times of their own"


def count_tries(speculation, row) -> int:
    """How many of ten times RETRY calls draft; what they take is not noted."""
    return sum(speculation.draft([row], 1) is not None for _ in range(10 * drafts.RETRY))


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"drafts": "oracle"}, "sampler.drafts='oracle' is unknown"),
        ({"draft_tokens": 8}, "draft_tokens=8 is not between"),
    ],
    ids=str,
)
def test_settings_that_mean_nothing_are_refused(fields, sentence):
    with pytest.raises(UserError, match=sentence):
        SamplerConfig(**({"drafts": "prompt_lookup"} | fields))


def test_a_message_of_one_token_has_no_draft(sampler, drafting, always):
    params = SamplingParams(1)
    assert sample_all(drafting, [params])[0].tokens == sample_all(sampler, [params])[0].tokens
