"""PrefixTree: the pages of earlier contexts by the tokens in them, so that a common prefix is computed once.

A node is one full page. The path from the root to a node spells a prefix of contexts, so a page is found only by the
tokens of the page and of all pages before it. Holders (running requests and leases) keep the pages of a path; the other
pages are reused for new contexts when the pool is empty, the least recently held first.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence

from composer_jax.sampler.pages import PagePool


class PrefixNode:
    """One page of a prefix; the root has none."""

    __slots__ = ("children", "epoch", "held", "key", "page", "parent", "released")

    def __init__(self, parent: PrefixNode | None, key: tuple[int, ...], page: int, epoch: int) -> None:
        self.parent, self.key, self.page, self.epoch = parent, key, page, epoch
        self.children: dict[tuple[int, ...], PrefixNode] = {}
        self.held = 0
        """Holders of exactly this prefix, and children that are held themselves."""
        self.released = 0
        """When the last holder left, as a running number."""

    def path(self) -> list[PrefixNode]:
        """The nodes from the first page to this one."""
        nodes, node = [], self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


class PrefixTree:
    """The pages of one device's pool that hold prefixes of contexts. It owns those pages."""

    def __init__(self, pool: PagePool, page_size: int) -> None:
        self._pool, self._page_size = pool, page_size
        self._epoch = 0
        self._root = PrefixNode(None, (), -1, self._epoch)
        self._clock = itertools.count(1)
        self._leaves: list[tuple[int, int, PrefixNode]] = []
        """A heap of leaves that nobody holds. Entries of nodes that are held again, or gone, are skipped."""
        self.n_reclaimable = 0
        """Pages that nobody holds."""

    @property
    def root(self) -> PrefixNode:
        """The empty prefix."""
        return self._root

    def match(self, tokens: Sequence[int]) -> PrefixNode:
        """Returns the longest prefix of `tokens` that is here, in full pages."""
        node = self._root
        for key in self._keys(tokens, 0):
            child = node.children.get(key)
            if child is None:
                break
            node = child
        return node

    def hold(self, node: PrefixNode) -> None:
        """Keeps the pages of a prefix until `release`."""
        while True:
            node.held += 1
            if node.held > 1 or node.parent is None:
                return
            self.n_reclaimable -= 1
            node = node.parent

    def release(self, node: PrefixNode) -> None:
        """Ends one `hold`. The pages stay until they are reclaimed; those of an earlier epoch go at once."""
        while True:
            node.held -= 1
            assert node.held >= 0, "a prefix was released more often than held"
            if node.held > 0 or node.parent is None:
                return
            parent = node.parent
            if node.epoch != self._epoch:
                assert not node.children, "a prefix of an earlier epoch has pages that nobody holds"
                self._remove(node)
            else:
                self.n_reclaimable += 1
                node.released = next(self._clock)
                self._add_leaf(node)
            node = parent

    def insert(self, node: PrefixNode, tokens: Sequence[int], pages: Sequence[int]) -> PrefixNode:
        """Adds full pages below a prefix of the current epoch; returns the longer prefix.

        Args:
          node: a prefix that the caller holds; the hold passes to the returned prefix.
          tokens: the tokens in `pages`, a whole number of pages.
          pages: pages of the caller, which now belong to the tree. Where the tree has a page of the same prefix, the
            caller's is given back.
        """
        assert node.epoch == self._epoch, "a prefix of an earlier epoch cannot grow"
        held = node
        for key, page in zip(self._keys(tokens, 0), pages, strict=True):
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = PrefixNode(node, key, page, self._epoch)
                self.n_reclaimable += 1
            else:
                self._pool.give_back([page])
            node = child
        if node is not held:
            self.hold(node)
            self.release(held)
        return node

    def reclaim(self, n: int) -> None:
        """Gives n pages that nobody holds back to the pool; there must be that many."""
        assert n <= self.n_reclaimable, f"{n} pages are to be reclaimed and {self.n_reclaimable} can be"
        while n > 0:
            released, _, node = heapq.heappop(self._leaves)
            if node.held or node.children or node.parent is None or node.released != released:
                continue  # held again, or reclaimed, since it was pushed
            parent = node.parent
            self._remove(node)
            self.n_reclaimable -= 1
            if parent.parent is not None and not parent.held:
                self._add_leaf(parent)
            n -= 1

    def drop_unheld(self) -> None:
        """Gives all pages that nobody holds back to the pool."""
        self.reclaim(self.n_reclaimable)

    def start_epoch(self) -> None:
        """Forgets all prefixes, as when the weights that computed them are replaced.

        Held pages stay with their holders. They are found no more, and their release frees them.
        """
        self.drop_unheld()
        self._epoch += 1
        self._root = PrefixNode(None, (), -1, self._epoch)
        self._leaves.clear()

    def is_current(self, node: PrefixNode) -> bool:
        """Whether a prefix is of this epoch, so that it can grow and be found."""
        return node.epoch == self._epoch

    def _keys(self, tokens: Sequence[int], start: int) -> Iterator[tuple[int, ...]]:
        size = self._page_size
        for first in range(start, len(tokens) - size + 1, size):
            yield tuple(tokens[first : first + size])

    def _add_leaf(self, node: PrefixNode) -> None:
        if not node.children:
            heapq.heappush(self._leaves, (node.released, id(node), node))

    def _remove(self, node: PrefixNode) -> None:
        assert node.parent is not None
        del node.parent.children[node.key]
        node.parent = None
        self._pool.give_back([node.page])
