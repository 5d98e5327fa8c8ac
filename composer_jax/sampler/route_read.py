"""RouteReader: reads the experts of requests that ended out of the cache, and moves the bytes of their tokens only.

Prefill and decode write the experts of every token into its page (models/cache.py). They are read there, and not
returned by the calls that compute them: tokens of a prefix that another request computed, in this session or another,
have no such call of their own; a preempted request would collect them twice; and every call would move, for every row,
what only requests with return_routing need. A read costs the devices one gather, once per commit.

The shapes of the gather are static and the numbers of tokens are not. So a program returns its N tokens in pieces of
N/2, N/4, ..., 2, 1 and 1, the host puts the n wanted tokens of a shard into the pieces that add up to n, and only these
leave the device. A span is a row of int32: shard, offset of the first token in its first page, tokens, pages. Processes
make the gather's indices from spans, so a command does not grow with the shards.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from composer_jax.frames import Frame
from composer_jax.models.config import ModelConfig
from composer_jax.parallel.mesh import BATCH_AXES
from composer_jax.sampler.sequence import SequenceState

SMALLEST = 512
"""Tokens per shard of the smallest read."""
STEP = 8
"""Each size of a read is at most so many times the one before."""

Wanted = tuple[SequenceState, int]
"""A sequence, and the first of its computed tokens whose routes are wanted."""


def route_dtype(n_experts: int) -> np.dtype:
    """Returns the smallest dtype that holds the number of every expert."""
    return np.dtype(np.uint8 if n_experts <= 256 else np.uint16)


def read_sizes(longest: int) -> tuple[int, ...]:
    """Returns the tokens per shard of the compiled reads, ascending powers of two; the last holds `longest` tokens."""
    last = 1 << (longest - 1).bit_length()
    sizes = [last]
    while sizes[0] > SMALLEST:
        sizes.insert(0, max(SMALLEST, sizes[0] // STEP))
    return tuple(sizes)


def piece_sizes(size: int) -> list[int]:
    """Returns the tokens of the pieces of a read of `size` tokens."""
    return [size >> i for i in range(1, size.bit_length())] + [1]


def used_pieces(size: int, n: int) -> list[int]:
    """Returns the numbers of the pieces that hold n tokens together."""
    pieces = piece_sizes(size)
    return list(range(len(pieces))) if n == size else [i for i, piece in enumerate(pieces[:-1]) if n & piece]


def routing_program(config: ModelConfig, mesh: Mesh, size: int) -> Callable[[jax.Array, np.ndarray], list[jax.Array]]:
    """Jitted read of routes: (Cache.routing_ZTC, places int32 [shards,size]) -> pieces [shards,tokens,L*k].

    A place is page * page size + offset, in the cache of the row's shard. The pieces have `route_dtype`.
    """
    width, dtype = config.n_moe_layers * config.experts_per_token, route_dtype(config.n_experts)
    ends = np.cumsum(piece_sizes(size))[:-1].tolist()

    def program(routing_ZTC, places_BN):
        page_BN, offset_BN = jnp.divmod(places_BN, routing_ZTC.shape[1])
        routes_BNC = routing_ZTC[page_BN, offset_BN][..., :width].astype(dtype)
        return jnp.split(routes_BNC, ends, axis=1)

    pages = PartitionSpec(BATCH_AXES)
    return jax.jit(jax.shard_map(program, mesh=mesh, in_specs=(pages, pages), out_specs=pages, check_vma=False))


class RouteReader:
    """The compiled reads of one engine, the same in all of its processes."""

    def __init__(self, config: ModelConfig, mesh: Mesh, page_size: int, shards: int, longest: int) -> None:
        """longest: tokens of the longest context."""
        self.sizes = read_sizes(longest)
        self._programs = {size: routing_program(config, mesh, size) for size in self.sizes}
        self._shape = config.n_moe_layers, config.experts_per_token
        self._width = config.n_moe_layers * config.experts_per_token
        self._dtype, self._page_size, self._shards = route_dtype(config.n_experts), page_size, shards
        devices = NamedSharding(mesh, PartitionSpec(BATCH_AXES)).devices_indices_map((shards,))
        self._owners: dict[int, Any] = {}
        """Of equal shards, the one jax.Device that sends."""
        for device, (part,) in devices.items():
            self._owners.setdefault(part.start or 0, device)

    def calls(self, wanted: Sequence[Wanted]) -> list[list[int]]:
        """Returns the numbers of the sequences of each read: one, unless a shard has more than the largest size."""
        calls: list[list[int]] = []
        filled: dict[int, int] = {}
        for i, (row, start) in enumerate(wanted):
            n = row.computed - start
            if n <= 0:
                continue
            if not calls or filled.get(row.shard, 0) + n > self.sizes[-1]:
                calls.append([])
                filled = {}
            filled[row.shard] = filled.get(row.shard, 0) + n
            calls[-1].append(i)
        return calls

    def spans(self, wanted: Sequence[Wanted]) -> np.ndarray:
        """Returns what one read takes, int32 [requests, 3 + pages]; only pages that hold wanted tokens are in it."""
        page = self._page_size
        parts = [row.pages[start // page : -(-row.computed // page)] for row, start in wanted]
        spans = np.zeros((len(wanted), 3 + max(map(len, parts))), np.int32)
        for span, (row, start), pages in zip(spans, wanted, parts, strict=True):
            span[:3] = row.shard, start % page, row.computed - start
            span[3 : 3 + len(pages)] = pages
        return spans

    def padding(self, size: int) -> np.ndarray:
        """Returns the spans of a read of that size that nobody waits for."""
        return np.array([[0, 0, size, *[0] * -(-size // self._page_size)]], np.int32)

    def start(self, routing_ZTC: jax.Array, spans: np.ndarray) -> list[jax.Array]:
        """Starts a read; returns the used pieces of the shards that this process owns, [1,tokens,L*k] each."""
        size, counts = self._measure(spans)
        places = np.zeros((self._shards, size), np.int32)
        for shard, n in counts.items():
            places[shard, self._order(size, n)] = np.concatenate(
                [self._places(span) for span in spans if span[0] == shard]
            )
        out = self._programs[size](routing_ZTC, places)
        here = jax.process_index()
        pieces = []
        for shard, number in self._sent(size, counts):
            device = self._owners[shard]
            if device.process_index == here:
                pieces += [part.data for part in out[number].addressable_shards if part.device == device]
        for piece in pieces:
            piece.copy_to_host_async()
        return pieces

    def other_owners(self, spans: np.ndarray) -> set[int]:
        """Returns the processes beside this one that reply to a read."""
        return {self._owners[shard].process_index for shard in spans[:, 0].tolist()} - {jax.process_index()}

    def finish(
        self, spans: np.ndarray, here: Sequence[jax.Array], replies: dict[int, Frame] | None = None
    ) -> list[np.ndarray]:
        """Returns the routes of each span, [tokens, L, k].

        Args:
          here: what `start` returned in this process.
          replies: what other processes sent of what it returned there. What none of them sent, as when all processes
            only compile the read, is zeros.
        """
        size, counts = self._measure(spans)
        arrays = {jax.process_index(): [np.asarray(piece) for piece in here]}
        arrays |= {process: list(pieces) for process, (_, pieces) in (replies or {}).items()}
        rows: dict[int, list[np.ndarray]] = {shard: [] for shard in counts}
        for shard, number in self._sent(size, counts):
            sent = arrays.get(self._owners[shard].process_index)
            missing = piece_sizes(size)[number], self._width
            rows[shard].append(np.zeros(missing, self._dtype) if sent is None else sent.pop(0)[0])
        by_shard = {shard: np.concatenate(parts) for shard, parts in rows.items()}
        done = dict.fromkeys(counts, 0)
        routes = []
        for shard, _, n, *_ in spans.tolist():
            part = by_shard[shard][done[shard] : done[shard] + n]
            routes.append(part.reshape(n, *self._shape))
            done[shard] += n
        return routes

    def empty(self) -> np.ndarray:
        """Returns the routes of no token."""
        return np.zeros((0, *self._shape), self._dtype)

    def _measure(self, spans: np.ndarray) -> tuple[int, dict[int, int]]:
        """Size of the program, and the wanted tokens of each shard that has some."""
        counts: dict[int, int] = {}
        for shard, _, n in spans[:, :3].tolist():
            counts[shard] = counts.get(shard, 0) + n
        return next(size for size in self.sizes if size >= max(counts.values())), dict(sorted(counts.items()))

    def _sent(self, size: int, counts: dict[int, int]) -> list[tuple[int, int]]:
        """(shard, piece) of all that travels, in the order in which each process sends its own."""
        return [(shard, number) for shard, n in counts.items() for number in used_pieces(size, n)]

    def _order(self, size: int, n: int) -> np.ndarray:
        """Where n tokens lie among the `size` of a program: in the pieces that are used."""
        pieces = piece_sizes(size)
        starts = np.cumsum([0, *pieces])
        return np.concatenate([np.arange(starts[i], starts[i] + pieces[i]) for i in used_pieces(size, n)])

    def _places(self, span: np.ndarray) -> np.ndarray:
        tokens = span[1] + np.arange(span[2])
        return span[3:][tokens // self._page_size] * self._page_size + tokens % self._page_size
