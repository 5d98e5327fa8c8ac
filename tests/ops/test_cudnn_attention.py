"""Everything around cuDNN's calls against the plain form, with the calls replaced by what cuDNN computes."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from composer_jax.ops import cudnn_attention, packed_attention
from composer_jax.ops.local_gpu import LocalGpu
from composer_jax.ops.packed_attention import AttentionMask, attend_rows, products
from tests.models.small import relative_error
from tests.ops import cudnn_reference

H100 = LocalGpu("NVIDIA H100 80GB HBM3", (9, 0), 91002)
S, H, N = 40, 4, 2
WINDOW = 5
MANY = [[1] * 3 + [2] * 10 + [5] + [6] * 9 + [7] * 8 + [0] * 9, [1] * 5 + [0] * 3 + [2] * 20 + [3] + [4] * 11]
"""Documents of one token, segments that leave out numbers, padding between documents."""
NONE_AND_ONE = [[0] * S, [1] * S]


@pytest.fixture
def reference(monkeypatch):
    monkeypatch.setattr(cudnn_attention, "fused_forward", cudnn_reference.forward)
    monkeypatch.setattr(cudnn_attention, "fused_backward", cudnn_reference.backward)


def value_and_gradients(form, segments, *, widths, window, windowed, sinks, dtype):
    rng = np.random.default_rng(0)
    (x, v_width), b = widths, len(segments)
    shapes = (b, S, H, x), (b, S, N, x), (b, S, N, v_width)
    operands = [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]
    operands += [jnp.asarray(rng.standard_normal(H), jnp.float32)] * sinks
    weight = jnp.asarray(rng.standard_normal((b, S, H, v_width)), dtype)
    segments = jnp.asarray(segments, jnp.int32)

    def objective(q, k, v, sinks=None):
        y = form(q / np.sqrt(x).astype(q.dtype), k, v, segments, window, jnp.asarray(windowed), sinks)
        return jnp.sum(y * weight, dtype=jnp.float32), y

    return jax.jit(jax.grad(objective, tuple(range(len(operands))), has_aux=True))(*operands)


def plain(q, k, v, segments, window, windowed, sinks):
    return products(q, k, v, AttentionMask(jnp.arange(S), segments, segments, window=window), windowed, sinks)


ALL = dict(window=WINDOW, windowed=True, sinks=True, widths=(24, 16))
CASES = {
    "documents": (MANY, {}),
    "none_and_one": (NONE_AND_ONE, dict(window=WINDOW, windowed=False, widths=(8, 24), sinks=True)),
    "all": (MANY, ALL),
    "all_in_several_calls": (MANY, ALL | dict(DOCUMENTS=2)),
    "rows_in_turn": (MANY, ALL | dict(DOCUMENTS=3, WORKSPACE=3 * S * H * 24 * 8)),
    "fewer_places_for_a_long_row": (MANY[:1], dict(WORKSPACE=2 * S * H * 16 * 8)),
}


@pytest.mark.parametrize(("segments", "how"), CASES.values(), ids=CASES.keys())
def test_values_and_gradients_are_those_of_the_plain_form(reference, monkeypatch, segments, how):
    how = dict(widths=(16, 16), window=None, windowed=False, sinks=False, dtype=jnp.float32) | how
    for name in ("DOCUMENTS", "WORKSPACE"):
        monkeypatch.setattr(cudnn_attention, name, how.pop(name, getattr(cudnn_attention, name)))
    actual = value_and_gradients(cudnn_attention.attend, segments, **how)
    expected = value_and_gradients(plain, segments, **how)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert np.abs(e).max() > 0.01
        assert relative_error(a, e) < 2e-5
    (dq, dk, dv, *_), y = actual
    for array in (dq, dk, dv, y):
        assert not np.asarray(array)[np.asarray(segments) == 0].any()


def test_bfloat16_differs_by_rounding_only(reference):
    how = dict(widths=(16, 16), window=None, windowed=False, sinks=True)
    (*grads, dsinks), y = value_and_gradients(cudnn_attention.attend, MANY, dtype=jnp.bfloat16, **how)
    expected = value_and_gradients(plain, MANY, dtype=jnp.float32, **how)
    assert [a.dtype for a in (*grads, y)] == [jnp.bfloat16] * 4 and dsinks.dtype == jnp.float32
    for a, e in zip((*grads, dsinks, y), jax.tree.leaves(expected), strict=True):
        assert relative_error(a.astype(jnp.float32), e) < 2e-2


def test_devices_that_share_sinks_and_nothing_else_compute_what_one_does(reference):
    """Under shard_map with its VMA checks; the gradient of sinks is summed over the devices."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,))
    how = dict(widths=(16, 16), window=WINDOW, windowed=True, sinks=True, dtype=jnp.float32)

    def sharded(q, k, v, segments, window, windowed, sinks):
        specs = (PartitionSpec("data"),) * 4 + (PartitionSpec(),) * 2
        rows = [jax.sharding.reshard(array, specs[0]) for array in (q, k, v, segments)]
        per_device = lambda *operands: cudnn_attention.attend(*operands[:4], window, *operands[4:])  # noqa: E731
        y = jax.shard_map(per_device, mesh=mesh, in_specs=specs, out_specs=specs[0])(*rows, windowed, sinks)
        return jax.sharding.reshard(y, PartitionSpec())

    with jax.set_mesh(mesh):
        actual = value_and_gradients(sharded, MANY, **how)
    expected = value_and_gradients(plain, MANY, **how)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert relative_error(a, e) < 2e-5


