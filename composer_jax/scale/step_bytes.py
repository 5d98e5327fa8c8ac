"""Bytes and host seconds of a step's batches on their way from process 0 to the other processes of a learner.

    sent to a process      = tokens * token_bytes(L, k, E) * copies / processes, and headers
    sent by process 0      = (processes - 1) times that: the batch once, where no two processes hold a block
    held by a process      = its part, and WAITING_BYTES of frames
    seconds of process 0   = bytes sent / SEND_RATE, of a receiver its part / RECEIVE_RATE; no term with the pod

The rates are those of one core of this project's measurement (benchmarks/step_batches.py); a test counts the bytes.
"""

import math

from composer_jax.models.route_dtypes import replay_dtype
from composer_jax.rl.batch import FIELDS
from composer_jax.train.batch_parts import PIECE_BYTES

HEADER_BYTES = 2048
"""Of a frame, at most."""
SEND_RATE = 2.5e9
"""Bytes per second in which a core copies routes into blocks and sends them over a local connection."""
RECEIVE_RATE = 0.95e9
"""Bytes per second in which a core receives them and puts them together."""


def token_bytes(route_shape: tuple[int, int] | None, n_experts: int, *, has_reference: bool = False) -> int:
    """Returns the bytes of a token in a batch.

    route_shape: (L, k) where routes are replayed, a byte each of fewer than 256 experts and otherwise two.
    """
    routes = math.prod(route_shape) * replay_dtype(n_experts).itemsize if route_shape else 0
    return 4 * (len(FIELDS) + has_reference) + routes


def part_bytes(tokens: float, token: int, processes: int, *, copies: int = 1) -> float:
    """Returns the bytes of the places of a step that one process gets, headers left out.

    Args:
      tokens: places in the batches, padding included.
      token: `token_bytes`.
      processes: of the learner.
      copies: processes that hold the same block, such as those over which the mesh axis `tensor` goes.
    """
    return tokens * token * copies / processes


def sent_bytes(tokens: float, token: int, processes: int, *, copies: int = 1) -> float:
    """Returns the bytes that process 0 sends; the arguments are those of `part_bytes`."""
    return (processes - 1) * part_bytes(tokens, token, processes, copies=copies)


def batch_seconds(
    tokens: float, token: int, processes: int, *, send_rate: float = SEND_RATE, receive_rate: float = RECEIVE_RATE
) -> float:
    """Returns the seconds until every process has its part: those of process 0, or of one that receives, if longer.

    The arguments are those of `part_bytes`; rates: bytes per second.
    """
    if processes == 1:
        return 0.0
    return max(sent_bytes(tokens, token, processes) / send_rate, part_bytes(tokens, token, processes) / receive_rate)


def frame_overhead(part_bytes: int, blocks: int, *, rows: int, piece_bytes: int = PIECE_BYTES) -> int:
    """Returns an upper bound of the headers' bytes of one batch's part: of its description and of every frame.

    Args:
      blocks: that the process holds. rows: of the part; a frame has a part of one of them at least.
    """
    frames = blocks * rows + 2 * math.ceil(part_bytes / piece_bytes)
    return HEADER_BYTES * (1 + frames)
