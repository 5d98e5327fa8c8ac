"""The Transcript: the token ids that the model saw and sampled, in a tree of nodes. Tokens in, tokens out.

A node is a delta: tokens of the harness, then tokens that the model sampled; either part may be empty. The path from
the root to a node is a context of the model. A self-summary starts a new branch below the prompt. Text is never
tokenised a second time: the trained tokens are exactly the sampled ones, with their log-probabilities and weight
versions.

Router replay needs the routes of every token, the experts that computed it. The engine records them as an array
[n,L,k]: the k experts of n tokens in each of L expert layers, best first. A sample comes with the routes of the tokens
of its context that have none yet (`routes_known`), and of its own tokens but the last, which the engine computes when a
later context has it. A token keeps the first routes that are recorded for it: those of the call that sampled what
follows it, even if the engine computes it again later with other weights. Branches share the routes of the tokens that
they share.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import numpy as np

from composer_jax.frames import Frame, FrameError

Kind = Literal["prompt", "assistant", "tool", "summary_request", "summary", "carry"]
KINDS: tuple[Kind, ...] = ("prompt", "assistant", "tool", "summary_request", "summary", "carry")


class TranscriptError(RuntimeError):
    """The sampler's context differs from the transcript's branch, or a node is malformed; always a bug."""


@dataclass(frozen=True, eq=False)
class Node:
    """A delta of n tokens, of which the last k were sampled (k = 0 for nodes of the harness alone).

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
        """Whether the node holds sampled tokens."""
        return len(self.logprobs) > 0

    @property
    def harness_tokens(self) -> np.ndarray:
        """int32[n - k]: the harness's tokens before the sampled ones, such as the generation prompt."""
        return self.tokens[: len(self.tokens) - len(self.logprobs)]

    @property
    def sampled_tokens(self) -> np.ndarray:
        """int32[k]: the tokens that the model sampled."""
        return self.tokens[len(self.tokens) - len(self.logprobs) :]


@dataclass(frozen=True, eq=False)
class TranscriptRow:
    """One branch as a training row; all arrays have its length n, and its last token is trained.

    tokens: int32. trained: bool, True where this row trains the token. logprobs: float32, 0 where not trained.
    versions: int32, -1 where not trained. route_parts: (place of the first token, [m,L,k]), the experts of m tokens in
    the L expert layers, of all tokens with routes, in their order; the arrays are those of the transcript, not copied.
    """

    tokens: np.ndarray
    trained: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    route_parts: Sequence[tuple[int, np.ndarray]] = ()

    @property
    def route_shape(self) -> tuple[int, int] | None:
        """(L, k) of the routes; None without."""
        return self.route_parts[0][1].shape[1:] if self.route_parts else None

    @property
    def routes(self) -> np.ndarray | None:
        """int16 [n,L,k]: the routes of all tokens, -1 for tokens without; a copy. None without any."""
        if self.route_shape is None:
            return None
        out = np.empty((len(self.tokens), *self.route_shape), np.int16)
        self.copy_routes(out, 0)
        return out

    def copy_routes(self, out: np.ndarray, start: int) -> None:
        """Writes the routes of tokens `start` to start + m into an array [m,L,k], -1 (its bits) for tokens without."""
        unknown = np.int16(-1).astype(out.dtype)
        done, stop = start, start + len(out)
        for first, routes in self.route_parts:
            begin, end = max(first, start), min(first + len(routes), stop)
            if begin < end:
                out[done - start : begin - start] = unknown
                out[begin - start : end - start] = routes[begin - first : end - first]
                done = end
        out[done - start :] = unknown

    def tokens_without_routes(self) -> np.ndarray:
        """int[m]: places of the tokens that router replay cannot do without and that have no routes.

        The last token is none of them: no output of this row depends on it.
        """
        is_missing = np.ones(len(self.tokens), bool)
        is_missing[-1:] = False
        for first, routes in self.route_parts:
            is_missing[first : first + len(routes)] = False
        return np.flatnonzero(is_missing)


@dataclass(frozen=True)
class TrainedSpan:
    """Where a row trains the sampled tokens of a node: tokens start to stop of the row with this number."""

    row: int
    start: int
    stop: int


