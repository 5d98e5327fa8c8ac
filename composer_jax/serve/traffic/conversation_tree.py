"""ConversationTree: which earlier turn of a session a prompt goes on from, by hashes of its beginnings.

A node is the end of a turn: the number of ids in its prompt and answer, and their hash. A prompt of n ids, in a session
whose nodes have d different lengths up to n, is hashed once from its beginning, with one digest at each of these
lengths: n ids and d digests, however many turns there are. The answer's a ids are hashed on from there.
"""

import dataclasses
import hashlib
from collections.abc import Iterable, Sequence

import numpy as np

DIGEST_BYTES = 16


@dataclasses.dataclass(frozen=True)
class TreeNode:
    """The end of a turn."""

    id: str = ""
    """The turn's id; empty for the root."""
    tokens: int = 0
    """Ids of its prompt and answer."""
    hash: bytes = b""
    has_secret: bool = False
    """Whether these ids hold a secret."""


class ConversationTree:
    """The nodes of one session."""

    def __init__(self, nodes: Iterable[TreeNode] = ()) -> None:
        self._by_length: dict[int, dict[bytes, TreeNode]] = {}
        self.size = 0
        for node in nodes:
            self.add(node)

    def add(self, node: TreeNode) -> None:
        """Adds the end of a turn. Where two turns end with the same ids, later prompts get the newer one as parent."""
        self._by_length.setdefault(node.tokens, {})[node.hash] = node
        self.size += 1

    def find_parent(self, prompt: Sequence[int], answer: Sequence[int]) -> tuple[TreeNode, bytes]:
        """Returns the longest node that begins the prompt, and the hash of prompt and answer.

        The root is returned where no earlier turn begins it.
        """
        ids, state, start, parent = as_bytes(prompt), hashlib.blake2b(digest_size=DIGEST_BYTES), 0, TreeNode()
        for length in sorted(length for length in self._by_length if length <= len(prompt)):
            state.update(ids[4 * start : 4 * length])
            start = length
            parent = self._by_length[length].get(state.digest(), parent)
        state.update(ids[4 * start :])
        state.update(as_bytes(answer))
        return parent, state.digest()


def as_bytes(ids: Sequence[int]) -> memoryview:
    """Returns the bytes of token ids: 4 of each."""
    return memoryview(np.asarray(ids, np.int32).tobytes())
