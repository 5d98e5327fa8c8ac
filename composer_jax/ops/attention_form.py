"""Which form of attention of whole rows runs where, and why a fused one does not.

- "splash": JAX's fused kernel for TPUs (ops/splash.py).
- "cudnn": cuDNN's fused kernels for NVIDIA GPUs (ops/cudnn_attention.py).
- "plain": matrix products with float32 scores (ops/packed_attention.py: products), on every platform.

"auto" is the fused form of the platform where it can run, and the plain one elsewhere.
"""

from typing import Literal, NamedTuple

import jax.numpy as jnp
import numpy as np

from composer_jax.errors import UserError
from composer_jax.ops import cudnn_attention, splash
from composer_jax.ops.local_gpu import LocalGpu

AttentionForm = Literal["auto", "splash", "cudnn", "plain"]
FUSED: dict[str, AttentionForm] = {"tpu": "splash", "gpu": "cudnn"}
"""Platform, as jax names it -> its fused form."""


class RowShape(NamedTuple):
    """The operands of attend_rows on one device, as far as the choice depends on them."""

    dtype: np.dtype
    queries: int
    """S; less than T where a row is sharded over devices."""
    keys: int
    """T: tokens of a whole row."""
    heads: int
    """H: heads of queries."""
    width: int
    """X: numbers of a query or key head."""
    value_width: int
    """V."""
    is_whole_row: bool = True
    """Whether the queries are the whole row: AttentionMask.is_whole_row."""


class FormChoice(NamedTuple):
    form: AttentionForm
    """A form, not "auto"."""
    reason: str
    """Why it is the plain one; empty for the fused ones."""


def choose_form(asked: AttentionForm, platform: str, gpu: LocalGpu | None, shape: RowShape) -> FormChoice:
    """Returns the form that runs on devices of a platform for one value of model.attention_form.

    Args:
      platform: "cpu", "gpu" or "tpu", as jax names it.
      gpu: the GPU of this process.

    Raises:
      UserError: `asked` names a fused form that cannot run; the sentence has the reason and the forms that can.
    """
    if asked == "plain":
        return FormChoice("plain", "model.attention_form='plain'")
    fused = FUSED.get(platform)
    if fused is None:
        reason = f"no fused form is for the platform {platform!r}"
    else:
        reason = splash_refusal(shape) if fused == "splash" else cudnn_refusal(gpu, shape)
    if fused is not None and reason is None and asked in ("auto", fused):
        return FormChoice(fused, "")
    if asked == "auto":
        return FormChoice("plain", reason or "")
    others = " or ".join(repr(form) for form in ("auto", fused, "plain") if form != fused or reason is None)
    if asked != fused:
        reason = f"these devices are of the platform {platform!r}"
    raise UserError(f"model.attention_form={asked!r} cannot run here, because {reason}; use {others}.")


def splash_refusal(shape: RowShape) -> str | None:
    """Returns why the TPU kernel cannot compute these rows; None if it can."""
    if shape.queries % splash.LANES or shape.keys % splash.LANES:
        return f"a device has {shape.queries} queries and {shape.keys} keys of a row, not multiples of {splash.LANES}"
    return None


def cudnn_refusal(gpu: LocalGpu | None, shape: RowShape) -> str | None:
    """Returns why cuDNN cannot compute these rows on this GPU; None if it can.

    The limits are those of JAX 0.11.2 (jax/_src/cudnn/fused_attention_stablehlo.py: check_is_flash_attention) and of
    cudnn-frontend 1.32 (include/cudnn_frontend/node: scaled_dot_product_flash_attention.h, sdpa_support_surface.h).
    """
    if gpu is None:
        return "this process has no NVIDIA GPU"
    if gpu.cudnn is None:
        return "JAX has no cuDNN here"
    if gpu.capability < (9, 0):
        major, minor = gpu.capability
        return f"{gpu.kind} has compute capability {major}.{minor}, and packed rows need 9.0"
    is_hopper = gpu.capability[0] == 9
    # 9.6: grouped queries and windows with packed rows. 9.10.0 and 9.10.1 are refused for their faults. Blackwell for
    # workstations (12.0) has the backward pass of packed rows since 9.18.1.
    least = {9: 90600, 12: 91801}.get(gpu.capability[0], 91100)
    if gpu.cudnn < least or gpu.cudnn in (91000, 91001):
        return f"{gpu.kind} needs cuDNN {_version(least)} or later except 9.10.0 and 9.10.1, not {_version(gpu.cudnn)}"
    if gpu.deterministic:
        return (
            "XLA_FLAGS asks for a fixed order of sums, in which cuDNN's backward pass keeps numbers for all pairs of "
            "queries and keys"
        )
    if shape.dtype not in (jnp.bfloat16, jnp.float16):
        return f"the compute dtype is {shape.dtype}, and cuDNN computes bfloat16 and float16"
    # Beyond Hopper the backward pass takes 192 beside values of 128 only, which packed rows pad to 192.
    width, most = max(shape.width, shape.value_width), 256 if is_hopper else 128
    if shape.width % 8 or shape.value_width % 8 or width > most:
        return f"heads are {shape.width} and {shape.value_width} wide, not multiples of 8 up to {most}"
    if shape.queries < 2:
        return "cuDNN's backward pass takes rows of two tokens or more"
    if not shape.is_whole_row:
        return f"a device has {shape.queries} queries of rows of {shape.keys} tokens (mesh.context)"
    if shape.queries * shape.heads * width > cudnn_attention.MAX_OFFSET:
        return (
            f"{shape.queries} tokens of {shape.heads} heads are more than the 2^31 numbers that cuDNN's offsets reach; "
            "divide the heads by mesh.tensor or heads_at_once"
        )
    return None


def _version(cudnn: int) -> str:
    return f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}"
