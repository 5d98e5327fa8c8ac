"""A patch gives the bits of the later array; other bytes are refused."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_jax.checkpoint import weight_patch
from composer_jax.checkpoint.weight_patch import (
    BadPatch,
    ElementChanges,
    apply_changes,
    as_bits,
    decode_changes,
    encode_changes,
    find_changes,
)
from composer_jax.scale.message_costs import patch_bytes

BFLOAT16 = np.dtype(jnp.bfloat16)
DTYPES = (BFLOAT16, np.dtype(np.float32), np.dtype(np.int8))


def versions(dtype, size, changed, seed):
    """Two arrays of any bits, not-a-number and signed zeros included, that differ in `changed` elements."""
    rng = np.random.default_rng(seed)
    before = rng.integers(0, 256, size * dtype.itemsize, np.uint8).view(dtype)
    after = before.copy()
    places = rng.choice(size, changed, replace=False)
    as_bits(after)[places] ^= 1
    return before, after, np.sort(places)


@given(st.sampled_from(DTYPES), st.integers(0, 3000), st.floats(0, 1), st.integers(0, 2**31))
@settings(deadline=None, max_examples=100)
def test_a_patch_gives_the_bits_of_the_later_array(dtype, size, share, seed):
    before, after, places = versions(dtype, size, int(size * share), seed)
    data = encode_changes(find_changes(before, after))
    changes = decode_changes(data, dtype, size)
    np.testing.assert_array_equal(changes.places, places)
    array = before.copy()
    undo = apply_changes(array, changes)
    assert array.tobytes() == after.tobytes()
    apply_changes(array, undo)
    assert array.tobytes() == before.tobytes()


@pytest.mark.parametrize("gap", [weight_patch.ESCAPE - 1, weight_patch.ESCAPE, weight_patch.ESCAPE + 1, 200_000])
def test_gaps_of_any_length(gap, monkeypatch):
    monkeypatch.setattr(weight_patch, "BLOCK", 1000)
    before = np.zeros(gap + 3, BFLOAT16)
    after = before.copy()
    after[[0, gap + 1, gap + 2]] = 1.5
    changes = decode_changes(encode_changes(find_changes(before, after)), BFLOAT16, len(after))
    np.testing.assert_array_equal(changes.places, [0, gap + 1, gap + 2])


def test_one_weight_in_a_hundred_takes_a_hundredth_of_the_bytes():
    """As PULSE reports: about 1.3 bytes per change."""
    rng = np.random.default_rng(0)
    before = (0.02 * rng.standard_normal(1_000_000)).astype(BFLOAT16)
    after = before.copy()
    places = rng.choice(len(before), 10_000, replace=False)
    as_bits(after)[places] += 1
    data = encode_changes(find_changes(before, after))
    assert before.nbytes / len(data) > 60 and len(data) < 3 * len(places)


@pytest.mark.parametrize(
    ("changed", "size", "least"),
    [(20_000, 2_000_000, 0.7), (200_000, 20_000_000, 0.7), (20_000, 400_000_000, 0.6), (9000, 10**10, 0.4), (0, 9, 0)],
)
def test_a_patch_has_the_bytes_of_its_changes(changed, size, least):
    """Values of random bits, which zstandard cannot shorten; places near each other and beyond 16 bits."""
    rng = np.random.default_rng(0)
    places = np.unique(rng.integers(0, size, changed))
    changes = ElementChanges(places, rng.integers(0, 1 << 16, len(places), np.uint16))
    bound = patch_bytes(len(places), size)
    assert least * bound < len(encode_changes(changes)) <= bound


def test_damaged_bytes_are_refused():
    before, after, _ = versions(BFLOAT16, 5000, 400, 1)
    data = encode_changes(find_changes(before, after))
    for broken in (b"", data[:40], data[:-4], b"x" * 50, encode_changes(find_changes(before, after))[::-1]):
        with pytest.raises(BadPatch):
            decode_changes(broken, BFLOAT16, 5000)
    with pytest.raises(BadPatch, match="beyond the 100"):
        decode_changes(encode_changes(find_changes(before[:200], after[:200])), BFLOAT16, 100)
