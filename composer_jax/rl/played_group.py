"""PlayedGroup: a group whose episodes have all ended, as it is stored until a checkpoint has learned from it."""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Self, TypeVar

import numpy as np
import zstandard

from composer_jax.agent.episode import Episode
from composer_jax.errors import UserError
from composer_jax.rl.batch import Group


@dataclasses.dataclass(frozen=True)
class PlayedGroup:
    """The episodes of one task.

    Attributes:
      number: of the group in its run.
      episodes: one per EpisodeSpec of the group, in their order; those without a reward were lost.
      admitted_at: optimizer steps that had been taken when the group was admitted.
      resolved_version: version of the sampler's weights when the last episode ended.
    """

    number: int
    episodes: Sequence[Episode]
    admitted_at: int
    resolved_version: int

    @property
    def oldest_version(self) -> int:
        """The oldest weights version of any sampled token; resolved_version if nothing was sampled."""
        versions = [
            int(node.versions.min())
            for episode in self.episodes
            for node in episode.transcript.nodes
            if len(node.versions)
        ]
        return min(versions, default=self.resolved_version)

    @classmethod
    def read(cls, file: Path) -> Self:
        """Reads a group from a file of `encode_group`. Raises a UserError if it is missing or damaged."""
        try:
            return decode_group(cls, file.read_bytes())
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{file} is damaged ({error})") from error


AnyGroup = TypeVar("AnyGroup", Group, PlayedGroup)


def encode_group(group: Group | PlayedGroup) -> bytes:
    """Compressed JSON from which `decode_group` makes an equal group, bit for bit."""
    fields = {**group.__dict__, "episodes": [episode.to_json() for episode in group.episodes]}
    return zstandard.compress(json.dumps(fields, separators=(",", ":")).encode())


def decode_group(kind: type[AnyGroup], data: bytes | memoryview) -> AnyGroup:
    """The inverse of encode_group. Raises ValueError for other bytes."""
    try:
        fields = json.loads(zstandard.decompress(data))
    except zstandard.ZstdError as error:
        raise ValueError(f"no zstd frame: {error}") from error
    return kind(**{**fields, "episodes": [Episode.from_json(item) for item in fields["episodes"]]})


def hash_tokens(groups: Iterable[PlayedGroup]) -> str:
    """Returns 16 hex digits of the SHA-256 of all training rows: their lengths, token ids and trained masks."""
    digest = hashlib.sha256()
    for group in groups:
        for episode in group.episodes:
            for row in episode.transcript.rows():
                digest.update(len(row.tokens).to_bytes(8, "little"))
                digest.update(np.ascontiguousarray(row.tokens, "<i4").tobytes())
                digest.update(np.packbits(row.trained).tobytes())
    return digest.hexdigest()[:16]
