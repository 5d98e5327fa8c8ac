"""Runner: the weights and the cache on the mesh, and the device calls that carry out a schedule."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from composer_jax.models.cache import cache_spec, init_cache
from composer_jax.models.model_def import ModelDef, Params
from composer_jax.sampler.config import SamplerConfig
from composer_jax.sampler.decode import DecodeRows
from composer_jax.sampler.policy import SamplingParams
from composer_jax.sampler.programs import decode_program, prefill_program, verify_program
from composer_jax.sampler.rollout_weights import RolloutWeights
from composer_jax.sampler.sequence import Chunk, Limits
from composer_jax.sampler.sequence import Sequence as Row
from composer_jax.sampler.token_sampling import RowParams

FEWEST_ROWS = 8
"""Of decode calls, unless the config says otherwise; a call with fewer takes as long."""


@dataclasses.dataclass(frozen=True)
class RowRequest:
    """What a decode call needs to know of a row beside its tokens and pages."""

    row: Row
    seed: int
    params: SamplingParams


@dataclasses.dataclass(frozen=True)
class NewTokens:
    """What one decode call sampled in one row."""

    tokens: list[int]
    logprobs: list[float]
    raw_logprobs: list[float]


class Runner:
    """Carries out device calls. A few fixed shapes of calls are compiled, and nothing else."""

    def __init__(
        self, definition: ModelDef, mesh: Mesh, config: SamplerConfig, limits: Limits, end_tokens: Sequence[int]
    ) -> None:
        """config: of the sampler, with sizes that fit the mesh and the model. limits: made from it."""
        self.definition, self.mesh, self.limits = definition, mesh, limits
        page = limits.page_size
        self._table_length = -(-config.capacity // page)
        decode_rows = config.decode_rows or [r for r in (limits.rows // 4, limits.rows // 2) if r >= FEWEST_ROWS]
        self._decode_rows = (*sorted(r for r in decode_rows if r < limits.rows), limits.rows)
        self._prefill = prefill_program(definition, mesh)
        self._decode = {
            processed: decode_program(definition, mesh, limits.decode_steps, tuple(end_tokens), processed)
            for processed in (False, True)
        }
        self._draft_tokens = config.draft_tokens if config.drafts else 0
        self._verify = {
            processed: verify_program(definition, mesh, tuple(end_tokens), processed) for processed in (False, True)
        }
        self._rollout_weights = RolloutWeights(definition, mesh)
        self._new_cache = jax.jit(
            jax.shard_map(
                lambda: init_cache(definition.config, limits.n_pages, page),
                mesh=mesh,
                in_specs=(),
                out_specs=cache_spec(definition.config),
                check_vma=False,
            )
        )
        self._cache = self._new_cache()

    def reset_cache(self) -> None:
        """Makes an empty cache: a call that failed may have taken the one before with it."""
        self._cache = None
        self._cache = self._new_cache()

    # -- weights -------------------------------------------------------------------------------------------------

    def install(self, params: Params, router_bias: Params, *, copy: bool) -> None:
        """Takes the weights in this runner's layout and dtypes; with copy=False, arrays that have them are shared."""
        self._weights = self._rollout_weights.to_rollout(params, router_bias, copy=copy)

    # -- calls ---------------------------------------------------------------------------------------------------

    def num_programs(self, processed: bool) -> int:
        """Number of programs, each of which compiles once. See Sampler.warm_up."""
        per_row_count = (2 if self._draft_tokens else 1) * (2 if processed else 1)
        return len(self.limits.prefill_shapes) + per_row_count * len(self._decode_rows)

    def warm_up(self, processed: bool) -> Iterator[None]:
        """Compiles all shapes by calls that consist of padding; yields after each. See Sampler.warm_up."""
        for shape in self.limits.prefill_shapes:
            self.prefill(shape, [])
            yield
        for rows in self._decode_rows:
            for drafts in [None, []] if self._draft_tokens else [None]:
                for is_processed in (False, True) if processed else (False,):
                    self._call_decode([], rows, drafts, is_processed)
                    yield

    def prefill(self, shape: tuple[int, int], chunks: Sequence[Chunk]) -> None:
        """Computes chunks of contexts. shape: (rows per shard, tokens per row)."""
        rows, length = shape
        places = self._places([chunk.sequence for chunk in chunks], rows)
        n = self.limits.shards * rows
        tokens, tables = np.zeros((n, length), np.int32), np.zeros((n, self._table_length), np.int32)
        start, count = np.zeros((2, n), np.int32)
        for place, chunk in zip(places, chunks, strict=True):
            end = chunk.start + chunk.count
            tokens[place, : chunk.count] = chunk.sequence.tokens[chunk.start : end]
            start[place], count[place] = chunk.start, chunk.count
            _put_table(tables[place], chunk.sequence.pages)
        self._cache = self._prefill(*self._weights, self._cache, tokens, start, count, tables)

    def decode(self, requests: Sequence[RowRequest], drafts: Sequence[list[int]] | None = None) -> list[NewTokens]:
        """Samples the next tokens of each row, at least one.

        drafts: of each row, at most config.draft_tokens; the call then verifies them instead of decoding step by step.
        """
        by_shard = [sum(r.row.shard == shard for r in requests) for shard in range(self.limits.shards)]
        processed = not all(r.params.unprocessed for r in requests)
        return self._call_decode(requests, _smallest_fitting(self._decode_rows, max(by_shard)), drafts, processed)

    def _call_decode(
        self, requests: Sequence[RowRequest], rows: int, drafts: Sequence[list[int]] | None, processed: bool
    ) -> list[NewTokens]:
        places = self._places([r.row for r in requests], rows)
        n = self.limits.shards * rows
        token, position, budget, top_k = np.zeros((4, n), np.int32)
        temperature, top_p = np.ones((2, n), np.float32)
        min_p = np.zeros(n, np.float32)
        seed, tables = np.zeros(n, np.uint32), np.zeros((n, self._table_length), np.int32)
        for place, r in zip(places, requests, strict=True):
            token[place], position[place], budget[place] = r.row.tokens[-1], len(r.row.tokens) - 1, r.row.budget
            temperature[place], top_p[place] = r.params.temperature, r.params.top_p
            top_k[place], min_p[place], seed[place] = r.params.top_k, r.params.min_p, r.seed
            _put_table(tables[place], r.row.pages)
        inputs = DecodeRows(token, position, budget, seed, tables)
        params = RowParams(temperature, top_p, top_k, min_p) if processed else ()
        if drafts is None:
            self._cache, out = self._decode[processed](*self._weights, self._cache, *inputs, *params)
        else:
            draft, count = np.zeros((n, self._draft_tokens), np.int32), np.zeros(n, np.int32)
            for place, tokens in zip(places, drafts, strict=True):
                draft[place, : len(tokens)], count[place] = tokens, len(tokens)
            self._cache, out = self._verify[processed](*self._weights, self._cache, *inputs, draft, count, *params)
        *columns, emitted = map(np.asarray, out)
        counts = emitted.sum(axis=0)
        return [NewTokens(*(column[: counts[place], place].tolist() for column in columns)) for place in places]

    def _places(self, sequences: Sequence[Row], rows: int) -> list[int]:
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


def _put_table(table: np.ndarray, pages: Sequence[int]) -> None:
    """Fills a row of a page table; pages beyond it hold nothing that the call reads or writes."""
    n = min(len(table), len(pages))
    table[:n] = pages[:n]


def _smallest_fitting(sizes: tuple[int, ...], needed: int) -> int:
    """The first of the ascending `sizes` that is at least `needed`, or the last."""
    return next((size for size in sizes if size >= needed), sizes[-1])
