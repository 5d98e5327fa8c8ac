"""Bytes and host seconds of what a learner and its engines exchange while episodes play (docs/fleet.md).

    to the engine, a message    = 4 * tokens that the engine lacks + REQUEST_HEADER_BYTES
    from the engine             = SAMPLED_TOKEN_BYTES * sampled tokens + routes + REPLY_HEADER_BYTES
    routes, on every hop        = tokens without routes * L * k * (1 up to 256 experts, else 2)
    a decode call               = DECODE_ROW_BYTES * rows + 12 * entries of page tables + headers, to every other
                                  process of the engine
    status                      = STATUS_BYTES a second, engine and learner
    seconds of the learner      = messages * MESSAGE_S + bytes / MESSAGE_RATE
    seconds between two calls   = CALL_S * engines of one process, at least: they share its Python
    a shard's part of a patch   = changed * (2 + bytes of a weight) + 8 * gaps of 65,535 weights and more, and 0.4 %

L expert layers and k experts a token. Neither the chips nor the length of the context is in a message. Headers are
upper bounds; tests count all bytes at two sizes. The seconds are those of one core of this project's measurement
(python -m benchmarks.fleet, parts "router", without and with routes, and "scheduler").
"""

import dataclasses

import numpy as np
from numpy.typing import ArrayLike

from composer_jax.models.config import ModelConfig
from composer_jax.sampler.route_read import route_dtype

CONTEXT_TOKEN_BYTES = 4
SAMPLED_TOKEN_BYTES = 8
"""Of a sampled token: id and log-probability. At a temperature that is not 1 there are two log-probabilities, and those
of a foreign engine may be float64: up to 20."""
REQUEST_HEADER_BYTES = 512
REPLY_HEADER_BYTES = 512
"""Of a message's frame, at most: its parameters, and what describes its arrays."""
STATUS_BYTES = 1000
"""Of the frame in which an engine says what it does, at most."""
DECODE_ROW_BYTES = 24
"""Of a row of a decode call: token, position, budget, seed, page table, and the row that it continues."""
TABLE_ENTRY_BYTES = 12
CALL_HEADER_BYTES = 512
"""Of the commands of a device call, at most."""
MESSAGE_S = 0.00037
"""Seconds of the learner's process 0 for a message without routes: the tasks of its group, the journal, the router,
checks and channels."""
MESSAGE_RATE = 0.39e9
"""Bytes of routes per second that it receives, checks, unpacks and writes into the journal."""
CALL_S = 0.003
"""Seconds of an engine's host for a device call: 128 requests on 16 shards."""
PATCH_HEADER_BYTES = 128
"""Of one shard in a patch, at most: counts, and what zstandard adds to bytes that it cannot shorten."""


@dataclasses.dataclass(frozen=True)
class RouteBytes:
    """Bytes of the routes of one message on each hop."""

    device_to_host: int
    """From the one shard that has its pages."""
    host_to_host: int
    """From the process that owns this shard to process 0 of the engine; nothing if that is the same."""
    frame: int
    """The array of Sample.routing, from process 0 to a learner, a worker or the journal."""


def route_token_bytes(config: ModelConfig) -> int:
    """Returns the bytes of the routes of one token in a message: L * k * itemsize, 0 of a network without experts."""
    return config.n_moe_layers * config.experts_per_token * route_dtype(config.n_experts).itemsize


def message_route_bytes(config: ModelConfig, tokens: int, *, same_process: bool = False) -> RouteBytes:
    """Returns the bytes of the routes of a message; headers are less than 1 % from 500 tokens of Kimi K2.5 on.

    Args:
      tokens: those whose routes the caller lacks, new observations and sampled tokens: len(Sample.routing).
      same_process: whether process 0 of the engine owns the shard of the message.
    """
    n = tokens * route_token_bytes(config)
    return RouteBytes(n, 0 if same_process else n, n)


def request_bytes(tokens: float) -> float:
    """Returns the bytes of a message to an engine. tokens: of the context that the engine lacks."""
    return CONTEXT_TOKEN_BYTES * tokens + REQUEST_HEADER_BYTES


def reply_bytes(sampled: float, route_bytes: float) -> float:
    """Returns the bytes of a message from an engine. route_bytes: 0 where routes are not replayed."""
    return SAMPLED_TOKEN_BYTES * sampled + route_bytes + REPLY_HEADER_BYTES


def message_seconds(n_bytes: float, message_s: float = MESSAGE_S, bytes_per_s: float = MESSAGE_RATE) -> float:
    """Returns the seconds of the learner's process 0 for a message that has these bytes, both ways."""
    return message_s + n_bytes / bytes_per_s


def decode_call_bytes(rows: int, changes: int) -> int:
    """Returns the bytes of a decode call on their way to one other process of the engine.

    Args:
      rows: of the call on all shards, those without a request included.
      changes: entries of the writes of page tables before it, padding included (sampler/page_tables.py).
    """
    return DECODE_ROW_BYTES * rows + TABLE_ENTRY_BYTES * changes + CALL_HEADER_BYTES


def engine_call_seconds(device_s: ArrayLike, engines: int = 1, call_s: float = CALL_S) -> np.ndarray:
    """Returns the seconds from one device call of an engine to its next.

    The host works on the next call while the devices compute one, so it costs nothing until the engines of one process
    together need longer.

    Args:
      device_s: seconds of the devices for a call, of any shape.
      engines: that share one Python process.
      call_s: seconds of the host for one call of one engine.
    """
    return np.maximum(device_s, engines * call_s)


def patch_bytes(changed: int, size: int, itemsize: int = 2) -> float:
    """Returns the bytes of one shard in a patch, at most (checkpoint/weight_patch.py).

    What zstandard shortens, the high bytes of places and of values, is not counted.

    Args:
      changed: weights whose bits differ from the version before.
      size: weights of the shard.
      itemsize: bytes of a weight as it is published.
    """
    long_gaps = min(changed, size // 65_535)
    return (changed * (2 + itemsize) + 8 * long_gaps) * (1 + 1 / 256) + PATCH_HEADER_BYTES
