"""PrefixIndex: which shards have the pages of a context, and which running requests are about to compute one.

Every shard has a prefix tree of its own. This trie is over all of them, so one walk over a context, which takes time by
the context's pages, says what every shard has of it.
"""

from array import array
from collections.abc import Hashable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Generic, TypeVar

Request = TypeVar("Request", bound=Hashable)
Key = TypeVar("Key", bound=Hashable)
Item = TypeVar("Item")

NOTHING: Mapping[Any, Any] = MappingProxyType({})
"""Stands for the dicts of a node that are empty. There is a node for every page of every cached context: what each of
them holds is what Python's garbage collector goes through."""


def n_skipped_pages(computed: int, page_size: int, window: int | None) -> int:
    """Returns how many leading pages of a context no later token attends to.

    Args:
      computed: tokens of the context whose entries are in the cache; the next token has this position.
      window: tokens that a token attends to, itself included, in every layer; None: all tokens before, in some layer.
    """
    return 0 if window is None else max(0, computed - window + 1) // page_size


def page_keys(tokens: "array[int]", page_size: int) -> Iterator[bytes]:
    """Yields the tokens of each full page of a context, as bytes."""
    content, size = tokens.tobytes(), page_size * tokens.itemsize
    for first in range(0, len(content) - size + 1, size):
        yield content[first : first + size]


class IndexNode(Generic[Request]):
    """One page of a prefix, on any shard."""

    __slots__ = ("children", "computing", "key", "parent", "shards")

    def __init__(self, parent: "IndexNode[Request] | None", key: bytes) -> None:
        self.parent, self.key = parent, key
        self.children: Mapping[bytes, IndexNode[Request]] = NOTHING
        self.shards = 0
        """A bit for each shard whose tree has the page."""
        self.computing: Mapping[Request, None] = NOTHING
        """Running requests whose prefill has the page ahead, in the order of their admission."""

    def path(self) -> list["IndexNode[Request]"]:
        """Returns the nodes from the first page to this one."""
        nodes, node = [], self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def child(self, key: bytes) -> "IndexNode[Request]":
        """Returns the node of a page after this one, made if there is none."""
        node = self.children.get(key)
        if node is None:
            node = IndexNode(self, key)
            self.children = with_item(self.children, key, node)
        return node

    def add(self, shard: int) -> None:
        """Notes that a shard has the page."""
        self.shards |= 1 << shard

    def discard(self, shard: int) -> None:
        """Notes that a shard has the page no more."""
        self.shards &= ~(1 << shard)
        self.prune()

    def begin(self, request: Request) -> None:
        """Notes that the prefill of a request has the page ahead."""
        self.computing = with_item(self.computing, request, None)

    def end(self, request: Request) -> None:
        """Notes that it has the page ahead no more."""
        self.computing = without_item(self.computing, request)
        self.prune()

    def prune(self) -> None:
        """Removes the node, and those before it, where they lead to nothing."""
        node = self
        while node.parent is not None and not (node.shards or node.computing or node.children):
            parent = node.parent
            parent.children = without_item(parent.children, node.key)
            node.parent = None
            node = parent


def with_item(items: Mapping[Key, Item], key: Key, item: Item) -> Mapping[Key, Item]:
    """Returns the mapping with one more item: NOTHING, or a dict that grows in place."""
    if not isinstance(items, dict):
        return {key: item}
    items[key] = item
    return items


def without_item(items: Mapping[Key, Item], key: Key) -> Mapping[Key, Item]:
    """Returns what `with_item` has made without one item, which it has."""
    assert isinstance(items, dict), "there are no items"
    del items[key]
    return items or NOTHING


class PrefixIndex(Generic[Request]):
    """The pages of all shards by the tokens in them and before them, and those that running requests will add."""

    def __init__(self, page_size: int, window: int | None = None) -> None:
        """window: tokens that a token attends to, itself included, where that holds in every layer."""
        self.page_size, self.window = page_size, window
        self.root: IndexNode[Request] = IndexNode(None, b"")
        """The empty prefix."""
        self._computing: dict[Request, list[IndexNode[Request]]] = {}

    def start_epoch(self) -> None:
        """Forgets all prefixes; the trees do the same next."""
        self.root = IndexNode(None, b"")
        self._computing.clear()

    def path(self, tokens: "array[int]", known: IndexNode[Request] | None = None) -> list[IndexNode[Request]]:
        """Returns the nodes of a context's full pages, up to the first page that nobody has or computes.

        known: of a prefix of the context, which somebody has; the time is then that of the pages after it.
        """
        node = self.root if known is None else known
        nodes = node.path()
        for key in page_keys(tokens[len(nodes) * self.page_size :], self.page_size):
            child = node.children.get(key)
            if child is None:
                break
            node = child
            nodes.append(node)
        return nodes

    def n_pages(self, path: Iterable[IndexNode[Request]]) -> dict[int, int]:
        """Returns, for each shard that has any, the pages of PrefixTree.match of the context of a path."""
        pages: dict[int, int] = {}
        first: dict[int, int] = {}  # page before which the pages that follow without a gap begin
        before = depth = 0

        def end_runs(shards: int) -> None:
            n_skipped = n_skipped_pages(depth * self.page_size, self.page_size, self.window)
            pages.update((shard, depth) for shard in _bits(shards) if first[shard] <= n_skipped)

        for node in path:
            if node.shards != before:
                end_runs(before & ~node.shards)
                first.update((shard, depth) for shard in _bits(node.shards & ~before))
                before = node.shards
            depth += 1
        end_runs(before)
        return pages

    def add_computing(self, request: Request, node: IndexNode[Request], tokens: "array[int]") -> None:
        """Notes that a running request computes full pages of `tokens` after the prefix of a node of this epoch."""
        nodes = []
        for key in page_keys(tokens, self.page_size):
            node = node.child(key)
            node.begin(request)
            nodes.append(node)
        self._computing[request] = nodes

    def remove_computing(self, request: Request) -> None:
        """Notes that a request has computed its context, or runs no more."""
        for node in reversed(self._computing.pop(request, ())):
            node.end(request)


def _bits(shards: int) -> Iterator[int]:
    """Yields the shards of IndexNode.shards."""
    while shards:
        yield (shards & -shards).bit_length() - 1
        shards &= shards - 1
