"""SamplerConfig: how conversations are batched, and where the sampler keeps its weights."""

import dataclasses

from composer_jax.errors import UserError
from composer_jax.parallel.mesh import MeshConfig

PARAM_DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class SamplerConfig:
    """The sampler section of a run's config. No number is published; all are ours.

    Raises:
      UserError: a number out of range; the message names the field.
    """

    slots: int = 16
    """Conversations served at once, over all devices; a multiple of the batch shards of the sampler's mesh."""
    capacity: int = 512
    """Tokens that the context of one conversation can hold; at most the model's max_context."""
    decode_steps: int = 8
    """Tokens per decode call. Fewer react faster to a finished message, more have less overhead."""
    prefill_shapes: tuple[tuple[int, int], ...] = ((16, 32), (4, 128))
    """(rows per device, tokens per row) of prefill calls, by ascending tokens. A request is prefilled in the first
    shape that holds its tokens; a longer one takes several calls of the last. Similar products bound the padding."""
    decode_rows: tuple[int, ...] = ()
    """Slots per device that one decode call can serve, besides all of them. A call uses the smallest number that holds
    the running conversations."""
    windows: tuple[int, ...] = ()
    """Cache entries per slot that one call can read, besides the whole capacity. A call uses the smallest number that
    holds every context."""
    mesh: MeshConfig | None = None
    """The sampler's own mesh over the devices of the run's mesh; None uses the run's mesh. Its `cpu_devices` and
    `reduction` are ignored."""
    param_dtype: str = ""
    """Dtype of the sampler's copy of the weights, "float32" or "bfloat16"; empty uses the model's param_dtype."""

    def __post_init__(self):
        for field in ("slots", "decode_steps"):
            if getattr(self, field) < 1:
                raise UserError(f"sampler.{field}={getattr(self, field)} is too small; use 1 or more.")
        if self.capacity < 2:
            raise UserError(f"sampler.capacity={self.capacity} holds no answer; use 2 tokens or more.")
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
        for field in ("decode_rows", "windows"):
            if min(getattr(self, field), default=1) < 1:
                raise UserError(f"sampler.{field}={getattr(self, field)} has a number below 1; leave it out.")
        if self.param_dtype and self.param_dtype not in PARAM_DTYPES:
            known = " or ".join(PARAM_DTYPES)
            raise UserError(f"sampler.param_dtype={self.param_dtype!r} is unknown; use {known}, or leave it empty.")
