"""composer_jax.checkpoint.huggingface without PyTorch: the mapping is a bijection, and bad input gets one sentence."""

import math

import chex
import jax
import ml_dtypes
import numpy as np
import pytest

from composer_jax.checkpoint.huggingface import model_config
from composer_jax.checkpoint.huggingface.tensor_layout import tensor_layouts
from composer_jax.errors import UserError
from composer_jax.models.config import ModelConfig
from composer_jax.models.model_def import ModelDef
from tests.checkpoint.tensors import from_tensors, to_tensors
from tests.parity.published_configs import KIMI_K2
from tests.parity.small_config import small


def weights(config: ModelConfig):
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: rng.standard_normal(x.shape).astype(x.dtype), ModelDef(config).shapes())


def state_of(config: ModelConfig) -> dict[str, np.ndarray]:
    return to_tensors(*weights(config), config)


VARIANTS = {
    "plain": {},
    "q_lora": {"q_lora_rank": 9},
    "tied": {"tie_embeddings": True},
    "two_dense": {"n_dense_layers": 2},
    "no_dense": {"n_dense_layers": 0},
    "no_shared": {"n_shared_experts": 0},
    "bfloat16": {"param_dtype": "bfloat16"},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_there_and_back_is_exact(variant):
    config = small(**VARIANTS[variant])
    params, bias = weights(config)
    state = to_tensors(params, bias, config)
    assert {name: array.shape for name, array in state.items()} == {
        name: tensor.shape for name, tensor in tensor_layouts(config).items()
    }
    again = from_tensors(state, config)
    chex.assert_trees_all_equal(again, (params, bias), strict=True)


def test_what_is_written_is_a_copy():
    config = small()
    params, bias = weights(config)
    for array in to_tensors(params, bias, config).values():
        assert array.flags.c_contiguous
        assert not any(np.shares_memory(array, leaf) for leaf in jax.tree.leaves((params, bias)))


def test_layouts_by_hand():
    """The two tensors that are split, entry by entry."""
    config = small()
    params, bias = weights(config)
    state = to_tensors(params, bias, config)
    attention = params["moe_layers"]["attention"]
    kv_b = state["model.layers.2.self_attn.kv_b_proj.weight"].reshape(3, 5 + 6, 7)
    np.testing.assert_array_equal(kv_b[2, 4], attention["k_up"][1, :, 2, 4])
    np.testing.assert_array_equal(kv_b[2, 5], attention["v_up"][1, :, 2, 0])
    np.testing.assert_array_equal(
        state["model.layers.1.mlp.experts.3.down_proj.weight"], params["moe_layers"]["feed_forward"]["down"][0, 3].T
    )


def test_fused_experts_are_read():
    config = small()
    params, bias = weights(config)
    state = to_tensors(params, bias, config)
    for layer in (1, 2):
        prefix = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            np.stack([state.pop(f"{prefix}.{e}.{part}_proj.weight") for e in range(4)])
            for part in ("gate", "up", "down")
        )
        state[f"{prefix}.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        state[f"{prefix}.down_proj"] = down
    np.testing.assert_equal(from_tensors(state, config), (params, bias))


def test_bfloat16_files_fill_float32_params():
    config = small()
    state = {name: array.astype(ml_dtypes.bfloat16) for name, array in state_of(config).items()}
    params, _ = from_tensors(state, config)
    table = params["embedding"]["table"]
    assert table.dtype == np.float32
    np.testing.assert_array_equal(table, state["model.embed_tokens.weight"].astype(np.float32))


def test_frequencies_and_a_repeated_tied_head_are_no_surprise():
    config = small(tie_embeddings=True)
    state = state_of(config)
    state["lm_head.weight"] = state["model.embed_tokens.weight"].copy()
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(2, np.float32)
    from_tensors(state, config)
    state["lm_head.weight"][3, 4] += 1
    with pytest.raises(UserError, match="lm_head.weight differs from model.embed_tokens.weight"):
        from_tensors(state, config)


def test_missing_extra_and_misshapen_tensors_are_named():
    config = small()
    state = state_of(config)
    norm = state.pop("model.norm.weight")
    # A transposed square-less matrix has the right number of values, and is still wrong.
    transposed = {"model.norm.weight": norm, "lm_head.weight": state["lm_head.weight"].T}
    for change, message in (
        ({}, r"lacks model\.norm\.weight;"),
        ({"model.final_norm.weight": norm}, "lacks model.norm.weight; has, unexpected, model.final_norm.weight;"),
        ({"model.norm.weight": np.ones(11, np.float32)}, r"model\.norm\.weight as \[11\] instead of \[10\];"),
        (transposed, r"lm_head\.weight as \[10, 23\] instead of \[23, 10\]"),
    ):
        with pytest.raises(UserError, match=message):
            from_tensors(state | change, config)


def test_many_missing_tensors_are_counted():
    with pytest.raises(UserError) as error:
        from_tensors(state_of(small()), small(n_experts=6, n_dense_layers=1))
    assert "mlp.experts.4.gate_proj.weight" in str(error.value)
    assert "and 8 more" in str(error.value)  # 2 layers x 2 experts x 3 matrices, 4 of them named


def test_half_fused_checkpoints_are_refused():
    state = state_of(small()) | {"model.layers.1.mlp.experts.gate_up_proj": np.zeros((4, 16, 10), np.float32)}
    with pytest.raises(UserError, match="lacks model.layers.1.mlp.experts.down_proj.*unexpected.*experts.0.gate_proj"):
        from_tensors(state, small())


@pytest.mark.parametrize("change", [{"embedding_taps": 3}, {"attention_scale": 2.0}, {"latent_norm_eps": 1e-5}])
def test_what_has_no_place_in_a_checkpoint_is_refused(change):
    config = small(**change)
    with pytest.raises(UserError, match=f"{next(iter(change))}=.* cannot be stored"):
        to_tensors(*weights(config), config)


def test_arrays_of_another_network_are_refused():
    with pytest.raises(UserError, match=r"The network has embedding\.table as \[23, 10\] instead of \[24, 10\]"):
        to_tensors(*weights(small()), small(vocab_size=24))


def test_full_scale_layout():
    """Kimi K2's published sizes: every weight has a place, and there are 1.03 trillion of them."""
    config = model_config(KIMI_K2)
    table = tensor_layouts(config)
    biases = 60 * 384
    total = sum(math.prod(tensor.shape) for tensor in table.values()) - biases
    assert total == ModelDef(config).parameter_count()
    assert 1.02e12 < total < 1.04e12
    assert table["model.layers.60.mlp.experts.383.down_proj.weight"].shape == (7168, 2048)
    assert table["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"].shape == (576, 7168)