class Transcript:
    """A growing tree. `tip` is the node that the next one continues; `branch` moves it."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._routes: list[np.ndarray | None] = []  # of each node: [m,L,k] for its first m tokens
        self.tip: int | None = None

    def append(
        self,
        kind: Kind,
        harness: Sequence[int] | np.ndarray = (),
        sampled: Sequence[int] | np.ndarray = (),
        logprobs: Sequence[float] | np.ndarray = (),
        versions: Sequence[int] | np.ndarray = (),
        trained: bool = True,
        routes: np.ndarray | None = None,
        routes_start: int = 0,
    ) -> Node:
        """Adds a node below the tip and makes it the tip.

        harness, sampled: token ids, in that order. logprobs, versions: one per sampled token.
        trained: False for sampled tokens that no row may train.
        routes: integer [n,L,k], the experts of the tokens from the root to the new node but the last (Sample.routing).
        routes_start: the token from the root on with which they begin, `routes_known` before the call or less.
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
        tokens = np.concatenate([np.asarray(harness, np.int32), np.asarray(sampled, np.int32)])
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
        self._routes.append(None)
        self.tip = node.id
        if routes is not None:
            self._record_routes(routes, routes_start)
        return node

    def untrain(self, node: Node) -> None:
        """Keeps the sampled tokens of a node out of all training rows."""
        self._check(node)
        self.nodes[node.id] = replace(node, trained=False)

    @property
    def routes_known(self) -> int:
        """Tokens from the root on that have routes, up to the first without: the routing_start of the next sample."""
        known = 0
        for node in self.path():
            routes = self._routes[node.id]
            n = 0 if routes is None else len(routes)
            known += n
            if n < len(node.tokens):
                break
        return known

    def _record_routes(self, routes: np.ndarray, first: int) -> None:
        """Gives routes to the tokens from `first` to the tip but the last; those that have some keep them."""
        if routes.ndim != 3 or first + len(routes) != self.length - 1:
            raise TranscriptError(
                f"routes {list(routes.shape)} from token {first} on are not [n,L,k] for the {self.length - 1} tokens "
                "before the last"
            )
        if first > (known := self.routes_known):
            raise TranscriptError(f"routes begin with token {first}, and those before it are known up to {known}")
        recorded = self._routes[0]
        if recorded is not None and recorded.shape[1:] != routes.shape[1:]:
            raise TranscriptError(
                f"routes {list(routes.shape)} have another shape than the {list(recorded.shape)} of earlier tokens"
            )
        start = 0
        for node in self.path():
            old, end = self._routes[node.id], start + len(node.tokens)
            known = 0 if old is None else len(old)
            new = routes[max(0, start + known - first) : max(0, end - first)]
            if len(new):
                self._routes[node.id] = _compact_routes(new if old is None else np.concatenate([old, new]))
            start = end

    def branch(self, node: Node) -> None:
        """Makes `node` the tip, so that the next node starts a new branch and the sampler a new context."""
        self._check(node)
        self.tip = node.id

    def _check(self, node: Node) -> None:
        if not 0 <= node.id < len(self.nodes) or self.nodes[node.id] is not node:
            raise TranscriptError(f"node {node.id} is not in this transcript")

    def path(self, node_id: int | None = None) -> list[Node]:
        """The nodes from the root to `node_id` (default: the tip), both included; [] for an empty transcript."""
        current = self.tip if node_id is None else node_id
        nodes = []
        while current is not None:
            nodes.append(self.nodes[current])
            current = self.nodes[current].parent
        return nodes[::-1]

    @property
    def length(self) -> int:
        """The number of tokens from the root to the tip."""
        return sum(len(node.tokens) for node in self.path())

    @property
    def tokens(self) -> list[int]:
        """The ids from the root to the tip: the context of the next sample."""
        return [token for node in self.path() for token in node.tokens.tolist()]

    def branches(self) -> list[list[Node]]:
        """Every root-to-leaf path in the order of the leaves: the segments of an episode."""
        parents = {node.parent for node in self.nodes}
        return [self.path(node.id) for node in self.nodes if node.id not in parents]

    def rows(self) -> list[TranscriptRow]:
        """One row per branch that trains a token, up to its last trained token.

        A sampled node that several branches share is trained in the first of them. A row is at most as long as the
        sampler's context, because an observation at the end of a branch is cut.
        """
        rows: list[TranscriptRow] = []
        spans = self.trained_spans()
        for path in self.branches():
            own = [spans[node.id] for node in path if node.id in spans and spans[node.id].row == len(rows)]
            if not own:
                continue
            end = own[-1].stop
            trained = np.zeros(end, bool)
            for span in own:
                trained[span.start : span.stop] = True
            logprobs, versions = _expand_to_tokens(path)
            rows.append(
                TranscriptRow(
                    tokens=np.concatenate([node.tokens for node in path])[:end],
                    trained=trained,
                    logprobs=np.where(trained, logprobs[:end], np.float32(0)),
                    versions=np.where(trained, versions[:end], np.int32(-1)),
                    route_parts=self._path_routes(path, end),
                )
            )
        return rows

    def trained_spans(self) -> dict[int, TrainedSpan]:
        """Node id -> where `rows` trains the node's sampled tokens; nodes that no row trains are missing."""
        spans: dict[int, TrainedSpan] = {}
        row = 0
        for path in self.branches():
            new: dict[int, TrainedSpan] = {}
            end = 0
            for node in path:
                start, end = end + len(node.harness_tokens), end + len(node.tokens)
                if node.trained and node.sampled and node.id not in spans:
                    new[node.id] = TrainedSpan(row, start, end)
            spans |= new
            row += bool(new)
        return spans

    def _path_routes(self, path: Sequence[Node], end: int) -> list[tuple[int, np.ndarray]]:
        """The routes of the first `end` tokens of a path: TranscriptRow.route_parts."""
        parts, start = [], 0
        for node in path:
            routes = self._routes[node.id]
            if routes is not None and start < end and len(routes):
                parts.append((start, routes[: end - start]))
            start += len(node.tokens)
        return parts

    def nodes_of_kind(self, kind: Kind) -> list[Node]:
        """The nodes of a kind, oldest first."""
        return [node for node in self.nodes if node.kind == kind]

    @property
    def total_tokens(self) -> int:
        """The number of tokens of all nodes."""
        return sum(len(node.tokens) for node in self.nodes)

    @property
    def total_sampled(self) -> int:
        """The number of sampled tokens of all nodes."""
        return sum(len(node.logprobs) for node in self.nodes)

    def to_frame(self) -> Frame:
        """Returns header and arrays from which `from_frame` makes an equal transcript, bit for bit.

        The arrays are the tokens int32, log-probabilities float32 and versions int32 of all nodes, one after another,
        and the routes of each node that has some, as they are held.
        """
        nodes = [
            [node.parent, node.kind, len(node.tokens), len(node.logprobs), node.trained, routes is not None]
            for node, routes in zip(self.nodes, self._routes, strict=True)
        ]
        joined = [
            np.concatenate([np.zeros(0, dtype), *parts])
            for dtype, parts in (
                (np.int32, [node.tokens for node in self.nodes]),
                (np.float32, [node.logprobs for node in self.nodes]),
                (np.int32, [node.versions for node in self.nodes]),
            )
        ]
        return {"nodes": nodes, "tip": self.tip}, [*joined, *(routes for routes in self._routes if routes is not None)]

    @classmethod
    def from_frame(cls, header: Mapping[str, Any], arrays: Sequence[np.ndarray]) -> Self:
        """Makes the transcript of `to_frame`; its arrays are views of these.

        Raises FrameError if the header is another one or the arrays are not those of its nodes, and TranscriptError
        when the nodes are not a tree in which parents come before their children.
        """
        try:
            nodes, (tokens, logprobs, versions, *routes) = header["nodes"], arrays
            lengths = [sum(node[2] for node in nodes), *2 * [sum(node[3] for node in nodes)]]
            dtypes = [array.dtype for array in (tokens, logprobs, versions)]
            if dtypes != [np.int32, np.float32, np.int32] or lengths != [len(tokens), len(logprobs), len(versions)]:
                raise FrameError(
                    f"{len(tokens)} tokens, {len(logprobs)} logprobs and {len(versions)} versions, {dtypes}"
                )
            transcript, of_nodes, start, first = cls(), iter(routes), 0, 0
            for number, (parent, kind, n, k, trained, has_routes) in enumerate(nodes):
                if (parent is None) != (number == 0) or (parent is not None and not 0 <= parent < number):
                    raise TranscriptError(f"node {number} has parent {parent}; a parent comes before its children")
                transcript.tip, sampled = parent, slice(first, first + k)
                harness, end = tokens[start : start + n - k], start + n
                transcript.append(
                    kind, harness, tokens[end - k : end], logprobs[sampled], versions[sampled], trained=trained
                )
                if has_routes:
                    transcript._routes[number] = _checked_routes(next(of_nodes), n)
                start, first = end, first + k
            transcript.tip = header["tip"]
        except (KeyError, TypeError, ValueError, StopIteration) as error:
            raise FrameError(f"a transcript that cannot be read ({error!r})") from error
        return transcript

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Transcript):
            return False
        (header, arrays), (other_header, other_arrays) = self.to_frame(), other.to_frame()
        return (
            header == other_header
            and [array.dtype for array in arrays] == [array.dtype for array in other_arrays]
            and all(map(np.array_equal, arrays, other_arrays))
        )

    __hash__ = None  # type: ignore[assignment]  # a transcript is mutable


def _expand_to_tokens(path: Iterable[Node]) -> tuple[np.ndarray, np.ndarray]:
    """float32[n] logprobs and int32[n] versions of a path, with 0 and -1 for tokens of the harness."""
    logprobs, versions = [], []
    for node in path:
        count = len(node.harness_tokens)
        logprobs += [np.zeros(count, np.float32), node.logprobs]
        versions += [np.full(count, -1, np.int32), node.versions]
    return np.concatenate(logprobs), np.concatenate(versions)


def _compact_routes(ids: np.ndarray) -> np.ndarray:
    """Returns a copy of expert ids in uint8 where all of them fit, else in uint16."""
    return ids.astype(np.uint8 if ids.max(initial=0) < 256 else np.uint16)


def _checked_routes(routes: np.ndarray, n: int) -> np.ndarray:
    """Returns the routes of a node of n tokens. Raises FrameError for an array that cannot be."""
    if routes.ndim != 3 or len(routes) > n or routes.dtype not in (np.uint8, np.uint16):
        raise FrameError(f"routes {routes.dtype}{list(routes.shape)} for a node of {n} tokens")
    return routes
