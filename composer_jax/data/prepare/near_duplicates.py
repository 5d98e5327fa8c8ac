"""MinHash signatures of texts (Broder 1997), in bytes that also serve as the bands of locality-sensitive hashing.

A signature has one byte for each of 128 permutations (b-bit minwise hashing, Li and Koenig 2010, with b=8): two texts
agree in about the fraction J of them, J being the Jaccard similarity of their sets of five-word shingles. Eight
consecutive bytes are one of 16 bands. Texts that share a band are compared: those with J=0.8 do with a probability of
95%, those with J=0.5 of 6%.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from composer_jax.errors import UserError

PERMUTATIONS, BAND = 128, 8
SHINGLE_WORDS = 5
FEWEST_SHINGLES = 16
"""Shorter texts have no signature: they are only compared exactly."""
_SEED = 1

_WORD = np.zeros(256, bool)
_WORD[[*b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ_abcdefghijklmnopqrstuvwxyz", *range(128, 256)]] = True
_BASE = np.uint64(0x9E3779B97F4A7C15)  # odd, so that its powers have inverses modulo 2**64
_INVERSE = np.uint64(pow(int(_BASE), -1, 2**64))
_MIX = np.uint64(0xD6E8FEB86659FD93)


def check_library() -> None:
    """Raises UserError if the library of MinHash is not installed."""
    try:
        import rensa  # noqa: F401
    except ImportError:
        raise UserError(
            "finding near duplicates needs rensa; pip install 'composer_jax[prepare]', or set --near_duplicates=0"
        ) from None


def signatures(texts: Sequence[bytes]) -> np.ndarray:
    """Returns uint8[n, 128]: the signatures of n texts; zeros for a text with too few words."""
    from rensa import RMinHash  # pyright: ignore[reportAttributeAccessIssue], the library has no types

    shingles = [shingle_hashes(text) for text in texts]
    long = [i for i, hashes in enumerate(shingles) if len(hashes) >= FEWEST_SHINGLES]
    out = np.zeros((len(texts), PERMUTATIONS), np.uint8)
    if long:
        flat = np.concatenate([shingles[i] for i in long])
        offsets = np.cumsum([0, *(len(shingles[i]) for i in long)], dtype=np.uint64)
        matrix = RMinHash.digest_matrix_from_flat_token_hashes(flat, offsets, PERMUTATIONS, _SEED)
        slots = np.asarray(matrix.to_rows(), np.uint32)
        out[long] = (slots * np.uint32(0x9E3779B1)) >> np.uint32(24)  # the highest byte depends on all bits of a slot
    return out


def shingle_hashes(text: bytes) -> np.ndarray:
    """Returns uint64[words - 4]: a hash of each five consecutive words. White space and punctuation do not count."""
    data = np.frombuffer(text, np.uint8)
    inside = _WORD[data]
    starts = np.flatnonzero(inside & ~np.concatenate(([False], inside[:-1])))
    if len(starts) < SHINGLE_WORDS:
        return np.zeros(0, np.uint64)
    # The hash of a word is the polynomial of its bytes: a sum over it of byte * base**place, over base**(its start).
    with np.errstate(over="ignore"):
        powers, inverses = _powers(_BASE, len(data)), _powers(_INVERSE, len(data))
        words = np.add.reduceat(np.where(inside, data + np.uint64(1), np.uint64(0)) * powers, starts) * inverses[starts]
        words = _mix(words)
        count = len(words) - SHINGLE_WORDS + 1
        shingle = np.zeros(count, np.uint64)
        for place in range(SHINGLE_WORDS):
            shingle = shingle * _BASE + words[place : place + count]
        return _mix(shingle)


_TABLES: dict[int, np.ndarray] = {}


def _powers(base: np.uint64, count: int) -> np.ndarray:
    """base**0 .. base**(count - 1), kept for the next text."""
    table = _TABLES.get(int(base))
    if table is None or len(table) < count:
        factors = np.full(max(count, 2**16), base)
        factors[0] = 1
        table = _TABLES[int(base)] = np.cumprod(factors)
    return table[:count]


def _mix(values: np.ndarray) -> np.ndarray:
    """A bijection of uint64 after which every bit depends on all others."""
    values = (values ^ (values >> np.uint64(32))) * _MIX
    return (values ^ (values >> np.uint64(32))) * _MIX
