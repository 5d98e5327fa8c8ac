"""Which documents are left out because an earlier one is equal or nearly equal, over all units."""

from __future__ import annotations

import numpy as np

from composer_jax.data.prepare.near_duplicates import BAND, PERMUTATIONS

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
      signatures: uint8[n, 128], by `near_duplicates.signatures`; zeros are compared with nothing.
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
