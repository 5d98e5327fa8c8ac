"""The Transcript: what the model saw and said, as token ids, in a tree of nodes. Tokens in, tokens out.

A node is a delta: some tokens the harness gave, then some tokens the model sampled (either part may be
empty). The path from the root to a node is a context the model has seen. A self-summary starts a new branch
below the prompt. Text is never tokenised a second time: what is trained is exactly what was sampled, with the
log-probabilities and the weight versions of the moment.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

Kind = Literal["prompt", "assistant", "tool", "summary_request", "summary", "carry"]
KINDS: tuple[Kind, ...] = ("prompt", "assistant", "tool", "summary_request", "summary", "carry")


class TranscriptError(RuntimeError):
    """The sampler's context is not the branch that the transcript holds, or a node is malformed: a bug, not a
    fork."""


@dataclass(frozen=True, eq=False)
class Node:
    """A delta of n tokens, of which the last k were sampled (k = 0 for what the harness says).

    tokens: int32[n]. logprobs: float32[k], under the policy that sampled, at its temperature. versions:
    int32[k], the weight version that produced each token. trained: whether the sampled tokens are targets.
    """

    id: int
    parent: int | None
    kind: Kind
    tokens: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    trained: bool = True

    @property
    def sampled(self) -> bool:
        """Whether the model said it."""
        return len(self.logprobs) > 0

    @property
    def given_tokens(self) -> np.ndarray:
        """int32[n - k]: what the harness put before the sampled part (the role id of an assistant
        message)."""
        return self.tokens[: len(self.tokens) - len(self.logprobs)]

    @property
    def sampled_tokens(self) -> np.ndarray:
        """int32[k]."""
        return self.tokens[len(self.tokens) - len(self.logprobs) :]


@dataclass(frozen=True, eq=False)
class Row:
    """One branch as a training row; all arrays have its length n, and its last token is trained.

    tokens: int32. trained: bool, True where this row trains the token. logprobs: float32, 0 where not trained.
    versions: int32, -1 where not trained.
    """

    tokens: np.ndarray
    trained: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray


class Transcript:
    """A growing tree. `tip` is the node that the next one continues; `branch` moves it."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.tip: int | None = None

    def append(
        self,
        kind: Kind,
        given: Sequence[int] | np.ndarray = (),
        sampled: Sequence[int] | np.ndarray = (),
        logprobs: Sequence[float] | np.ndarray = (),
        versions: Sequence[int] | np.ndarray = (),
        context: int | None = None,
        trained: bool = True,
    ) -> Node:
        """Adds a node below the tip and makes it the tip.

        given, sampled: token ids, in that order. logprobs, versions: one per sampled token.
        trained: False for sampled tokens that no row may train.
        context: the number of tokens in the sampler's context after this node, where a sampler took part.
        Raises TranscriptError when it is not the length of the branch: an undeclared break of the prefix.
        """
        if kind not in KINDS:
            raise TranscriptError(f"{kind!r} is not a kind of node; use one of {', '.join(KINDS)}")
        if not len(sampled) == len(logprobs) == len(versions):
            raise TranscriptError(
                f"{len(sampled)} sampled tokens come with {len(logprobs)} logprobs and "
                f"{len(versions)} versions; give one of each per token"
            )
        if self.tip is None and self.nodes:
            raise TranscriptError("a transcript has one root; branch from a node before appending")
        tokens = np.concatenate([np.asarray(given, np.int32), np.asarray(sampled, np.int32)])
        length = self.length + len(tokens)
        if context is not None and context != length:
            raise TranscriptError(
                f"the sampler's context holds {context} tokens and the branch {length}; declare a break with branch()"
            )
        node = Node(
            id=len(self.nodes),
            parent=self.tip,
            kind=kind,
            tokens=tokens,
            logprobs=np.asarray(logprobs, np.float32),
            versions=np.asarray(versions, np.int32),
            trained=trained,
        )
        self.nodes.append(node)
        self.tip = node.id
        return node

    def branch(self, node: Node) -> None:
        """Declares that the next node continues `node`, not the tip: the sampler's context starts anew."""
        if not 0 <= node.id < len(self.nodes) or self.nodes[node.id] is not node:
            raise TranscriptError(f"node {node.id} is not in this transcript")
        self.tip = node.id

    def path(self, node_id: int | None = None) -> list[Node]:
        """The nodes from the root to `node_id` (default: the tip), both included; [] for an empty
        transcript."""
        at = self.tip if node_id is None else node_id
        nodes = []
        while at is not None:
            nodes.append(self.nodes[at])
            at = self.nodes[at].parent
        return nodes[::-1]

    @property
    def length(self) -> int:
        """Tokens from the root to the tip."""
        return sum(len(node.tokens) for node in self.path())

    def tail(self, start: int) -> list[int]:
        """The ids from the root to the tip, from position `start` on: what a context of `start` tokens
        lacks."""
        ids: list[int] = []
        for node in self.path():
            ids.extend(node.tokens.tolist())
        return ids[start:]

    def branches(self) -> list[list[Node]]:
        """Every root-to-leaf path, in the order in which the leaves were made: the segments of an episode."""
        parents = {node.parent for node in self.nodes}
        return [self.path(node.id) for node in self.nodes if node.id not in parents]

    def rows(self) -> list[Row]:
        """One row per branch that trains something, up to the last token that it trains.

        A sampled node that branches share is trained in the first of them. No row is longer than the context
        that the sampler held: an observation that nothing was said after is no part of one.
        """
        rows = []
        done: set[int] = set()
        for path in self.branches():
            masks = []
            for node in path:
                mask = np.zeros(len(node.tokens), bool)
                if node.trained and node.id not in done:
                    mask[len(node.given_tokens) :] = True
                    done.add(node.id)
                masks.append(mask)
            trained = np.concatenate(masks)
            if trained.any():
                logprobs, versions = _spread(path)
                end = int(np.flatnonzero(trained)[-1]) + 1
                rows.append(
                    Row(
                        tokens=np.concatenate([node.tokens for node in path])[:end],
                        trained=trained[:end],
                        logprobs=np.where(trained, logprobs, np.float32(0))[:end],
                        versions=np.where(trained, versions, np.int32(-1))[:end],
                    )
                )
        return rows

    def of_kind(self, kind: Kind) -> list[Node]:
        """The nodes of a kind in the order in which they were made."""
        return [node for node in self.nodes if node.kind == kind]

    @property
    def total_tokens(self) -> int:
        """All tokens of all nodes, each node once."""
        return sum(len(node.tokens) for node in self.nodes)

    @property
    def total_sampled(self) -> int:
        """All tokens that the model said."""
        return sum(len(node.logprobs) for node in self.nodes)

    def to_json(self) -> dict[str, Any]:
        """A JSON-able dict from which `from_json` makes an equal transcript, bit by bit."""
        nodes = [
            {
                "parent": node.parent,
                "kind": node.kind,
                "tokens": node.tokens.tolist(),
                # float32 -> Python float -> shortest decimal -> float32 is exact.
                "logprobs": node.logprobs.tolist(),
                "versions": node.versions.tolist(),
                "trained": node.trained,
            }
            for node in self.nodes
        ]
        return {"nodes": nodes, "tip": self.tip}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Transcript:
        """Raises TranscriptError when `data` is not a tree in which parents come before their children."""
        transcript = cls()
        for number, item in enumerate(data["nodes"]):
            parent = item["parent"]
            if (parent is None) != (number == 0) or (parent is not None and not 0 <= parent < number):
                raise TranscriptError(f"node {number} has parent {parent}; a parent comes before its children")
            transcript.tip = parent
            k = len(item["logprobs"])
            given = item["tokens"][: len(item["tokens"]) - k]
            sampled = item["tokens"][len(given) :]
            transcript.append(item["kind"], given, sampled, item["logprobs"], item["versions"], trained=item["trained"])
        transcript.tip = data["tip"]
        return transcript

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Transcript) and self.to_json() == other.to_json()

    __hash__ = None  # type: ignore[assignment]  # it grows


def _spread(path: Iterable[Node]) -> tuple[np.ndarray, np.ndarray]:
    """float32[n] logprobs and int32[n] versions of a path, 0 and -1 in place of the given tokens."""
    logprobs, versions = [], []
    for node in path:
        given = len(node.given_tokens)
        logprobs += [np.zeros(given, np.float32), node.logprobs]
        versions += [np.full(given, -1, np.int32), node.versions]
    return np.concatenate(logprobs), np.concatenate(versions)
