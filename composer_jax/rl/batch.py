"""Groups of episodes -> rows -> batches of one fixed shape for the Learner."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from composer_jax.agent.episode import Episode
from composer_jax.agent.transcript import TranscriptError, TranscriptRow
from composer_jax.data.host_batch import Block, HostField
from composer_jax.data.packing import Packing, plan_packing
from composer_jax.errors import UserError
from composer_jax.models.route_dtypes import no_route, replay_dtype


@dataclasses.dataclass(frozen=True)
class Group:
    """The graded episodes of one task and their training rewards."""

    episodes: Sequence[Episode]
    rewards: Sequence[float]

    @property
    def is_given(self) -> bool:
        """Whether the advantages of all its episodes are given, which then need no baseline of the group."""
        return has_given_advantages(self.episodes)


def has_given_advantages(episodes: Sequence[Episode]) -> bool:
    """Returns whether all of some episodes, at least one, come with advantages of their own (Episode.advantages)."""
    return bool(episodes) and all(episode.advantages is not None for episode in episodes)


def has_enough_graded(group: Group, size: int) -> bool:
    """Returns whether a group is trained of whose `size` episodes only those in `group` were graded.

    A group of which half or more is lost is left out, because the baseline of a few is noise (GLM-5, arXiv 2602.15763).
    Of another one the graded episodes are trained with their own mean as the baseline; the constant normaliser counts
    the lost ones, so that they are terms of zero. A group of given advantages is complete with one episode.
    """
    return group.is_given or 2 * len(group.episodes) > size


@dataclasses.dataclass(frozen=True, eq=False)
class HintedSpan:
    """Sampled tokens of a row, and the context with a hint in which a teacher predicts them (rl/feedback.py)."""

    start: int
    stop: int
    """The tokens start to stop of the row."""
    tokens: np.ndarray
    """int32 [stop - start]: these tokens."""
    context: np.ndarray
    """int32 [m], m >= 1: what the teacher reads before them."""
    detectors: tuple[str, ...]
    """Those whose hints are in the context."""


@dataclasses.dataclass(frozen=True, eq=False)
class WeightedRow:
    """One training row and what each of its n tokens is trained with, float32 [n] each, 0 where it is not trained.

    The streams of the loss are train/losses.py's: the policy gradient has weights and advantages, cross-entropy
    and the KL to the reference have weights.
    """

    row: TranscriptRow
    advantages: np.ndarray
    weights: np.ndarray
    """Of the policy gradient."""
    ce_weights: np.ndarray
    kl_weights: np.ndarray
    """Factors on the coefficient of the KL to the reference."""
    episode: int = 0
    """Number of the episode in its step. The rows of an episode follow each other, in the order of its segments. -1 for
    a row of no episode (rl/replay.py)."""
    hints: tuple[HintedSpan, ...] = ()
    """Spans that are also trained towards a teacher with a hint."""

    @classmethod
    def of(cls, row: TranscriptRow, advantage, *, weight=1.0, ce_weight=0.0, kl_weight=1.0) -> "WeightedRow":
        """Returns the row with these numbers, or arrays [n], on its trained tokens."""
        advantages, weights, ce_weights, kl_weights = (
            np.where(row.trained, value, 0).astype(np.float32) for value in (advantage, weight, ce_weight, kl_weight)
        )
        return cls(row, advantages, weights, ce_weights, kl_weights)

    def without_signal(self) -> "WeightedRow":
        """Returns the row with nothing to train but its hints."""
        zeros = np.zeros(len(self.row.tokens), np.float32)
        return dataclasses.replace(self, advantages=zeros, weights=zeros, ce_weights=zeros, kl_weights=zeros)

    @property
    def has_signal(self) -> bool:
        """Whether the policy gradient or cross-entropy has a term; the KL alone does not make a row worth its cost."""
        return bool((self.weights * self.advantages).any() or self.ce_weights.any())


class TokenSpan(NamedTuple):
    """Where a row lies: tokens start to stop of one row of one batch."""

    batch: int
    row: int
    start: int
    stop: int


class PackedRoutes:
    """The routes of a batch, uint8 or int16 [B,S,L,k] (replay_dtype), NO_ROUTE for padding and tokens without.

    They are 30 times as large as all other fields together, so nothing makes them as a whole: a reader copies its block
    from the routes of the transcripts.
    """

    def __init__(
        self, rows: Sequence[Sequence[tuple[int, TranscriptRow]]], shape: tuple[int, int, int, int], dtype: np.dtype
    ) -> None:
        """rows: of each row of the batch, its documents and where they start."""
        self._rows, self.shape, self.dtype = rows, shape, dtype

    def read(self, block: Block, order: np.ndarray | None = None) -> np.ndarray:
        """Returns rows and positions as BlockSource.read."""
        rows, columns = block
        positions = np.arange(columns.start, columns.stop) if order is None else order[columns]
        # Where a chunk of positions that follow each other begins, and the end.
        cuts = [0, *(1 + np.flatnonzero(np.diff(positions) != 1)), len(positions)]
        out = np.empty((rows.stop - rows.start, len(positions), *self.shape[2:]), self.dtype)
        for out_row, documents in zip(out, self._rows[rows], strict=True):
            for first, last in itertools.pairwise(cuts):
                _copy_documents(out_row[first:last], int(positions[first]), documents)
        return out

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        n_rows, length = self.shape[:2]
        return self.read((slice(0, n_rows), slice(0, length)))


def _copy_documents(out: np.ndarray, begin: int, documents: Sequence[tuple[int, TranscriptRow]]) -> None:
    """Fills [m,L,k] with the routes of positions `begin` to begin + m of a row of these documents."""
    done, end, unknown = begin, begin + len(out), no_route(out.dtype)
    for start, row in documents:
        first, last = max(start, begin), min(start + len(row.tokens), end)
        if first < last:
            out[done - begin : first - begin] = unknown
            row.copy_routes(out[first - begin : last - begin], first - start)
            done = last
    out[done - begin :] = unknown


@dataclasses.dataclass(frozen=True)
class PackedRows:
    """Rows and the batches that hold them."""

    rows: Sequence[WeightedRow]
    batches: list[dict[str, Any]]
    """The fields of FIELDS, [B,S] each, and routes, PackedRoutes; see train/losses.py."""
    places: Sequence[TokenSpan]
    """Of each row."""

    def read(self, values: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Returns the part of each row, [n], of arrays [B,S], one for each batch."""
        return [values[place.batch][place.row, place.start : place.stop] for place in self.places]

    def place(self, values: Sequence[np.ndarray], dtype: np.dtype | type) -> list[np.ndarray]:
        """Returns arrays [B,S], one for each batch, that hold the values [n] of each row; zero elsewhere."""
        arrays = [np.zeros(batch["tokens"].shape, dtype) for batch in self.batches]
        for place, value in zip(self.places, values, strict=True):
            arrays[place.batch][place.row, place.start : place.stop] = value
        return arrays


