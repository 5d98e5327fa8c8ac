"""What pretraining reports of its held-out files."""

import math

import pytest

from composer_jax.stages.pretrain import bits_per_byte


def test_a_uniform_guess_of_bytes_costs_eight_bits():
    result = {"heldout_nll_first": math.log(256), "heldout_nll_last": math.log(2)}
    bits = bits_per_byte(result, tokens=1000, num_bytes=1000)
    assert bits == pytest.approx({"heldout_bits_per_byte_first": 8, "heldout_bits_per_byte_last": 1})


def test_longer_tokens_of_equal_loss_cost_less():
    result = {"heldout_nll_first": 3.0, "heldout_nll_last": 2.0}
    short, long = (bits_per_byte(result, tokens=n, num_bytes=1200) for n in (600, 300))
    assert short["heldout_bits_per_byte_last"] == pytest.approx(2 * long["heldout_bits_per_byte_last"])
