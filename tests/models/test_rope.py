"""Rotary positions and YaRN, against closed forms; tests/parity compares whole networks with transformers."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.errors import UserError
from composer_jax.models.config import ModelConfig
from composer_jax.models.rope import Llama3Rope, Yarn, plain_frequencies, rope_angles, rotate
from tests.models.small import small


def scores(distance, start, dim=16, theta=100.0, scaling=None):
    """Products of a fixed query and key at positions that lie `distance` apart."""
    rng = np.random.default_rng(0)
    query, key = rng.standard_normal((2, dim)).astype(np.float32)
    cos, sin = rope_angles(jnp.array([start + distance, start]), dim, theta, scaling)
    return float(rotate(query, cos[0], sin[0]) @ rotate(key, cos[1], sin[1]))


@pytest.mark.parametrize("scaling", [None, Yarn(8.0, original_context=64), Llama3Rope(8.0, original_context=64)])
def test_products_depend_on_the_distance_only(scaling):
    for distance in (0, 1, 7):
        assert scores(distance, 0, scaling=scaling) == pytest.approx(scores(distance, 50, scaling=scaling), abs=1e-4)
    assert abs(scores(7, 0, scaling=scaling) - scores(1, 0, scaling=scaling)) > 1e-2


def test_rotation_is_a_complex_product():
    x = np.random.default_rng(1).standard_normal((5, 8)).astype(np.float32)
    positions = np.array([0, 1, 2, 1000, 4095])
    angle = positions[:, None] * 10_000.0 ** (-np.arange(0, 8, 2) / 8)
    turned = (x[:, 0::2] + 1j * x[:, 1::2]) * np.exp(1j * angle)
    ours = rotate(x, *rope_angles(jnp.asarray(positions), 8, 10_000.0))
    np.testing.assert_allclose(ours[:, 0::2], turned.real, atol=5e-4)
    np.testing.assert_allclose(ours[:, 1::2], turned.imag, atol=5e-4)


def test_yarn_keeps_the_fast_pairs_and_slows_the_slow_ones():
    yarn, dim, theta = Yarn(64.0), 64, 50_000.0
    ratio = yarn.frequencies(dim, theta) / plain_frequencies(dim, theta)
    turns = 4096 * plain_frequencies(dim, theta) / (2 * math.pi)  # of each pair within the original context
    # The ramp begins and ends at whole pairs, so its neighbours may be on it.
    np.testing.assert_allclose(ratio[turns > 32 * theta ** (2 / dim)], 1, rtol=1e-6)
    np.testing.assert_allclose(ratio[turns < theta ** (-2 / dim)], 1 / 64, rtol=1e-6)
    assert (np.diff(ratio) <= 1e-7).all() and len(set(np.round(ratio, 4))) > 5


def test_llama3_keeps_the_fast_pairs_and_slows_the_slow_ones():
    """By the wavelengths of its published code: under 2048 tokens a pair is kept, over 8192 slowed down by 8."""
    dim, theta, scaling = 128, 500_000.0, Llama3Rope(8.0)
    ratio = scaling.frequencies(dim, theta) / plain_frequencies(dim, theta)
    wavelength = 2 * math.pi / plain_frequencies(dim, theta)
    fast, slow = wavelength <= 8192 / 4, wavelength >= 8192
    np.testing.assert_allclose(ratio[fast], 1, rtol=1e-6)
    np.testing.assert_allclose(ratio[slow], 1 / 8, rtol=1e-6)
    smooth = (8192 / wavelength - 1) / (4 - 1)
    between = ~fast & ~slow
    assert between.sum() > 3 and fast.sum() > 20 and slow.sum() > 20
    np.testing.assert_allclose(ratio[between], ((1 - smooth) / 8 + smooth)[between], rtol=1e-5)
    assert scaling.rotation_scale == scaling.logit_scale == 1


def test_no_factor_is_no_rescaling():
    np.testing.assert_allclose(Llama3Rope(1.0).frequencies(64, 1e4), plain_frequencies(64, 1e4), rtol=1e-6)
    np.testing.assert_allclose(Yarn(1.0).frequencies(64, 1e4), plain_frequencies(64, 1e4), rtol=1e-6)
    assert Yarn(1.0).logit_scale == Yarn(1.0).rotation_scale == 1


def test_temperatures():
    # DeepSeek-V3: factor 40 and mscale_all_dim 1 give m = 1.3689.
    assert Yarn(40.0).logit_scale == pytest.approx(1.3689**2, rel=1e-4)
    assert Yarn(40.0).rotation_scale == 1
    # A file without either scale: the paper's rule, on cos and sin (section 3.4, equation 22).
    paper = Yarn(32.0, mscale_all_dim=0.0)
    assert (paper.logit_scale, paper.rotation_scale) == (1, pytest.approx(0.1 * math.log(32) + 1))


def test_bad_fields_are_named():
    plain = dataclasses.asdict(small())
    for name, fields, message in (
        ("yarn", {"factor": 0.5}, "factor=0.5"),
        ("yarn", {"factor": 2.0, "original_context": 0}, "original_context=0"),
        ("yarn", {"factor": 2.0, "beta_fast": 1.0, "beta_slow": 2.0}, "beta_slow=2.0 <= beta_fast=1.0"),
        ("yarn", {"faktor": 2.0}, "yarn.'faktor'"),
        ("yarn", {}, "yarn lacks its factor"),
        ("llama3_rope", {"factor": 0.5}, "factor=0.5"),
        ("llama3_rope", {"factor": 2.0, "original_context": 0}, "original_context=0"),
        ("llama3_rope", {"factor": 2.0, "low_freq_factor": 4.0}, "low_freq_factor=4.0 < high_freq_factor=4.0"),
        ("llama3_rope", {"beta_fast": 2.0}, "llama3_rope.'beta_fast'"),
        ("llama3_rope", {}, "llama3_rope lacks its factor"),
    ):
        with pytest.raises(UserError, match=message):
            ModelConfig.from_dict({**plain, name: fields})
    assert ModelConfig.from_dict({**plain, "yarn": {"factor": 4.0}}) == small(yarn=Yarn(4.0))
    assert ModelConfig.from_dict({**plain, "llama3_rope": {"factor": 8.0}}) == small(llama3_rope=Llama3Rope(8.0))
