"""Which form of attention runs where, and the sentences that say why not."""

import jax.numpy as jnp
import pytest

from composer_jax.errors import UserError
from composer_jax.ops.attention_form import FormChoice, RowShape, choose_form
from composer_jax.ops.local_gpu import LocalGpu

H100 = LocalGpu("NVIDIA H100 80GB HBM3", (9, 0), 90800)
B200 = LocalGpu("NVIDIA B200", (10, 0), 91100)
ROWS = RowShape(jnp.dtype("bfloat16"), 4096, 4096, 32, 128, 128)


def test_every_platform_has_its_form():
    assert choose_form("auto", "tpu", None, ROWS) == FormChoice("splash", "")
    assert choose_form("auto", "gpu", H100, ROWS) == FormChoice("cudnn", "")
    assert choose_form("auto", "gpu", B200, ROWS) == FormChoice("cudnn", "")
    assert choose_form("auto", "cpu", None, ROWS) == FormChoice("plain", "no fused form is for the platform 'cpu'")
    assert choose_form("plain", "tpu", None, ROWS) == FormChoice("plain", "model.attention_form='plain'")


def test_shapes_that_the_fused_forms_compute():
    latent = ROWS._replace(width=192)
    assert choose_form("cudnn", "gpu", H100, latent).form == "cudnn"
    assert choose_form("cudnn", "gpu", H100, ROWS._replace(dtype=jnp.dtype("float16"), queries=100, keys=100)).form
    assert choose_form("splash", "tpu", None, latent._replace(queries=2048, is_whole_row=False)).form == "splash"
    longest = ROWS._replace(queries=2**18, keys=2**18, heads=31, width=256, value_width=256)
    assert choose_form("auto", "gpu", H100, longest).form == "cudnn"


@pytest.mark.parametrize(
    ("gpu", "changes", "reason"),
    [
        (None, {}, "this process has no NVIDIA GPU"),
        (LocalGpu("Tesla T4", (7, 5), 91002), {}, "Tesla T4 has compute capability 7.5, and packed rows need 9.0"),
        (LocalGpu("NVIDIA A100", (8, 0), 91002), {}, "NVIDIA A100 has compute capability 8.0"),
        (H100._replace(cudnn=None), {}, "JAX has no cuDNN here"),
        (H100._replace(cudnn=90501), {}, "needs cuDNN 9.6.0 or later except 9.10.0 and 9.10.1, not 9.5.1"),
        (H100._replace(cudnn=91001), {}, "not 9.10.1"),
        (B200._replace(cudnn=91002), {}, "needs cuDNN 9.11.0 or later"),
        (LocalGpu("NVIDIA RTX PRO 6000", (12, 0), 91700), {}, "needs cuDNN 9.18.1 or later"),
        (H100._replace(deterministic=True), {}, "XLA_FLAGS asks for a fixed order of sums"),
        (H100, dict(queries=1, keys=1), "cuDNN's backward pass takes rows of two tokens or more"),
        (H100, dict(dtype=jnp.dtype("float32")), "the compute dtype is float32"),
        (H100, dict(width=20), "heads are 20 and 128 wide, not multiples of 8 up to 256"),
        (H100, dict(value_width=264), "heads are 128 and 264 wide"),
        (B200, dict(width=192), "heads are 192 and 128 wide, not multiples of 8 up to 128"),
        (H100, dict(queries=2048, is_whole_row=False), "a device has 2048 queries of rows of 4096 tokens"),
        (H100, dict(queries=2**19, keys=2**19), "524288 tokens of 32 heads are more than the 2.31 numbers"),
        (H100, dict(queries=2**18, keys=2**18, value_width=256), "262144 tokens of 32 heads"),  # pads keys to 256
    ],
)
def test_rows_that_cudnn_cannot_compute_are_plain_or_refused(gpu, changes, reason):
    rows = ROWS._replace(**changes)
    choice = choose_form("auto", "gpu", gpu, rows)
    assert choice.form == "plain"
    with pytest.raises(UserError, match=f"model.attention_form='cudnn' cannot run here, because .*{reason}") as error:
        choose_form("cudnn", "gpu", gpu, rows)
    assert str(error.value).endswith("; use 'auto' or 'plain'.")
    assert choice.reason in str(error.value)


def test_a_form_of_another_platform_is_refused_with_the_forms_that_run():
    with pytest.raises(
        UserError, match="'cudnn' cannot run here, .* platform 'tpu'; use 'auto' or 'splash' or 'plain'"
    ):
        choose_form("cudnn", "tpu", None, ROWS)
    with pytest.raises(
        UserError, match="'splash' cannot run here, .* platform 'gpu'; use 'auto' or 'cudnn' or 'plain'"
    ):
        choose_form("splash", "gpu", H100, ROWS)
    with pytest.raises(UserError, match="a device has 100 queries and 4096 keys of a row, not multiples of 128"):
        choose_form("splash", "tpu", None, ROWS._replace(queries=100))
