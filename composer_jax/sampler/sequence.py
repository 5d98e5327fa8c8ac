"""What the scheduler deals with: sequences, leases, and the device calls that it plans. Plain data, no JAX."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable

from composer_jax.sampler.prefix_tree import PrefixNode


@dataclasses.dataclass(frozen=True)
class Limits:
    """Sizes of the cache and of device calls."""

    page_size: int
    """Tokens per page."""
    n_pages: int
    """Pages of each shard."""
    shards: int
    """Devices that hold caches of their own: the batch shards of the mesh."""
    rows: int
    """Sequences that run at once on one shard, at most; all of them fit into one decode call."""
    prefill_shapes: tuple[tuple[int, int], ...]
    """(rows per shard, tokens per row) of prefill calls, by ascending tokens."""
    decode_steps: int
    """Tokens that one decode call samples per row, at most."""


class Lease:
    """Keeps the pages of one conversation between its requests, as long as no running request needs them."""

    def __init__(self) -> None:
        self.shard = -1
        self.tokens: list[int] = []
        """Those that are computed."""
        self.prefix: PrefixNode | None = None
        self.tail: list[int] = []
        """Pages after those of the prefix: one that is not full, or more where the prefix is of an earlier epoch."""
        self.used = 0


@dataclasses.dataclass(eq=False)
class Sequence:
    """One request, waiting or running."""

    tokens: list[int]
    """The context, and what was sampled."""
    budget: int
    """Tokens that may still be sampled."""
    priority: int = 0
    """Larger numbers run first."""
    group: Hashable = None
    """Groups take turns: of equal priorities, the group with the fewest running sequences comes first."""
    lease: Lease | None = None
    uses_cache: bool = True
    """False computes the whole context, whatever is cached."""
    arrival: int = -1
    shard: int = -1
    """Where it runs; -1 while it waits."""
    computed: int = 0
    pages: list[int] = dataclasses.field(default_factory=list)
    prefix: PrefixNode | None = None
    """The shared pages, which the sequence holds; None while it waits."""
    n_shared: int = 0
    """How many of `pages` are shared."""
    cached: int | None = None
    """Tokens that were found in the cache when the sequence ran first."""

    @property
    def n_missing(self) -> int:
        """Tokens that prefill has still to compute: all but the last."""
        return len(self.tokens) - 1 - self.computed

    @property
    def is_decoding(self) -> bool:
        """Whether all tokens but the last are computed."""
        return self.n_missing == 0

    def forget_pages(self) -> None:
        """Makes it a waiting sequence; its pages have other owners already."""
        self.shard, self.prefix, self.pages, self.n_shared, self.computed = -1, None, [], 0, 0


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Tokens of one sequence in a prefill call."""

    sequence: Sequence
    start: int
    count: int


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The next device calls: one prefill call, then one decode call; either may be empty."""

    prefill_shape: tuple[int, int] | None
    """(rows per shard, tokens per row); None where nothing is prefilled."""
    prefill: list[Chunk]
    decode: list[Sequence]

    def __bool__(self) -> bool:
        return bool(self.prefill or self.decode)
