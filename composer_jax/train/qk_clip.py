"""QK-clip: heads whose attention logits grew beyond a limit get smaller query and key weights.

After an optimizer step a head whose largest logit in that step's forward pass was s > tau has its query and key weights
scaled so that the same logit becomes tau: gamma = min(1, tau / s) (MuonClip of Kimi K2, arXiv 2507.20534, section 2.1;
tau is 100 there). Which weights take which part of gamma is the attention kind's: ClippedAttention.scale_logits.
"""

from typing import Any

import jax
import jax.numpy as jnp

from composer_jax.errors import UserError
from composer_jax.models.attention import ClippedAttention
from composer_jax.models.attention_kinds import attention_kind, attention_name
from composer_jax.models.config import ModelConfig
from composer_jax.models.model_def import Params
from composer_jax.ops.shapes import check_shapes


def check_qk_clip(config: ModelConfig) -> None:
    """Raises a UserError where the attention of a network cannot be clipped."""
    kind = attention_kind(config)
    if not issubclass(kind, ClippedAttention):
        raise UserError(
            f"optimizer.qk_clip needs an attention kind that measures and scales its logits, which "
            f"{attention_name(config)!r} does not (models/attention.py: ClippedAttention); leave optimizer.qk_clip out."
        )
    kind.check_qk_clip(config)


def check_attention_logits(maxima: dict[str, Any]) -> None:
    """Raises a UserError where the maxima of a LossOutput lack the attention logits."""
    if "attention_logits" not in maxima:
        raise UserError(
            "optimizer.qk_clip needs the attention logits among the maxima of the loss, which this loss leaves out; "
            "add them (train/losses.py: logit_maxima), or leave optimizer.qk_clip out."
        )


def clip_heads(params: Params, max_logits: dict[str, jax.Array], tau: float, config: ModelConfig) -> Params:
    """Returns params with the query and key weights of heads beyond the limit scaled down; others keep every bit.

    Args:
      max_logits: by stack of layers, the largest attention logit of each head, float32 [L,H]. A stack that is not in it
        keeps its weights.
    """
    kind = attention_kind(config)
    assert issubclass(kind, ClippedAttention)
    clipped = dict(params)
    for name, max_LH in max_logits.items():
        check_shapes(max_LH=(max_LH, jnp.float32))
        factors_LH = jnp.where(max_LH > tau, tau / max_LH, 1)
        layers = params[name]
        block = layers["block"] if name == "mtp" else layers
        block = block | {"attention": kind.scale_logits(config, block["attention"], factors_LH)}
        clipped[name] = layers | {"block": block} if name == "mtp" else block
    return clipped
