"""Which documents are left out because an earlier one is equal or nearly equal, over all units.

Near duplicates are found by MinHash signatures (Broder 1997), in bytes that also serve as the bands of
locality-sensitive hashing. A signature has one byte for each of 128 permutations (b-bit minwise hashing, Li and Koenig
2010, with b=8): two texts agree in about the fraction J of them, J being the Jaccard similarity of their sets of
five-word shingles. Eight consecutive bytes are one of 16 bands. Texts that share a band are compared: those with J=0.8
do with a probability of 95%, those with J=0.5 of 6%.
"""

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

UNIQUE, EXACT, NEAR = 0, 1, 2
"""Verdicts; the last two index DUPLICATE_REASONS."""
DUPLICATE_REASONS = (None, "exact duplicate", "near duplicate")
_BANDS = PERMUTATIONS // BAND
_FIRST = 4  # documents of a band's bucket that every later one is compared with, beside the one before it
_CHUNK = 65_536  # pairs that are compared at once


def find_duplicates(digests: np.ndarray, signatures: np.ndarray, heldout: np.ndarray, threshold: float) -> np.ndarray:
    """Returns uint8[n]: UNIQUE, EXACT or NEAR for each of n documents.

    Of two equal documents the later one is the duplicate. Held-out documents come before all others, so that nothing
    like them is trained on.

    Args:
      digests: uint64[n], hashes of the content. Two different ones among 1e8 are equal with a probability of 0.03%.
      signatures: uint8[n, 128], by `make_signatures`; zeros are compared with nothing.
      heldout: bool[n].
      threshold: fraction of equal bytes of two signatures from which documents are near duplicates; 0 finds none.
    """
    order = np.argsort(~heldout, kind="stable")
    verdicts = np.full(len(digests), EXACT, np.uint8)
    _, first = np.unique(digests[order], return_index=True)
    unique = order[np.sort(first)]
    verdicts[unique] = UNIQUE
    if threshold > 0:
        unique = unique[signatures[unique].any(axis=1)]
        verdicts[unique[_near(signatures, unique, threshold)]] = NEAR
    return verdicts


def _near(signatures: np.ndarray, documents: np.ndarray, threshold: float) -> np.ndarray:
    """The indices into `documents`, in order, of those that are near an earlier one which is not near any."""
    pairs = np.unique(np.concatenate([_similar(signatures, documents, b, threshold) for b in range(_BANDS)]), axis=0)
    dropped = np.zeros(len(documents), bool)
    for later, earlier in pairs.tolist():  # sorted by the later one
        if not dropped[earlier]:
            dropped[later] = True
    return np.flatnonzero(dropped)


def _similar(signatures: np.ndarray, documents: np.ndarray, band: int, threshold: float) -> np.ndarray:
    """int64[pairs, 2]: (later, earlier) documents that share a band and agree in enough bytes."""
    keys = signatures.view(np.uint64)[documents, band]
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    starts = np.flatnonzero(np.diff(ordered, prepend=~ordered[:1]) != 0)
    bucket = np.repeat(starts, np.diff(starts, append=len(ordered)))  # where the bucket of each one starts
    place = np.arange(len(ordered)) - bucket
    candidates = []
    for other in (*range(_FIRST), -1):
        chosen = place > other if other >= 0 else place > _FIRST
        target = bucket[chosen] + other if other >= 0 else np.flatnonzero(chosen) - 1
        candidates.append(np.stack([order[chosen], order[target]], axis=1))
    pairs = np.concatenate(candidates)
    similar = [
        (signatures[documents[chunk[:, 0]]] == signatures[documents[chunk[:, 1]]]).mean(axis=1) >= threshold
        for chunk in np.split(pairs, range(_CHUNK, len(pairs), _CHUNK))
    ]
    return pairs[np.concatenate(similar)]


def check_library() -> None:
    """Raises UserError if the library of MinHash is not installed."""
    try:
        import rensa  # noqa: F401
    except ImportError:
        raise UserError(
            "finding near duplicates needs rensa; pip install 'composer_jax[prepare]', or set --near_duplicates=0"
        ) from None


def make_signatures(texts: Sequence[bytes]) -> np.ndarray:
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
