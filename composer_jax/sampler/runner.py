"""Runner: the weights and the cache on the mesh, and the device calls that carry out a schedule.

A call is started, which returns at once, and finished, which waits for its results. Calls run in the order of their
starts, because each takes the cache that the one before leaves. So a call may use pages that an earlier one writes, and
pages whose owner has ended while an earlier call still writes into them.

gather_shards: what a call returned, with the shards that other processes hold.
"""

import contextlib
import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.errors import UserError
from composer_jax.frames import Frame
from composer_jax.models.model_def import ModelDef, Params
from composer_jax.parallel.command_channel import CommandLane
from composer_jax.parallel.mesh import BATCH_AXES
from composer_jax.parallel.processes import device_put_global
from composer_jax.sampler.cache_memory import require_room
from composer_jax.sampler.config import SamplerConfig
from composer_jax.sampler.decode import CarriedRows, DecodedTokens, DecodeRows, Scores
from composer_jax.sampler.host_weights import is_on_host
from composer_jax.sampler.mtp_decode import Drafts
from composer_jax.sampler.page_tables import PageTables, read_program, write_program
from composer_jax.sampler.policy import TopLogprobs
from composer_jax.sampler.programs import (
    cache_program,
    decode_program,
    prefill_program,
    score_program,
)
from composer_jax.sampler.rollout_weights import RolloutWeights
from composer_jax.sampler.route_read import RouteReader, Wanted
from composer_jax.sampler.sequence import Limits, PrefillChunk, SequenceState, token_array
from composer_jax.sampler.token_sampling import RowParams
from composer_jax.sampler.weight_checksums import ChecksumProgram, WeightChecksums, require_equal

FEWEST_ROWS = 8
"""Of decode calls, unless the config says otherwise; a call with fewer takes as long."""
ELSEWHERE: Any = object()
"""In the place of an array of which this process has no shard."""
TABLES_AT = {"prefill": 3, "score": 3} | dict.fromkeys(
    (f"{kind}{processed}" for kind in ("decode", "verify") for processed in ("", "_processed")),
    DecodeRows._fields.index("tables_BJ"),
)
"""Which input of a program has page tables; a call sends the numbers of rows of the tables on the devices there."""
SHORTEST_CONTEXT = 1024
"""Tokens of the shortest page table of a decode call on GPUs; reading shorter ones saves little."""


@dataclasses.dataclass(frozen=True)
class RowRequest:
    """What a decode call needs to know of a row beside its tokens and pages."""

    row: SequenceState
    seed: int
    params: SamplingParams


@dataclasses.dataclass(slots=True)
class NewTokens:
    """What one decode call sampled in one row. Not frozen: there is one for every row and call."""

    tokens: list[int]
    logprobs: list[float]
    raw_logprobs: list[float]
    top_logprobs: list[TopLogprobs] | None = None
    drafts: list[int] = dataclasses.field(default_factory=list)
    """The MTP module's guesses at the tokens that follow, for the next call."""
    drafted: Sequence[int] = ()
    """Drafts that the call verified, by their place."""
    accepted: Sequence[int] = ()
    """Those of them that were right, with all before them."""


@dataclasses.dataclass(frozen=True)
class NewScores:
    """What one prefill call says about the tokens after those of a chunk."""

    logprobs: list[float]
    top_logprobs: list[TopLogprobs]
    """MOST_TOP_LOGPROBS of them, or all of a smaller vocabulary."""


@dataclasses.dataclass(frozen=True)
class RowScores:
    """What the network says about a row on each of the shards."""

    logprobs_BS: np.ndarray
    """float32 [shards, tokens - 1]: log p of the tokens after the first, at temperature 1."""
    routing: np.ndarray | None
    """uint8 or uint16 [tokens - 1, expert layers, experts per token] of the first shard, where the cache keeps it."""


