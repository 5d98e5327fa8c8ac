"""SamplingParams refuses what no request can mean, in one sentence each."""

import math

import pytest

from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.errors import UserError

BAD = {
    "max_tokens=0 leaves nothing to sample": {"max_tokens": 0},
    "temperature=-0.5 is not a temperature": {"temperature": -0.5},
    "temperature=nan is not a temperature": {"temperature": math.nan},
    "temperature=inf is not a temperature": {"temperature": math.inf},
    "top_p=0 is not above 0": {"top_p": 0},
    "top_p=1.5 is not above 0 and at most 1": {"top_p": 1.5},
    "top_p=nan is not above 0": {"top_p": math.nan},
    "min_p=1.5 is not between 0 and 1": {"min_p": 1.5},
    "top_k=-1 is negative": {"top_k": -1},
    "stop_strings has an empty text": {"stop_strings": ("a", "")},
    "stop_strings is the text 'END'": {"stop_strings": "END"},
}


@pytest.mark.parametrize(("sentence", "fields"), BAD.items(), ids=BAD)
def test_bad_parameters_are_refused(sentence, fields):
    with pytest.raises(UserError, match=sentence.replace("(", r"\(")) as refused:
        SamplingParams(**({"max_tokens": 5} | fields))
    assert "\n" not in str(refused.value)


def test_the_defaults_sample_from_the_network_itself():
    assert SamplingParams(5).unprocessed and not SamplingParams(5).greedy
    assert SamplingParams(5, stop_ids=(3,), stop_strings=["x"]).unprocessed  # stops change no distribution
    for change in ({"temperature": 0.5}, {"top_p": 0.9}, {"top_k": 1}, {"min_p": 0.1}):
        assert not SamplingParams(5, **change).unprocessed
    assert SamplingParams(5, temperature=0).greedy and SamplingParams(5, temperature=1e-6).greedy
    assert SamplingParams(5, stop_ids=[1, 2]) == SamplingParams(5, stop_ids=(1, 2))