def lowered_for_cuda(function, *operands) -> str:
    return jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()


def custom_calls(text: str) -> dict[str, str]:
    """The types, layouts and settings of each custom call of cuDNN, by its target."""
    calls = re.findall(r"stablehlo.custom_call @(__cudnn\$\w+)\([^)]*\) (\{.*)", text)
    return {target: re.sub(r" loc\(.*", "", rest) for target, rest in calls}


def shapes(*sizes, dtype=jnp.bfloat16):
    return [jax.ShapeDtypeStruct(size, dtype) for size in sizes]


@pytest.mark.parametrize("window", [None, 100])
def test_the_calls_are_those_of_jax_own_function(monkeypatch, window):
    """With as many heads of keys as of queries, whose offsets JAX 0.10.2 computes correctly, too."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: H100.cudnn)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda capability: True)
    places = jax.ShapeDtypeStruct((2, cudnn_attention.DOCUMENTS), jnp.int32)
    ends = jax.ShapeDtypeStruct((2, cudnn_attention.DOCUMENTS + 1), jnp.int32)
    rows = shapes(*[(2, 256, 4, 64)] * 3)

    def jax_form(q, k, v, lengths, offsets):
        how = dict(mask_type=cudnn.MaskType.PADDING_CAUSAL, sliding_window_length=window)
        places = dict(q_seqlen=lengths, kv_seqlen=lengths, q_offsets=offsets, kv_offsets=offsets)
        return cudnn.dot_product_attention(q, k, v, **places, **how).astype(jnp.float32).sum()

    def our_form(q, k, v, segments):
        windowed = None if window is None else jnp.asarray(True)
        return cudnn_attention.attend(q, k, v, segments, window, windowed).astype(jnp.float32).sum()

    expected = custom_calls(lowered_for_cuda(jax.grad(jax_form, (0, 1, 2)), *rows, places, ends))
    segments = jax.ShapeDtypeStruct((2, 256), jnp.int32)
    ours = lowered_for_cuda(jax.grad(our_form, (0, 1, 2)), *rows, segments)
    assert list(expected) == ["__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"]
    assert all(call in ours for call in expected.values())
    assert "max_seg_per_batch" in expected["__cudnn$fmhaSoftmax"]


def test_calls_stay_within_32_bit_offsets_and_a_bounded_workspace():
    """Of four rows with 0.8 billion numbers of queries each, a call has one, and places for two documents."""
    rows = shapes((4, 2**16, 64, 192), (4, 2**16, 64, 192), (4, 2**16, 64, 128))
    text = lowered_for_cuda(cudnn_attention.attend, *rows, *shapes((4, 2**16), dtype=jnp.int32))
    (call,) = custom_calls(text).values()
    assert "(tensor<1x65536x64x192xbf16>, " in call
    assert "tensor<1x2xi32>, tensor<1x2xi32>, tensor<1x3xi32>, tensor<1x3xi32>) -> " in call
    assert cudnn_attention.backward_workspace(4, 2**16, 64, 64, 192) == 2 * 4 * 2**16 * 64 * 192


@pytest.mark.parametrize(("heads", "places"), [(32, 8), (4, 4)])
def test_grouped_queries_take_twice_the_workspace(heads, places):
    rows = shapes((1, 2**16, 32, 128), (1, 2**16, heads, 128), (1, 2**16, heads, 128))
    text = lowered_for_cuda(cudnn_attention.attend, *rows, *shapes((1, 2**16), dtype=jnp.int32))
    assert f"tensor<1x{places}xi32>, tensor<1x{places}xi32>, " in "".join(custom_calls(text).values())
    assert cudnn_attention.backward_workspace(1, 2**16, 32, heads, 128) == cudnn_attention.WORKSPACE == 2**33


def rows_form(q, k, v, segments, sinks, windowed, *, form="auto"):
    mask = AttentionMask(jnp.arange(q.shape[1]), segments, segments, window=64, form=form)
    return attend_rows(q, k, v, mask, windowed, sinks)


SCORES = r"(384|768)x384x[fi]"  # [S,T], also of two heads that share keys
LATENT = [
    *shapes((2, 384, 4, 192), (2, 384, 2, 192), (2, 384, 2, 128)),
    *shapes((2, 384), dtype=jnp.int32),
    *shapes((4,), dtype=jnp.float32),
    *shapes((), dtype=bool),
]


def loss_gradient(function):
    return jax.grad(lambda *operands: jnp.sum(function(*operands).astype(jnp.float32) ** 2), (0, 1, 2, 4))


def test_a_gpu_program_has_the_calls_and_no_array_of_scores(monkeypatch):
    monkeypatch.setattr(packed_attention, "local_gpu", lambda: H100)
    text = lowered_for_cuda(loss_gradient(rows_form), *LATENT)
    assert set(custom_calls(text)) == {"__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"}
    assert not re.search(SCORES, text)
    assert re.search(SCORES, lowered_for_cuda(loss_gradient(functools.partial(rows_form, form="plain")), *LATENT))


def test_layers_keep_their_operands_outputs_and_log_sums_for_the_backward_pass(monkeypatch):
    """A scan over five layers stacks nothing else, and carries no masks of the plain form."""
    monkeypatch.setattr(packed_attention, "local_gpu", lambda: H100)
    q, k, v, segments, sinks, flag = LATENT

    def loss(x, weights, flags, segments, sinks):
        def layer(x, inputs):
            weight, windowed = inputs
            heads = jnp.split(x * weight, [768, 1152, 1408], axis=-1)[:3]
            operands = [head.reshape(operand.shape) for head, operand in zip(heads, (q, k, v), strict=True)]
            y = rows_form(*operands, segments, sinks, windowed)
            return x + jnp.pad(y.reshape(2, 384, 512), [(0, 0), (0, 0), (0, 912)]), None

        return jnp.sum(jax.lax.scan(layer, x, (weights, flags))[0].astype(jnp.float32) ** 2)

    (x, weights), (flags,) = shapes((2, 384, 1424), (5, 1424)), shapes((5,), dtype=bool)
    text = lowered_for_cuda(jax.grad(loss, (0, 1, 4)), x, weights, flags, segments, sinks)
    kept = {"5x2x384x4x192xbf16", "5x2x384x2x192xbf16", "5x2x384x2x128xbf16", "5x2x384x4x128xbf16", "5x2x384x4xf32"}
    assert set(re.findall(r"tensor<(5x2x384x[^>]*)>", text)) == {"5x2x384x1424xbf16"} | kept  # the layers' inputs
    assert not re.search(SCORES, text)


def test_kept_outputs_save_the_second_forward_pass(monkeypatch):
    monkeypatch.setattr(packed_attention, "local_gpu", lambda: H100)

    def calls(*names):
        policy = jax.checkpoint_policies.save_only_these_names(*names)
        form = jax.checkpoint(functools.partial(rows_form, form="cudnn"), policy=policy)
        return lowered_for_cuda(loss_gradient(form), *LATENT).count("@__cudnn$fmhaSoftmax(")

    assert calls() == 2 * calls("attention")


def test_where_no_such_gpu_is_the_form_is_not_traced():
    assert "dot_product_attention" not in str(jax.make_jaxpr(rows_form)(*LATENT))
    assert not custom_calls(lowered_for_cuda(rows_form, *LATENT))
