"""The first step of a unit: read, filter, and hash what is left."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from composer_jax.atomic_write import open_atomically
from composer_jax.data.prepare.candidates import read_candidates
from composer_jax.data.prepare.config import PrepareConfig
from composer_jax.data.prepare.duplicates import PERMUTATIONS, make_signatures
from composer_jax.data.prepare.filters import filter_text
from composer_jax.data.prepare.plan import WorkUnit
from composer_jax.data.prepare.statistics import Tally

_BATCH_BYTES = 2_000_000  # of texts whose signatures are made together


@dataclass(frozen=True)
class FilteredUnit:
    """The n candidates of a unit that passed the filters, and a tally of all."""

    ordinals: np.ndarray
    """int32[n]: their places in the unit."""
    digests: np.ndarray
    """uint64[n]: hashes of their texts."""
    heldout: np.ndarray
    """bool[n]."""
    signatures: np.ndarray
    """uint8[n, 128], or uint8[n, 0] where near duplicates are kept."""
    tally: Tally

    def save(self, path: Path) -> None:
        """Writes one file, atomically."""
        with open_atomically(path) as file:
            arrays: dict[str, Any] = vars(self) | {"tally": np.asarray(json.dumps(self.tally.tables))}
            np.savez(file, **arrays)

    @classmethod
    def load(cls, path: Path) -> FilteredUnit:
        """Reads a file of `save`."""
        with np.load(path, allow_pickle=False) as saved:
            return cls(**{**saved, "tally": Tally(json.loads(str(saved["tally"])))})


def filter_unit(unit: WorkUnit, config: PrepareConfig) -> FilteredUnit:
    """Returns the candidates of a unit that pass the filters. Raises UserError for a source that cannot be read."""
    tally = Tally()
    ordinals, digests, heldout, signed = [], [], [], []
    texts: list[bytes] = []

    def sign() -> None:
        if texts and config.near_duplicates > 0:
            signed.append(make_signatures(texts))
        texts.clear()

    waiting = 0
    for candidate in read_candidates(unit, config):
        tally.add("candidates", candidate.part.source, candidate.num_bytes)
        reason, text = candidate.reason, ""
        if reason is None:
            try:
                data = candidate.load()
            except OSError:
                reason = "unreadable"
            else:
                tally.add("read", candidate.part.source, len(data))
                text, reason = filter_text(data, candidate.language, candidate.path)
        if reason is not None:
            tally.add("left out", reason, candidate.num_bytes)
            continue
        ordinals.append(candidate.ordinal)
        encoded = text.encode()
        digests.append(text_digest(encoded))
        heldout.append(candidate.heldout)
        texts.append(encoded)
        waiting += len(encoded)
        if waiting > _BATCH_BYTES:
            sign()
            waiting = 0
    sign()
    width = PERMUTATIONS if config.near_duplicates > 0 else 0
    return FilteredUnit(
        np.asarray(ordinals, np.int32),
        np.asarray(digests, np.uint64),
        np.asarray(heldout, bool),
        np.concatenate([np.zeros((0, width), np.uint8), *signed]),
        tally,
    )


def text_digest(text: bytes) -> int:
    """Returns the first 64 bits of the SHA-256 of a text."""
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little")
