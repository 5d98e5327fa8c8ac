"""What the scheduler deals with: sequences, leases, and the device calls that it plans. Plain data, no JAX."""

import dataclasses
from array import array
from collections.abc import Hashable, Sequence

from composer_jax.sampler.prefix_index import n_skipped_pages
from composer_jax.sampler.prefix_tree import PrefixNode

NO_PAGE = 0
"""Stands in page tables for pages that a sequence no longer holds. It is a page that exists: attention may read it in
one block with pages that it needs, and masks what it read."""


def token_array(tokens: Sequence[int] = ()) -> "array[int]":
    """Returns a copy of token ids as int32.

    Lists of all contexts would be what Python's garbage collector mostly goes through, and slices, comparisons and
    hashes of arrays take a tenth of the time.
    """
    return array("i", tokens)


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
    window: int | None = None
    """Tokens that a token attends to, itself included, where every layer has a window (models/cache.py: cache_window).
    The pages before it are freed. None: some layer attends to the whole context, whose pages are then all kept. It is
    larger than a page: a running sequence keeps its last full page, after which the prefix tree adds the next."""
    spare_pages: int = 0
    """Pages of each shard after those, which no sequence gets: Runner.score scores its row there."""
    fitting: int = 1
    """Sessions that fit into a shard however long they grow."""
    most_ahead: int = 0
    """Outstanding decode calls of a sequence while its next one is scheduled, at most."""

    def __post_init__(self) -> None:
        assert self.window is None or self.window > self.page_size, "the window is not larger than a page"

    @property
    def cache_pages(self) -> int:
        """All pages of a shard's cache."""
        return self.n_pages + self.spare_pages

    def pages_for(self, n_tokens: int) -> int:
        """Returns how many pages hold that many tokens."""
        return -(-n_tokens // self.page_size)

    def n_skipped(self, computed: int) -> int:
        """Returns the number of leading pages that no later token attends to, after `computed` cached tokens."""
        return n_skipped_pages(computed, self.page_size, self.window)

    def most_pages(self, n_tokens: int) -> int:
        """Returns how many pages a sequence that ends with `n_tokens` tokens holds at once, at most.

        With a window these are the pages of the tokens that the first token of a device call attends to, and of the
        tokens that the call computes, and those before it whose tokens are not known yet; a page is cut at both ends.
        """
        if self.window is None:
            return self.pages_for(n_tokens)
        call = max((1 + self.most_ahead) * self.decode_steps, self.prefill_shapes[-1][1])
        return min(self.pages_for(n_tokens), self.pages_for(self.window - 1 + call) + 1)


class CacheLease:
    """Keeps the pages of one conversation between its requests, as long as no running request needs them."""

    def __init__(self) -> None:
        self.shard = -1
        self.tokens = token_array()
        """Those that are computed."""
        self.prefix: PrefixNode | None = None
        self.pages: list[int] = []
        """Those of `tokens`, as SequenceState.pages."""
        self.n_skipped = 0
        """Leading pages of `tokens` that are not kept: no later token attends to them."""
        self.used = False
        """Whether a request of the conversation has ended."""

    @property
    def tail(self) -> list[int]:
        """Pages after those of the prefix: one that is not full, or more where the prefix is of an earlier epoch."""
        return [] if self.prefix is None else self.pages[max(self.prefix.depth, self.n_skipped) :]

    def is_prefix_of(self, sequence: "SequenceState") -> bool:
        """Whether it keeps pages of the beginning of a sequence's context."""
        n = len(self.tokens)
        return self.prefix is not None and n < len(sequence.tokens) and sequence.tokens[:n] == self.tokens


@dataclasses.dataclass(eq=False)
class SequenceState:
    """One request, waiting or running."""

    tokens: "array[int]"
    """The context, and what was sampled: a copy, as `token_array` makes it."""
    budget: int
    """Tokens that may still be sampled."""
    priority: int = 0
    """Larger numbers run first."""
    group: Hashable = None
    """Groups take turns: of equal priorities, the group with the fewest running sequences comes first."""
    lease: CacheLease | None = None
    uses_cache: bool = True
    """False computes the whole context, whatever is cached."""
    arrival: int = -1
    home: int = -1
    """The shard with the pages of its lease, on which it waits for a row; -1: it waits for a row on any shard."""
    shard: int = -1
    """Where it runs; -1 while it waits."""
    computed: int = 0
    pages: list[int] = dataclasses.field(default_factory=list)
    """Those of the context in its order; NO_PAGE for the first `n_skipped`. The list grows in place, and what else
    changes makes a new list: so page tables need not compare it with what the devices have."""
    prefix: PrefixNode | None = None
    """The shared pages, which the sequence holds; None while it waits."""
    n_shared: int = 0
    """How many of `pages` are shared."""
    n_skipped: int = 0
    """Leading pages that no later token attends to; the sequence does not hold them."""
    cached: int | None = None
    """Tokens that were found in the cache when the sequence ran first."""
    may_grow: bool = False
    """Whether it has fewer pages than it may come to need; False while it waits."""
    n_calls: int = 0
    """Outstanding decode calls, whose tokens the host does not know yet: `tokens`, `budget` and `computed` are those
    before them."""

    def __post_init__(self) -> None:
        self.tokens = token_array(self.tokens)

    @property
    def is_new(self) -> bool:
        """Whether it is the first request of a session, and has not run yet."""
        return self.lease is not None and not self.lease.used and self.cached is None

    @property
    def first_own(self) -> int:
        """Place in `pages` of the first page that only this sequence has."""
        return max(self.n_shared, self.n_skipped)

    @property
    def n_missing(self) -> int:
        """Tokens that prefill has still to compute: all but the last."""
        return len(self.tokens) - 1 - self.computed

    @property
    def is_decoding(self) -> bool:
        """Whether all tokens but the last are computed."""
        return self.computed + 1 == len(self.tokens)

    def forget_pages(self) -> None:
        """Makes it a waiting sequence; its pages have other owners already."""
        self.shard, self.prefix, self.pages = -1, None, []
        self.n_shared = self.n_skipped = self.computed = self.n_calls = 0


@dataclasses.dataclass(frozen=True)
class PrefillChunk:
    """Tokens of one sequence in a prefill call."""

    sequence: SequenceState
    start: int
    count: int


@dataclasses.dataclass(frozen=True)
class SchedulerOutput:
    """The next device calls: one prefill call, then one decode call; either may be empty."""

    prefill_shape: tuple[int, int] | None
    """(rows per shard, tokens per row); None where nothing is prefilled."""
    prefill: list[PrefillChunk]
    decode: list[SequenceState]

    def __bool__(self) -> bool:
        return bool(self.prefill or self.decode)