class Runner:
    """Carries out device calls. A few fixed shapes of calls are compiled, and nothing else."""

    def __init__(
        self, definition: ModelDef, mesh: Mesh, config: SamplerConfig, limits: Limits, end_tokens: Sequence[int]
    ) -> None:
        """config: of the sampler, with sizes that fit the mesh and the model. limits: made from it."""
        self.definition, self.mesh, self.limits, self._config = definition, mesh, limits, config
        page = limits.page_size
        self._table_length = -(-config.max_model_len // page)
        platform, has_window = mesh.devices.flat[0].platform, definition.config.sliding_window is not None
        self._decode_tables = decode_tables(self._table_length, page, platform, has_window=has_window)
        decode_rows = config.decode_rows or [r for r in (limits.rows // 4, limits.rows // 2) if r >= FEWEST_ROWS]
        self._decode_rows = (*sorted(r for r in decode_rows if r < limits.rows), limits.rows)
        end = tuple(end_tokens)
        self._routes: RouteReader | None = None
        if definition.config.cache_routing:
            self._routes = RouteReader(definition.config, mesh, page, limits.shards, config.max_model_len)
        self._programs: dict[str, Callable[..., tuple[Any, Any]]] = {
            "prefill": prefill_program(definition, mesh),
            "score": score_program(definition, mesh),
        }
        if self._routes is not None:
            start = self._routes.start
            self._programs["routing"] = lambda params, bias, cache, spans: (cache, start(cache.routing_ZTC, spans))
        for processed, kind in ((False, ""), (True, "_processed")):
            arguments = definition, mesh, limits.decode_steps, end, processed
            self._programs[f"decode{kind}"] = decode_program(*arguments)
            if config.drafts:
                self._programs[f"verify{kind}"] = decode_program(*arguments, config.drafts)
        self.is_here = bool(mesh.local_devices)
        """Whether this process has devices of the engine."""
        self.sender: CommandLane | None = None
        """The channel to the engine's other processes, in process 0 of several while it serves."""
        self._draft_tokens = config.draft_tokens if config.drafts else 0
        self._rollout_weights = RolloutWeights(definition, mesh)
        self.checksum_program = ChecksumProgram(definition)
        self.installed: tuple[int, WeightChecksums] | None = None
        """Version and checksums of the weights."""
        self._new_cache = cache_program(definition, mesh, limits.cache_pages, page)
        self._weights = self._cache = self._carried = self._tables = None
        self._page_tables = PageTables(limits, self._table_length)
        self._write_tables = write_program(mesh)
        self._read_tables = {width: read_program(mesh, width) for width in self._decode_tables}
        self._carried_rows: dict[SequenceState, int] = {}
        """The rows of the last decode call, whose ends are in `_carried`."""

    def reset_cache(self) -> None:
        """Makes an empty cache: a call that failed may have taken the one before with it."""
        self._forget_calls()  # before the new cache takes its room
        if not self.is_here:
            return
        self._cache = self._new_cache()
        self._tables = self._page_tables.new_array(self.mesh)
        ends = np.zeros((len(CarriedRows._fields), self.limits.shards * self.limits.rows), np.int32)
        self._carried = device_put_global(CarriedRows(*ends), NamedSharding(self.mesh, PartitionSpec(BATCH_AXES)))

    def release(self) -> None:
        """Frees the weights and the cache until the next `install`."""
        self._forget_calls()
        self._weights = self.installed = None

    def _forget_calls(self) -> None:
        """Drops what calls leave on the devices for those after them.

        Process 0 does so for engines of other processes, too, whose devices then have new tables as well.
        """
        self._cache = self._carried = self._tables = None
        self._page_tables = PageTables(self.limits, self._table_length)
        self._carried_rows = {}

    def wait(self) -> None:
        """Returns when no call runs, however they end: their memory is free then."""
        for array in jax.tree.leaves((self._cache, self._carried)):
            with contextlib.suppress(RuntimeError):  # of a failed call, or an array that one took before it failed
                array.block_until_ready()

    # -- weights -------------------------------------------------------------------------------------------------

    def install(
        self,
        params: Params,
        router_bias: Params,
        version: int,
        *,
        copy: bool,
        checksums: WeightChecksums | None = None,
    ) -> None:
        """Takes the weights in this runner's layout and dtypes; with copy=False, arrays that have them are shared.

        The first call makes the cache. Raises ValueError for weights of another network, and UserError if the new
        weights have other checksums, or leave no room for the cache; the old weights stay then. HostTensors
        (host_weights.py) replace the old weights one by one: whatever goes wrong then leaves no weights.

        Args:
          checksums: what the learner says this version has (sampler/weight_checksums.py); None: those of the arguments,
            which must be arrays.
        """
        if is_on_host(params):
            assert checksums is not None, "the host's tensors come with their checksums"
            expected, held = checksums, [] if self._weights is None else jax.tree.leaves(self._weights)
            held = held or [None] * len(jax.tree.leaves((params, router_bias)))
            self._weights = None  # a mixture of two versions computes nothing
            weights = self._rollout_weights.replace(held, params, router_bias)
        else:
            expected = self.checksum_program.of_learner(params) if checksums is None else checksums
            weights = self._rollout_weights.to_rollout(params, router_bias, copy=copy)
        arrived = self.checksum_program.of_sampler(weights[0])
        try:
            require_equal(arrived, expected, version, self.installed)
            if self._cache is None:
                require_room(self.definition, self.mesh, self._config, self.limits)
        except UserError:
            del weights, params, router_bias  # the traceback would keep their memory
            raise
        if self._cache is None:
            self.reset_cache()
        self._weights, self.installed = weights, (version, arrived)

    # -- calls ---------------------------------------------------------------------------------------------------

    def _start(self, name: str, *inputs: Any, width: int | None = None) -> Callable[[], Any]:
        """Starts a program on the weights, the cache and arrays of NumPy.

        The function that it returns gives the results beside the cache, where there are several processes as NumPy
        arrays. Such functions are called in the order of the starts. Every device call on the cache is started here,
        so that several processes run the same programs in the same order.
        """
        out = self._start_everywhere(name, *inputs, width=width)
        return functools.partial(gather_shards, out, self.sender) if self.mesh.is_multi_process else lambda: out

    def _start_everywhere(self, name: str, *inputs: Any, width: int | None = None) -> Any:
        """Starts a program in all processes; returns what `start_program` does here."""
        if self.sender is None:
            return self.start_program(name, *inputs, width=width)
        with self.sender.sender.in_order if self.is_here else contextlib.nullcontext():
            self.sender.send({"program": name, "width": width}, inputs)
            return self.start_program(name, *inputs, width=width)

    def start_program(self, name: str, *inputs: Any, width: int | None = None) -> Any:
        """Starts a program in this process only; returns its results as global arrays, perhaps not computed yet.

        A process without devices of the engine starts nothing, and returns ELSEWHERE in the place of each array.

        width: pages of the tables that the program gets; None: those of the longest context.
        """
        if not self.is_here:
            return self._outputs_elsewhere(name)
        assert self._weights is not None and self._tables is not None, "no weights are installed"
        if name == "write_tables":
            self._tables = self._write_tables(self._tables, *inputs)
            return ()
        program = self._programs[name]
        if (at := TABLES_AT.get(name)) is not None:
            tables = self._read_tables[width or self._table_length](self._tables, inputs[at])
            inputs = *inputs[:at], tables, *inputs[at + 1 :]
        if not name.startswith("decode"):
            self._cache, out = program(*self._weights, self._cache, *inputs)
            return out
        assert self._carried is not None, "the cache comes with the ends of rows"
        n = len(DecodeRows._fields) + 1
        inputs = *inputs[:n], *self._carried, *inputs[n:]
        self._cache, (out, self._carried) = program(*self._weights, self._cache, *inputs)
        return out

    def _outputs_elsewhere(self, name: str) -> Any:
        """Returns ELSEWHERE in the place of each array that other processes reply with."""
        if name == "write_tables":
            return ()
        if name == "prefill":
            return ELSEWHERE
        if name == "routing":
            return []  # which RouteReader gets from their owners
        if name == "score":
            return Scores(*[ELSEWHERE] * len(Scores._fields))
        tokens = DecodedTokens(*[ELSEWHERE] * len(DecodedTokens._fields))
        drafts = Drafts(*[ELSEWHERE] * len(Drafts._fields))
        return (tokens, drafts) if self.definition.config.cache_mtp and name.startswith("verify") else tokens

    def warm_up_calls(self, processed: bool) -> list[Callable[[], object]]:
        """Returns the calls, which consist of padding, that compile all programs. See Sampler.warm_up."""
        kinds = (False, True) if processed else (False,)
        calls: list[Callable[[], object]] = [
            functools.partial(self._call_prefill, shape, scores)
            for shape in self.limits.prefill_shapes
            for scores in kinds
        ]
        calls += [functools.partial(self._call_write, write) for write in self._page_tables.no_writes()]
        calls += [
            functools.partial(self._call_decode, (rows, pages), drafts, is_processed)
            for rows in self._decode_rows
            for drafts in ([None, []] if self._draft_tokens else [None])
            for pages in self._table_lengths(drafts)
            for is_processed in kinds
        ]
        if self._routes is not None:
            spans = [self._routes.padding(size) for size in self._routes.sizes]
            calls += [functools.partial(self._call_routing, one) for one in spans]
        return calls

    def _call_routing(self, spans: np.ndarray) -> None:
        jax.block_until_ready(self.start_program("routing", spans))

    def _call_write(self, write: np.ndarray) -> None:
        self._start("write_tables", write)()

    def _call_prefill(self, shape: tuple[int, int], scores: bool) -> None:
        self.start_prefill(shape, [], scores=scores)()

    def _call_decode(self, shape: tuple[int, int], drafts: Sequence[list[int]] | None, processed: bool) -> None:
        self._start_decode([], shape, drafts, processed)()

    def start_prefill(
        self, shape: tuple[int, int], chunks: Sequence[PrefillChunk], *, scores: bool = False
    ) -> Callable[[], list[NewScores] | None]:
        """Starts to compute chunks of contexts; with `scores`, finds what the network says about the token after each.

        shape: (rows per shard, tokens per row).
        """
        rows, length = shape
        sequences = [chunk.sequence for chunk in chunks]
        places = self._places(sequences, rows)
        tables = self._send_tables(sequences, places, rows)
        n = self.limits.shards * rows
        tokens, following = np.zeros((2, n, length), np.int32)
        start, count = np.zeros((2, n), np.int32)
        for place, chunk in zip(places, chunks, strict=True):
            end = chunk.start + chunk.count
            tokens[place, : chunk.count] = chunk.sequence.tokens[chunk.start : end]
            following[place, : chunk.count] = chunk.sequence.tokens[chunk.start + 1 : end + 1]
            start[place], count[place] = chunk.start, chunk.count
        inputs = tokens, start, count, tables
        if not scores:
            finish = self._start("prefill", *inputs, *([following] if self.definition.config.cache_mtp else []))

            def wait() -> None:
                jax.block_until_ready(finish())

            return wait
        finish = self._start("score", *inputs, following)

        def read() -> list[NewScores]:
            logprobs, ids, top = jax.device_get(finish())
            return [
                NewScores(
                    logprobs[place, : chunk.count].tolist(),
                    [_top(ids[place, i], top[place, i], ids.shape[-1]) for i in range(chunk.count)],
                )
                for place, chunk in zip(places, chunks, strict=True)
            ]

        return read

    def score(self, tokens: Sequence[int]) -> RowScores:
        """Scores a row of 2 to MOST_SCORED tokens on every shard, in pages that no request has.

        Nothing that is cached for requests is read or changed.
        """
        pages = list(range(self.limits.n_pages, self.limits.cache_pages))
        rows = [SequenceState(token_array(tokens), 0, shard=shard, pages=pages) for shard in range(self.limits.shards)]
        logprobs: list[list[float]] = [[] for _ in rows]
        while missing := len(tokens) - 1 - rows[0].computed:
            length = _smallest_fitting(tuple(length for _, length in self.limits.prefill_shapes), missing)
            shape = next(shape for shape in self.limits.prefill_shapes if shape[1] == length)
            chunks = [PrefillChunk(row, row.computed, min(missing, length)) for row in rows]
            scores = self.start_prefill(shape, chunks, scores=True)() or ()
            for chunk, known, new in zip(chunks, logprobs, scores, strict=True):
                known += new.logprobs
                chunk.sequence.computed += chunk.count
        routing = self.start_routing([(rows[0], 0)])()[0] if self._routes is not None else None
        return RowScores(np.array(logprobs, np.float32), routing)

    def start_routing(self, wanted: Sequence[Wanted]) -> Callable[[], list[np.ndarray]]:
        """Starts to read the experts of computed tokens, uint8 or uint16 [tokens, expert layers, experts per token].

        The rows may give up their pages as soon as the read has started. One device call reads them all, unless a shard
        has more wanted tokens than its longest context.
        """
        routes = self._routes
        assert routes is not None, "this cache has no routing"
        started = []
        for numbers in routes.calls(wanted):
            spans = routes.spans([wanted[i] for i in numbers])
            started.append((numbers, spans, self._start_everywhere("routing", spans)))

        def read() -> list[np.ndarray]:
            out = [routes.empty()] * len(wanted)
            for numbers, spans, pieces in started:
                replies = self.sender.collect_from(routes.other_owners(spans)) if self.sender is not None else None
                for i, array in zip(numbers, routes.finish(spans, pieces, replies), strict=True):
                    out[i] = array
            return out

        return read

    def start_decode(
        self, requests: Sequence[RowRequest], drafts: Sequence[list[int]] | None = None
    ) -> Callable[[], list[NewTokens]]:
        """Starts to sample the next tokens of each row, at least one where its message has not ended.

        A row with outstanding calls goes on from where the decode call before this one ends.

        drafts: of each row, at most config.draft_tokens; the call then verifies them instead of decoding step by step,
          and with config.drafts="mtp" goes on with drafts of its own.
        """
        processed = not all(r.params.unprocessed for r in requests)
        pages = _smallest_fitting(self._table_lengths(drafts), max(len(r.row.pages) for r in requests))
        shape = self.decode_rows([r.row for r in requests]), pages
        return self._start_decode(requests, shape, drafts, processed)

    def _table_lengths(self, drafts: Sequence[list[int]] | None) -> tuple[int, ...]:
        """Returns the pages of a row in decode calls; calls without a step of one token per row have the longest."""
        is_step_of_one = drafts is None or self.definition.config.cache_mtp
        return self._decode_tables if is_step_of_one else self._decode_tables[-1:]

    def decode_rows(self, sequences: Sequence[SequenceState]) -> int:
        """Returns the rows per shard of the program that decodes these sequences."""
        by_shard = Counter(sequence.shard for sequence in sequences)
        return _smallest_fitting(self._decode_rows, max(by_shard.values(), default=0))

    def _start_decode(
        self,
        requests: Sequence[RowRequest],
        shape: tuple[int, int],
        drafts: Sequence[list[int]] | None,
        processed: bool,
    ) -> Callable[[], list[NewTokens]]:
        """Starts a decode call of shape (rows per shard, pages of a row)."""
        rows, pages = shape
        sequences = [r.row for r in requests]
        places = self._places(sequences, rows)
        tables = self._send_tables(sequences, places, rows)
        n = self.limits.shards * rows
        token, position, budget = np.zeros((3, n), np.int32)
        seed, source = np.zeros(n, np.uint32), np.full(n, -1, np.int32)
        starts = [
            (0, 0, 0, self._carried_rows[row]) if row.n_calls else (row.tokens[-1], len(row.tokens) - 1, row.budget, -1)
            for row in sequences
        ]
        token[places], position[places], budget[places], source[places] = np.array(starts, np.int32).reshape(-1, 4).T
        seed[places] = [r.seed for r in requests]
        inputs = DecodeRows(token, position, budget, seed, tables)
        params = _row_params(n, places, requests) if processed else ()
        kind = "_processed" if processed else ""
        if drafts is None:
            finish = self._start(f"decode{kind}", *inputs, source, *params, width=pages)
            self._carried_rows = {r.row: place % rows for place, r in zip(places, requests, strict=True)}
            return lambda: _new_tokens(places, requests, finish())
        assert (source < 0).all(), "drafts follow tokens that the host knows"
        draft, count = np.zeros((n, self._draft_tokens), np.int32), np.zeros(n, np.int32)
        for place, tokens in zip(places, drafts, strict=True):
            draft[place, : len(tokens)], count[place] = tokens, len(tokens)
        finish = self._start(f"verify{kind}", *inputs, draft, count, *params, width=pages)
        read = _new_tokens_of_mtp if self.definition.config.cache_mtp else _new_tokens_of_drafts
        return lambda: read(places, requests, drafts, finish())

    def _send_tables(self, sequences: Sequence[SequenceState], places: Sequence[int], rows: int) -> np.ndarray:
        """Writes what changed of these sequences' tables to the devices; returns where the call at `places` reads."""
        row_B, writes = self._page_tables.rows(sequences, places, rows)
        for write in writes:
            self._start("write_tables", write)
        return row_B

    def _places(self, sequences: Sequence[SequenceState], rows: int) -> list[int]:
        """The row of the call for each sequence: those of a shard are consecutive, and begin at shard * rows.

        Long contexts come first, because attention's work follows the longest of neighbouring rows.
        """
        filled = [0] * self.limits.shards
        places = [0] * len(sequences)
        for i in sorted(range(len(sequences)), key=lambda i: -len(sequences[i].tokens)):
            shard = sequences[i].shard
            places[i] = shard * rows + filled[shard]
            filled[shard] += 1
        assert max(filled) <= rows, f"{max(filled)} sequences of one shard in a call of {rows} rows"
        return places


def decode_tables(longest: int, page_size: int, platform: str, *, has_window: bool) -> tuple[int, ...]:
    """Returns the pages of a row in decode calls, ascending: those of the longest context and, on GPUs, halves of it.

    A GPU's decode step reads the whole table (ops/cached_attention.py), and with halves at most twice the longest
    context of the call. Elsewhere, and in networks with a sliding window, a step reads as far as the contexts reach.
    """
    tables = [longest]
    while platform == "gpu" and not has_window and tables[0] > 1 and tables[0] * page_size > SHORTEST_CONTEXT:
        tables.insert(0, -(-tables[0] // 2))
    return tuple(tables)


def _row_params(n: int, places: Sequence[int], requests: Sequence[RowRequest]) -> RowParams[np.ndarray]:
    """Returns the parameters of a call of n rows; those of padding change nothing."""
    temperature, top_p = np.ones((2, n), np.float32)
    min_p = np.zeros(n, np.float32)
    top_k, n_top = np.zeros((2, n), np.int32)
    for place, r in zip(places, requests, strict=True):
        temperature[place], top_p[place] = r.params.temperature, r.params.top_p
        top_k[place], min_p[place], n_top[place] = r.params.top_k, r.params.min_p, r.params.top_logprobs
    return RowParams(temperature, top_p, top_k, min_p, n_top)


def _new_tokens(places: Sequence[int], requests: Sequence[RowRequest], out: DecodedTokens) -> list[NewTokens]:
    tokens, logprobs, raw_logprobs, ids, top, emitted = jax.device_get(out)
    counts = emitted.sum(axis=0)[places].tolist()
    # One conversion for all rows: one for each row and array would take most of the host's time of a call.
    columns = [array[:, places].T.tolist() for array in (tokens, logprobs, raw_logprobs)]
    decoded = []
    for place, r, n, new, logs, raw in zip(places, requests, counts, *columns, strict=True):
        most = r.params.top_logprobs
        likeliest = [_top(ids[i, place], top[i, place], most) for i in range(n)] if most else None
        decoded.append(NewTokens(new[:n], logs[:n], raw[:n], likeliest))
    return decoded


def _new_tokens_of_drafts(
    places: Sequence[int], requests: Sequence[RowRequest], drafts: Sequence[list[int]], out: DecodedTokens
) -> list[NewTokens]:
    return [
        dataclasses.replace(new, drafted=[1] * len(guess), accepted=_count_right(guess, new.tokens))
        for guess, new in zip(drafts, _new_tokens(places, requests, out), strict=True)
    ]


def _new_tokens_of_mtp(
    places: Sequence[int], requests: Sequence[RowRequest], _: Sequence[list[int]], out: tuple[DecodedTokens, Drafts]
) -> list[NewTokens]:
    tokens, n_drafts, drafted, accepted = jax.device_get(out[1])
    return [
        dataclasses.replace(
            new, drafts=tokens[place, : n_drafts[place]].tolist(), drafted=drafted[place], accepted=accepted[place]
        )
        for place, new in zip(places, _new_tokens(places, requests, out[0]), strict=True)
    ]


def _count_right(draft: Sequence[int], tokens: Sequence[int]) -> list[int]:
    """1 for each place of a draft that was sampled, 0 from the first that was not on."""
    right = [tokens[place : place + 1] == [token] for place, token in enumerate(draft)]
    return np.cumprod(right, dtype=int).tolist()


def _top(ids: np.ndarray, logprobs: np.ndarray, most: int) -> TopLogprobs:
    return dict(zip(ids[:most].tolist(), logprobs[:most].tolist(), strict=True))


def _put_table(table: np.ndarray, pages: Sequence[int]) -> None:
    """Fills a row of a page table; pages beyond it hold nothing that the call reads or writes."""
    n = min(len(table), len(pages))
    table[:n] = pages[:n]


def _smallest_fitting(sizes: tuple[int, ...], needed: int) -> int:
    """The first of the ascending `sizes` that is at least `needed`, or the last."""
    return next((size for size in sizes if size >= needed), sizes[-1])


def gather_shards(out: Any, sender: CommandLane | None) -> Any:
    """Returns a pytree of global arrays as NumPy arrays; the other processes reply with `shards_here`.

    Without a sender, when all processes compile programs, what the others hold is zeros. An all-gather in the program
    would wait for all devices, also where they decode independently of each other, and is slow between CPU devices.

    out: with ELSEWHERE for all arrays where only the other processes have them.
    """
    leaves, tree = jax.tree.flatten(out)
    if not leaves:
        return out
    commands = [] if leaves[0] is ELSEWHERE else [shards_here(out)]
    commands += sender.collect() if sender is not None else []
    arrays = [np.zeros(shape, dtype) for shape, dtype in commands[0][0]["shapes"]]
    for header, pieces in commands:
        for (number, bounds), piece in zip(header["pieces"], pieces, strict=True):
            arrays[number][tuple(slice(*pair) for pair in bounds)] = piece
    return jax.tree.unflatten(tree, arrays)


def shards_here(out: Any) -> Frame:
    """Returns the shards of a pytree's arrays that this process holds; of equal shards, one process sends one."""
    places, pieces, leaves = [], [], jax.tree.leaves(out)
    for number, leaf in enumerate(leaves):
        leaf.copy_to_host_async()
        for shard in leaf.addressable_shards:
            if shard.replica_id == 0:
                bounds = [part.indices(size)[:2] for part, size in zip(shard.index, leaf.shape, strict=True)]
                places.append((number, bounds))
                pieces.append(shard.data)
    shapes = [(leaf.shape, leaf.dtype.name) for leaf in leaves]
    return {"shapes": shapes, "pieces": places}, [np.asarray(piece) for piece in pieces]
