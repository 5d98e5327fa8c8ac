"""PrefixTree: the pages of earlier contexts by the tokens in them, so that a common prefix is computed once.

A node is one full page. The path from the root to a node spells a prefix of contexts, so a page is found only by the
tokens of the page and of all pages before it. Holders (running requests and leases) keep the pages of a path; the other
pages are reused for new contexts when the pool is empty, the least recently held first.

Where every layer has a sliding window, a holder needs only the last pages of its path (n_skipped_pages). It releases
the others, which may then be reused while pages after them are held. Their nodes stay as the way to those pages: a
prefix is found as long as the pages are there that the tokens after it attend to.

PagePool says which pages are free. Integers only, no JAX.
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from composer_jax.sampler.prefix_index import (
    NOTHING,
    IndexNode,
    PrefixIndex,
    n_skipped_pages,
    page_keys,
    with_item,
    without_item,
)


class PagePool:
    """The free pages of one device's cache. Whoever takes a page owns it until giving it back."""

    def __init__(self, n_pages: int) -> None:
        self.n_pages = n_pages
        """All pages, free or taken."""
        self._free = list(range(n_pages - 1, -1, -1))  # the lowest number is taken first
        self._is_free = [True] * n_pages

    @property
    def n_free(self) -> int:
        return len(self._free)

    def take(self, n: int) -> list[int]:
        """Returns n free pages, which the caller now owns; there must be that many."""
        assert 0 <= n <= len(self._free), f"{n} pages are needed and {len(self._free)} are free"
        pages = [self._free.pop() for _ in range(n)]
        for page in pages:
            self._is_free[page] = False
        return pages

    def give_back(self, pages: Iterable[int]) -> None:
        """Frees pages of their only owner."""
        for page in pages:
            assert not self._is_free[page], f"page {page} is free already"
            self._is_free[page] = True
            self._free.append(page)


class PrefixNode:
    """One page of a prefix; the root has none."""

    __slots__ = ("children", "depth", "entry", "epoch", "held", "key", "page", "parent")

    def __init__(
        self, parent: "PrefixNode | None", key: bytes, page: int | None, epoch: int, entry: IndexNode[Any]
    ) -> None:
        """entry: of this prefix in the index over all shards."""
        self.parent, self.key, self.epoch, self.entry = parent, key, epoch, entry
        self.page = page
        """None where it was reused; never of a node that is held."""
        self.depth: int = 0 if parent is None else parent.depth + 1
        """Pages of the prefix, this one included."""
        self.children: Mapping[bytes, PrefixNode] = NOTHING
        self.held = 0
        """Holders of this page."""

    def path(self) -> "list[PrefixNode]":
        """The nodes from the first page to this one."""
        nodes, node = [], self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def last(self, n: int) -> "list[PrefixNode]":
        """The last n nodes of the path, in its order."""
        nodes, node = [], self
        for _ in range(n):
            assert node.parent is not None, "the path is shorter"
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


class PrefixTree:
    """The pages of one device's pool that hold prefixes of contexts. It owns those pages."""

    def __init__(self, pool: PagePool, index: PrefixIndex[Any], shard: int) -> None:
        """index: of all shards, which learns what this one has."""
        self._pool, self._index, self._shard = pool, index, shard
        self._page_size, self._window = index.page_size, index.window
        self._epoch = 0
        self.root = PrefixNode(None, b"", None, self._epoch, index.root)
        """The empty prefix."""
        self._unheld: dict[PrefixNode, None] = {}
        """Nodes of this epoch whose pages nobody holds, in the order of their release. A path is released from its end,
        so without a window the leaves of a branch come before the pages that they follow."""

    @property
    def n_reclaimable(self) -> int:
        """Pages that nobody holds."""
        return len(self._unheld)

    def match(self, tokens: "array[int]") -> PrefixNode:
        """Returns the longest prefix of `tokens`, in full pages, whose pages in the window are here."""
        node = longest = self.root
        present = 0  # pages that are here without a gap before the end of `node`
        for depth, key in enumerate(page_keys(tokens, self._page_size), 1):
            child = node.children.get(key)
            if child is None:
                break
            node = child
            present = present + 1 if node.page is not None else 0
            if present >= depth - n_skipped_pages(depth * self._page_size, self._page_size, self._window):
                longest = node
        return longest

    def hold(self, node: PrefixNode, n_skipped: int = 0) -> None:
        """Holds the pages of a prefix, except the first `n_skipped`, until `release`."""
        for kept in node.path()[n_skipped:]:
            self._hold_page(kept)

    def release(self, node: PrefixNode, n_skipped: int = 0, end: int | None = None) -> None:
        """Ends a hold of the pages from `n_skipped` to before `end` (None: all) of a prefix.

        The pages stay until they are reclaimed; those of an earlier epoch go at once.
        """
        for released in node.path()[n_skipped:end][::-1]:
            released.held -= 1
            assert released.held >= 0, "a page was released more often than held"
            if released.held:
                continue
            if released.epoch == self._epoch:
                self._unheld[released] = None
            else:
                self._free(released)

    def insert(self, node: PrefixNode, tokens: "array[int]", pages: Sequence[int]) -> PrefixNode:
        """Adds full pages below a prefix of the current epoch; returns the longer prefix.

        Args:
          node: a prefix that the caller holds; the hold extends to the returned prefix.
          tokens: the tokens in `pages`, a whole number of pages.
          pages: pages of the caller, which now belong to the tree. Where the tree has a page of the same prefix, the
            caller's is given back.
        """
        assert node.epoch == self._epoch, "a prefix of an earlier epoch cannot grow"
        for key, page in zip(page_keys(tokens, self._page_size), pages, strict=True):
            child = node.children.get(key)
            if child is None:
                child = PrefixNode(node, key, page, self._epoch, node.entry.child(key))
                node.children = with_item(node.children, key, child)
                child.entry.add(self._shard)
            elif child.page is None:
                child.page = page
                child.entry.add(self._shard)
            else:
                self._pool.give_back([page])
            self._hold_page(child)
            node = child
        return node

    def reclaim(self, n: int) -> None:
        """Gives n pages that nobody holds back to the pool; there must be that many."""
        assert n <= self.n_reclaimable, f"{n} pages are to be reclaimed and {self.n_reclaimable} can be"
        for _ in range(n):
            node = next(iter(self._unheld))
            del self._unheld[node]
            self._free(node)

    def start_epoch(self) -> None:
        """Forgets all prefixes, as when the weights that computed them are replaced; after PrefixIndex.start_epoch.

        Held pages stay with their holders. They are found no more, and their release frees them.
        """
        self.reclaim(self.n_reclaimable)
        self._epoch += 1
        self.root = PrefixNode(None, b"", None, self._epoch, self._index.root)

    def is_current(self, node: PrefixNode) -> bool:
        """Whether a prefix is of this epoch, so that it can grow and be found."""
        return node.epoch == self._epoch

    def _hold_page(self, node: PrefixNode) -> None:
        assert node.page is not None, "a page was held after it was reused"
        node.held += 1
        self._unheld.pop(node, None)

    def _free(self, node: PrefixNode) -> None:
        """Gives a page back, and removes the nodes that no longer lead to a page."""
        assert node.page is not None
        self._pool.give_back([node.page])
        node.page = None
        node.entry.discard(self._shard)
        while node.page is None and not node.children and node.parent is not None:
            parent = node.parent
            parent.children = without_item(parent.children, node.key)
            node.parent = None
            node = parent
