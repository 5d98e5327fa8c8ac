"""PlayedGroup: a group whose episodes have all ended, as it is stored until a checkpoint has learned from it."""

import dataclasses
import hashlib
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Self, TypeVar

import numpy as np

from composer_jax.agent.episode import Episode
from composer_jax.errors import UserError
from composer_jax.frames import Buffer, FrameError, frame_buffers, read_frames

FORMAT = "composer_jax group 1"
"""What the first header of a group's file says that it is."""


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
        except (OSError, FrameError) as error:
            raise UserError(f"{file} is damaged ({error})") from error


AnyGroup = TypeVar("AnyGroup", bound=PlayedGroup)


def encode_group(group: PlayedGroup) -> list[Buffer]:
    """Returns buffers of a file from which `decode_group` makes an equal group, bit for bit.

    They are one frame for the group and one for each episode, whose arrays are not copied. A checksum of the arrays of
    each episode finds a damaged file; it costs less than reading it.
    """
    frames = [episode.to_frame() for episode in group.episodes]
    header = {"format": FORMAT, **group.__dict__, "episodes": [_checksum(arrays) for _, arrays in frames]}
    return [*frame_buffers(header), *(buffer for frame in frames for buffer in frame_buffers(*frame))]


def decode_group(kind: type[AnyGroup], data: Buffer) -> AnyGroup:
    """The inverse of encode_group; the arrays are views of `data`. Raises FrameError for other bytes."""
    frames = read_frames(data)
    header, _ = next(frames, ({}, []))
    if header.get("format") != FORMAT:
        raise FrameError(f"a file of {header.get('format')!r}, not of {FORMAT!r}")
    checksums, episodes = header["episodes"], []
    for number, (of_episode, arrays) in enumerate(frames):
        if number < len(checksums) and _checksum(arrays) != checksums[number]:
            raise FrameError(f"episode {number} has other bytes than were written")
        episodes.append(Episode.from_frame(of_episode, arrays))
    if len(episodes) != len(checksums):
        raise FrameError(f"{len(episodes)} of {len(checksums)} episodes")
    return kind(header["number"], episodes, header["admitted_at"], header["resolved_version"])


def _checksum(arrays: Iterable[np.ndarray]) -> int:
    value = 0
    for array in arrays:
        value = zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, value)
    return value


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