def pack_rows(
    rows: Sequence[WeightedRow],
    shapes: Sequence[tuple[int, int]],
    *,
    every_shape: bool = False,
    shards: int = 1,
    cost: Callable[[np.ndarray], float] = np.count_nonzero,
    route_shape: tuple[int, int] | None = None,
    n_experts: int = 256,
) -> PackedRows:
    """Packs rows first-fit into batches of a few fixed shapes.

    Raises UserError if a row is longer than every shape, and TranscriptError if it lacks routes that are to be
    replayed, or has those of another network.

    Args:
      shapes: (row length, rows) by ascending length. A row goes into the first shape that holds it.
      every_shape: whether an empty batch of every shape follows the others, so that a step compiles all of them.
      shards: devices that share the rows of a batch; several get about the same work (balance_rows).
      cost: the work of a row of the batch with these segments [S] (models/flops.py: row_flops).
      route_shape: (L, k), expert layers and experts per token, where routes are replayed.
      n_experts: of the network; with fewer than 256 a choice takes one byte (replay_dtype).
    """
    if route_shape is not None:
        for row in rows:
            _check_routes(row.row, route_shape)
    by_shape: dict[tuple[int, int], list[int]] = {(length, n_rows): [] for length, n_rows in shapes}
    for number, row in enumerate(rows):
        n = len(row.row.tokens)
        fitting = next((shape for shape in by_shape if n <= shape[0]), None)
        if fitting is None:
            raise UserError(
                f"A row of {n} tokens is longer than every training batch {tuple(by_shape)}; add a longer one."
            )
        by_shape[fitting].append(number)
    batches: list[dict[str, Any]] = []
    places: dict[int, TokenSpan] = {}
    for shape, numbers in by_shape.items():
        packed, packing = _packed([rows[number] for number in numbers], *shape, shards, cost, route_shape, n_experts)
        for document, row, start, stop in packing.spans():
            places[numbers[document]] = TokenSpan(len(batches) + row // shape[1], row % shape[1], start, stop)
        batches += packed
    batches += [empty_batch(*shape, route_shape=route_shape, n_experts=n_experts) for shape in by_shape if every_shape]
    return PackedRows(rows, batches, [places[number] for number in range(len(rows))])


def empty_batch(
    length: int, rows: int, *, route_shape: tuple[int, int] | None = None, n_experts: int = 256
) -> dict[str, np.ndarray]:
    """Returns a batch without tokens, whose gradient is zero; route_shape and n_experts as in `pack_rows`."""
    batch: dict[str, np.ndarray] = {name: np.zeros((rows, length), dtype) for name, dtype in FIELDS.items()}
    if route_shape is not None:
        batch["routes"] = np.broadcast_to(no_route(replay_dtype(n_experts)), (rows, length, *route_shape))
    return batch


FIELDS = {
    "tokens": np.int32,
    "positions": np.int32,
    "segments": np.int32,
    "weights": np.float32,
    "advantages": np.float32,
    "ce_weights": np.float32,
    "kl_weights": np.float32,
    "sampler_logprobs": np.float32,
}
"""Fields of a batch and their dtypes; train/losses.py says what they mean."""

REFERENCE_FIELDS = {"reference_logprobs": np.float32}
"""Further fields of a batch where there is a reference policy (rl/reference.py)."""


BeforeCall = Callable[[str, Mapping[str, HostField]], object]
"""The name of a device call and its batch -> whatever has to be done first, such as to tell the other processes."""


def balance_rows(costs: Sequence[float], batch_size: int, shards: int) -> list[int]:
    """Returns an order of rows; the i-th batch of it is rows i * batch_size to (i + 1) * batch_size.

    A shard has batch_size / shards adjacent rows of each batch, and the batch takes as long as its slowest shard. So
    rows of similar cost share a batch, and within it each row, the most expensive first, goes to the shard with the
    least cost so far that has room (longest processing time first, Graham 1969).

    Args:
      costs: of each row, in any unit; their number is a multiple of batch_size.
      shards: divides batch_size.
    """
    by_cost = np.argsort(-np.asarray(costs, np.float64), kind="stable")
    order: list[int] = []
    for first in range(0, len(by_cost), batch_size):
        members: list[list[int]] = [[] for _ in range(shards)]
        load = np.zeros(shards)
        for row in by_cost[first : first + batch_size]:
            is_full = np.array([len(rows) == batch_size // shards for rows in members])
            shard = int(np.argmin(np.where(is_full, np.inf, load)))
            members[shard].append(int(row))
            load[shard] += costs[row]
        order += [row for rows in members for row in rows]
    return order


def _check_routes(row: TranscriptRow, route_shape: tuple[int, int]) -> None:
    """Raises TranscriptError unless every token but the last has routes of this shape.

    A row that no engine sampled, as of rl.replay, has none; the learner's router chooses its experts.
    """
    if (row.versions < 0).all():
        return
    missing = row.tokens_without_routes()
    if len(missing):
        raise TranscriptError(
            f"{len(missing)} of the {len(row.tokens)} tokens of a row have no routes to replay, the first at "
            f'{missing[0]}; use rl.router_replay="off", or a sampler that returns those of every message.'
        )
    if row.route_shape not in (None, route_shape):
        raise TranscriptError(f"routes of (L, k) = {row.route_shape} of a row are not those of {route_shape}.")


def _packed(
    rows: Sequence[WeightedRow],
    seq_len: int,
    batch_size: int,
    shards: int,
    cost: Callable[[np.ndarray], float],
    route_shape: tuple[int, int] | None,
    n_experts: int,
) -> tuple[list[dict[str, Any]], Packing]:
    packing = plan_packing([len(r.row.tokens) for r in rows], seq_len=seq_len, batch_size=batch_size)
    if shards > 1 and batch_size % shards == 0:  # the Learner refuses other sizes with a sentence
        order = balance_rows([cost(segments_S) for segments_S in packing.segments()], batch_size, shards)
        packing = dataclasses.replace(packing, rows=tuple(packing.rows[row] for row in order))
    values = {
        "tokens": [r.row.tokens for r in rows],
        "positions": [np.arange(len(r.row.tokens)) for r in rows],
        "weights": [r.weights for r in rows],
        "advantages": [r.advantages for r in rows],
        "ce_weights": [r.ce_weights for r in rows],
        "kl_weights": [r.kl_weights for r in rows],
        "sampler_logprobs": [r.row.logprobs for r in rows],
    }
    fields = {name: packing.place(value, FIELDS[name]) for name, value in values.items()}
    fields["segments"] = packing.segments()
    placed: list[list[tuple[int, TranscriptRow]]] = [[] for _ in packing.rows]
    for document, row, start, _ in packing.spans():
        placed[row].append((start, rows[document].row))
    batches: list[dict[str, Any]] = []
    for i in range(0, len(placed), batch_size):
        here = slice(i, i + batch_size)
        batches.append({name: array[here] for name, array in fields.items()})
        if route_shape is not None:
            shape = batch_size, seq_len, *route_shape
            batches[-1]["routes"] = PackedRoutes(placed[here], shape, replay_dtype(n_experts))
    return batches, packing
