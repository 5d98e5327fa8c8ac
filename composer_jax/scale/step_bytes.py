"""Bytes and host seconds of a step's batches on their way from process 0 to the other processes of a learner.

    sent to a process      = tokens of the blocks that its devices hold x token_bytes(L, k), and headers
    sent by process 0      = the sum over the others: (processes - 1) / processes of the batch, more where processes
                             hold copies of a block because `tensor` goes over several of them
    held by a process      = its part, and WAITING_BYTES of frames
    seconds of process 0   = bytes sent / PACK_AND_SEND_RATE, of a receiver bytes / RECEIVE_RATE; no term with the pod

The rates are those of one core of this project's measurement (benchmarks/step_batches.py); a test counts the bytes.
"""

import math

from composer_jax.rl.batch import FIELDS
from composer_jax.train.batch_parts import PIECE_BYTES

HEADER_BYTES = 2048
"""Of a frame, at most."""
PACK_AND_SEND_RATE = 0.9e9
"""Bytes per second in which a core copies routes into blocks and sends them over a local connection."""
RECEIVE_RATE = 0.6e9
"""Bytes per second in which a core receives them and puts them together."""


def token_bytes(route_shape: tuple[int, int] | None, *, has_reference: bool = False) -> int:
    """Returns the bytes of a token in a batch. route_shape: (L, k) where routes are replayed, 2 bytes each."""
    return 4 * (len(FIELDS) + has_reference) + (2 * math.prod(route_shape) if route_shape else 0)


def part_token_count(tokens: int, blocks: int, blocks_of_process: int) -> int:
    """Returns the tokens of a step, padding included, that a process gets.

    Args:
      tokens: of the batches of a step.
      blocks: into which the axes replica, data, expert and context divide a batch, whether or not copies lie elsewhere.
      blocks_of_process: different ones that its devices hold.
    """
    return tokens * blocks_of_process // blocks


def frame_overhead(part_bytes: int, blocks: int, *, rows: int, piece_bytes: int = PIECE_BYTES) -> int:
    """Returns an upper bound of the headers' bytes of one batch's part: of its description and of every frame.

    Args:
      blocks: that the process holds. rows: of the part; a frame has one of them at least.
    """
    frames = min(blocks * rows, blocks + 2 * math.ceil(part_bytes / piece_bytes))
    return HEADER_BYTES * (1 + frames)


def send_seconds(sent_bytes: float) -> float:
    """Returns the host seconds of process 0 for what it sends in a step."""
    return sent_bytes / PACK_AND_SEND_RATE


def receive_seconds(part_bytes: float) -> float:
    """Returns the host seconds of another process for its part of a step."""
    return part_bytes / RECEIVE_RATE
