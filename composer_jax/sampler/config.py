"""SamplerConfig: how conversations are batched, and where the sampler keeps its weights."""

import dataclasses

from composer_jax.errors import UserError
from composer_jax.models.cache import cache_window
from composer_jax.models.config import ModelConfig
from composer_jax.ops.quantization import LARGEST
from composer_jax.parallel.mesh import MeshConfig
from composer_jax.sampler.sequence import Limits

DRAFTS = ("", "prompt_lookup", "mtp")
PARAM_DTYPES = ("float32", "bfloat16", *LARGEST)
MOST_AHEAD = 1
"""Schedules whose results the host has not read when the next one starts. One keeps the devices busy as long as the
host works for less time than a call takes. With drafts it is 0: they follow from tokens that the host has read."""
MOST_SCORED = 64
"""Tokens of a row that Runner.score can score."""


@dataclasses.dataclass(frozen=True)
class SamplerConfig:
    """The sampler section of a run's config. No number is published; all are ours.

    Raises UserError for a number out of range; the message names the field.
    """

    slots: int = 16
    """Requests that run at once, over all devices; a multiple of the batch shards of the sampler's mesh. Episodes have
    a slot while they sample; how many are open at once follows from `cache_tokens` (sampler/session_gate.py)."""
    max_model_len: int = 512
    """Tokens that one context can hold; at most the model's max_context."""
    page_size: int = 64
    """Tokens per page of the cache. Contexts share whole pages, so smaller pages share more and cost more to read."""
    cache_tokens: int = 0
    """Tokens in the cache, over all devices; 0 is room for `slots` contexts of max_model_len tokens. A cache that does
    not fit beside the weights is refused with the number that it must stay below. Episodes that take less than
    max_model_len leave room for more episodes than slots, so that slots are in use while tools run. While the cache is
    full, requests wait, and the last that came give way to those before. Where every layer of the model has a sliding
    window, a context takes no more than its window and two calls, and the cache may be smaller than a context."""
    decode_steps: int = 8
    """Tokens per decode call. Fewer react faster to a finished message, more have less overhead."""
    prefill_shapes: tuple[tuple[int, int], ...] = ((16, 32), (4, 128))
    """(rows per device, tokens per row) of prefill calls, by ascending tokens. A call has one row of each context that
    is not complete, and further rows of long ones; of the shapes, the one in which most tokens are computed in the time
    that its products and a read of the weights take."""
    drafts: str = ""
    """Speculative decoding: "prompt_lookup" drafts what followed the context's last tokens earlier in the context, and
    "mtp" lets the network's first MTP module draft. Drafts are verified where that is faster, and change no token.
    Empty: none."""
    draft_tokens: int = 7
    """Most tokens of a draft; below `decode_steps`."""
    decode_rows: tuple[int, ...] = ()
    """Rows per device of decode calls, besides one per slot. A call has the fewest rows that hold its requests. Empty:
    a half and a quarter of the slots, if that is 8 or more."""
    mesh: MeshConfig | None = None
    """The sampler's own mesh over the devices of the run's mesh; None uses the run's mesh. Its `cpu_devices`,
    `reduction` and `reduce_dtype` are ignored."""
    param_dtype: str = ""
    """Dtype of the sampler's copy of the weights; empty uses the model's param_dtype. "float32" or "bfloat16" casts all
    weights. "int8" or "float8_e4m3fn" stores matrices in 8 bits with one float32 scale per output column; the embedding
    table, the head, routers, norms and biases keep the model's param_dtype. The compute dtype stays the same: a matrix
    is dequantised when it is used."""
    stall_seconds: float = 60.0
    """Seconds without progress, while a request or an update waits, after which the sampler logs who waits for what; 0:
    never. The next warning comes after twice as long."""

    def __post_init__(self):
        for field in ("slots", "page_size", "decode_steps"):
            if getattr(self, field) < 1:
                raise UserError(f"sampler.{field}={getattr(self, field)} is too small; use 1 or more.")
        if self.max_model_len < 2:
            raise UserError(f"sampler.max_model_len={self.max_model_len} holds no answer; use 2 tokens or more.")
        if self.drafts not in DRAFTS:
            raise UserError(f"sampler.drafts={self.drafts!r} is unknown; use {' or '.join(map(repr, DRAFTS))}.")
        if self.drafts and not 1 <= self.draft_tokens < self.decode_steps:
            raise UserError(
                f"sampler.draft_tokens={self.draft_tokens} is not between 1 and sampler.decode_steps - 1 = "
                f"{self.decode_steps - 1}; a draft and one more token take the pages of a decode call."
            )
        if self.stall_seconds < 0:
            raise UserError(f"sampler.stall_seconds={self.stall_seconds} is negative; 0 logs no warning.")
        if self.cache_tokens < 0:
            raise UserError(f"sampler.cache_tokens={self.cache_tokens} is negative; 0 holds all slots' contexts.")
        if not self.prefill_shapes:
            raise UserError("sampler.prefill_shapes is empty; give at least one (rows, tokens).")
        for rows, tokens in self.prefill_shapes:
            if rows < 1 or tokens < 1:
                raise UserError(f"sampler.prefill_shapes has ({rows}, {tokens}); use 1 or more of both.")
        lengths = [tokens for _, tokens in self.prefill_shapes]
        if lengths != sorted(set(lengths)):
            raise UserError(
                f"sampler.prefill_shapes has rows of {lengths} tokens; give the shapes by ascending tokens."
            )
        if min(self.decode_rows, default=1) < 1:
            raise UserError(f"sampler.decode_rows={self.decode_rows} has a number below 1; leave it out.")
        if self.param_dtype and self.param_dtype not in PARAM_DTYPES:
            known = ", ".join(PARAM_DTYPES)
            raise UserError(
                f"sampler.param_dtype={self.param_dtype!r} is unknown; use one of {known}, or leave it empty."
            )


def make_limits(config: SamplerConfig, shards: int, model: ModelConfig) -> Limits:
    """Returns the sizes of a scheduler over `shards` devices.

    Raises UserError for slots that do not divide over the devices, or a cache that is smaller than one context.
    """
    if config.slots % shards:
        raise UserError(
            f"{config.slots} sampler slots do not divide over {shards} devices; use a multiple of {shards}."
        )
    rows = config.slots // shards
    page = min(config.page_size, config.max_model_len)
    cache_tokens = (config.cache_tokens or config.slots * config.max_model_len) // shards
    n_pages = max(-(-cache_tokens // page), rows * -(-config.max_model_len // page) if not config.cache_tokens else 0)
    window = cache_window(model)
    window = None if window is None else max(window, page + 1)
    spare_pages = -(-min(MOST_SCORED, config.max_model_len) // page)
    shapes = tuple(config.prefill_shapes)
    limits = Limits(page, n_pages, shards, rows, shapes, config.decode_steps, window, spare_pages)
    limits = dataclasses.replace(limits, most_ahead=0 if config.drafts else MOST_AHEAD)
    longest = limits.most_pages(config.max_model_len)
    limits = dataclasses.replace(limits, fitting=n_pages // longest)
    needed = min(config.max_model_len, longest * page)
    if cache_tokens < needed:
        raise UserError(
            f"sampler.cache_tokens={config.cache_tokens} gives each of {shards} devices {cache_tokens} tokens, less "
            f"than the {needed} that one context of sampler.max_model_len={config.max_model_len} takes; "
            f"use {shards * needed} or more, or 0."
        )
    return limits
