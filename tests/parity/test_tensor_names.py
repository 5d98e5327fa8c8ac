"""composer_jax.checkpoint.huggingface without PyTorch: the mapping is a bijection, and bad input gets one sentence."""

import json
import math

import jax
import ml_dtypes
import numpy as np
import pytest

from composer_jax.checkpoint.huggingface import from_tensors, hf_config, model_config, tensor_layouts, to_tensors
from composer_jax.errors import UserError
from composer_jax.models.config import ModelConfig
from composer_jax.models.model_def import ModelDef
from composer_jax.models.presets import PRESETS
from composer_jax.models.rope import Yarn

KIMI_K2 = dict(  # https://huggingface.co/moonshotai/Kimi-K2-Instruct
    model_type="kimi_k2",
    vocab_size=163_840,
    hidden_size=7168,
    num_hidden_layers=61,
    first_k_dense_replace=1,
    num_attention_heads=64,
    num_key_value_heads=64,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    intermediate_size=18_432,
    moe_intermediate_size=2048,
    n_routed_experts=384,
    num_experts_per_tok=8,
    n_shared_experts=1,
    n_group=1,
    topk_group=1,
    scoring_func="sigmoid",
    topk_method="noaux_tc",
    norm_topk_prob=True,
    routed_scaling_factor=2.827,
    moe_layer_freq=1,
    hidden_act="silu",
    attention_bias=False,
    rms_norm_eps=1e-5,
    rope_theta=50_000,
    rope_scaling={
        "type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 1.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    max_position_embeddings=131_072,
    num_nextn_predict_layers=0,
    tie_word_embeddings=False,
)


PUBLISHED = {
    # https://huggingface.co/Qwen/Qwen3-30B-A3B
    "qwen3_30b_a3b": dict(
        model_type="qwen3_moe",
        attention_bias=False,
        decoder_sparse_step=1,
        head_dim=128,
        hidden_act="silu",
        hidden_size=2048,
        intermediate_size=6144,
        max_position_embeddings=40_960,
        mlp_only_layers=[],
        moe_intermediate_size=768,
        norm_topk_prob=True,
        num_attention_heads=32,
        num_experts=128,
        num_experts_per_tok=8,
        num_hidden_layers=48,
        num_key_value_heads=4,
        rms_norm_eps=1e-6,
        rope_scaling=None,
        rope_theta=1_000_000.0,
        sliding_window=None,
        tie_word_embeddings=False,
        use_sliding_window=False,
        vocab_size=151_936,
    ),
    # https://huggingface.co/zai-org/GLM-4.5
    "glm_4_5": dict(
        model_type="glm4_moe",
        attention_bias=True,
        head_dim=128,
        hidden_act="silu",
        hidden_size=5120,
        partial_rotary_factor=0.5,
        intermediate_size=12_288,
        max_position_embeddings=131_072,
        moe_intermediate_size=1536,
        norm_topk_prob=True,
        num_attention_heads=96,
        n_group=1,
        topk_group=1,
        n_routed_experts=160,
        n_shared_experts=1,
        routed_scaling_factor=2.5,
        num_experts_per_tok=8,
        first_k_dense_replace=3,
        num_hidden_layers=92,
        num_key_value_heads=8,
        num_nextn_predict_layers=1,
        rms_norm_eps=1e-5,
        rope_scaling=None,
        rope_theta=1_000_000,
        tie_word_embeddings=False,
        use_qk_norm=True,
        vocab_size=151_552,
    ),
    # https://huggingface.co/openai/gpt-oss-20b
    "gpt_oss_20b": dict(
        model_type="gpt_oss",
        attention_bias=True,
        head_dim=64,
        hidden_act="silu",
        hidden_size=2880,
        initial_context_length=4096,
        intermediate_size=2880,
        layer_types=["sliding_attention", "full_attention"] * 12,
        max_position_embeddings=131_072,
        num_attention_heads=64,
        num_experts_per_tok=4,
        num_hidden_layers=24,
        num_key_value_heads=8,
        num_local_experts=32,
        rms_norm_eps=1e-5,
        rope_scaling={
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        rope_theta=150_000,
        sliding_window=128,
        swiglu_limit=7.0,
        tie_word_embeddings=False,
        vocab_size=201_088,
    ),
}


def small(**changes) -> ModelConfig:
    fields = dict(
        vocab_size=23,
        d_model=10,
        n_layers=3,
        n_dense_layers=1,
        n_heads=3,
        kv_lora_rank=7,
        qk_nope_dim=5,
        qk_rope_dim=4,
        v_head_dim=6,
        dense_ff_dim=11,
        expert_ff_dim=8,
        n_experts=4,
        experts_per_token=2,
        n_shared_experts=2,
    )
    return ModelConfig(**(fields | changes))


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
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b, strict=True), again, (params, bias))


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
    with pytest.raises(UserError, match=r"The checkpoint lacks model\.norm\.weight;"):
        from_tensors(state, config)
    with pytest.raises(UserError, match="lacks model.norm.weight; has, unexpected, model.final_norm.weight;"):
        from_tensors(state | {"model.final_norm.weight": norm}, config)
    with pytest.raises(UserError, match=r"has model\.norm\.weight as \[11\] instead of \[10\];"):
        from_tensors(state | {"model.norm.weight": np.ones(11, np.float32)}, config)
    # A transposed square-less matrix has the right number of values, and is still wrong.
    state["model.norm.weight"] = norm
    state["lm_head.weight"] = state["lm_head.weight"].T
    with pytest.raises(UserError, match=r"lm_head\.weight as \[10, 23\] instead of \[23, 10\]"):
        from_tensors(state, config)


def test_many_missing_tensors_are_counted():
    with pytest.raises(UserError) as error:
        from_tensors(state_of(small()), small(n_experts=6, n_dense_layers=1))
    assert "mlp.experts.4.gate_proj.weight" in str(error.value)
    assert "and 8 more" in str(error.value)  # 2 layers x 2 experts x 3 matrices, 4 of them named


def test_half_fused_checkpoints_are_refused():
    state = state_of(small()) | {"model.layers.1.mlp.experts.gate_up_proj": np.zeros((4, 16, 10), np.float32)}
    with pytest.raises(UserError, match="lacks model.layers.1.mlp.experts.down_proj.*unexpected.*experts.0.gate_proj"):
        from_tensors(state, small())


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, np.int8])
def test_quantised_tensors_are_refused(dtype):
    state = state_of(small())
    name = "model.layers.1.self_attn.o_proj.weight"
    state[name] = state[name].astype(dtype)
    with pytest.raises(UserError, match=f"{name} is .*floats of two bytes"):
        from_tensors(state, small())


@pytest.mark.parametrize("change", [{"embedding_taps": 3}, {"attention_scale": 2.0}, {"latent_norm_eps": 1e-5}])
def test_what_has_no_place_in_a_checkpoint_is_refused(change):
    config = small(**change)
    with pytest.raises(UserError, match=f"{next(iter(change))}=.* has no place"):
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


# ------------------------------------------------------------------------------------------------------- config.json


def test_config_of_kimi_k2():
    assert model_config(KIMI_K2) == PRESETS["kimi_k2"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_configs_of_other_families(name):
    assert model_config(PUBLISHED[name]) == PRESETS[name]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("qwen3_30b_a3b", {"hidden_size": None}, "hidden_size=None, which is not a whole number"),
        ("qwen3_30b_a3b", {"num_key_value_heads": 0}, "n_kv_heads=0 must divide n_heads=32"),
        ("qwen3_30b_a3b", {"num_attention_heads": -1}, "num_attention_heads=-1, which cannot be negative"),
        ("qwen3_30b_a3b", {"head_dim": "128"}, "head_dim='128', which is not a whole number"),
        ("qwen3_30b_a3b", {"attention_bias": "false"}, "attention_bias='false', which is not true or false"),
        ("qwen3_30b_a3b", {"rope_scaling": [4]}, r"\[4\], which is not an object"),
        ("qwen3_30b_a3b", {"rope_scaling": {"type": "yarn", "factor": "4"}}, "factor='4', which is not a number"),
        ("glm_4_5", {"partial_rotary_factor": "0.5"}, "partial_rotary_factor='0.5', which is not a number"),
        ("glm_4_5", {"partial_rotary_factor": 2.0}, "qk_nope_dim=-128"),
        ("gpt_oss_20b", {"sliding_window": 0}, "sliding_window=0"),
        ("gpt_oss_20b", {"layer_types": ["full_attention"] * 24}, "only alternating"),
    ],
)
def test_what_is_wrong_with_a_value_is_said(name, change, message):
    with pytest.raises(UserError, match=message):
        model_config(PUBLISHED[name] | change)


def test_what_people_add_to_a_config_of_ours_counts():
    """Both generations' keys are written; the instructions for long contexts say to edit rope_scaling."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
    edited = model_config(hf_config(PRESETS["qwen3_30b_a3b"]) | {"rope_scaling": scaling})
    assert (edited.yarn.factor, edited.yarn.original_context, edited.rope_theta) == (4.0, 32_768, 1_000_000.0)


def test_a_rotary_part_that_their_rounding_would_change_is_refused():
    odd = small(kv_lora_rank=None, n_kv_heads=3, qk_nope_dim=14, qk_rope_dim=30, v_head_dim=44, rope_halves=True)
    with pytest.raises(UserError, match="qk_rope_dim=30 has no place in a glm4_moe checkpoint"):
        hf_config(odd)


def test_rotary_base_of_both_generations():
    new = {key: value for key, value in KIMI_K2.items() if not key.startswith("rope_")}
    new["rope_parameters"] = {"rope_theta": 50_000.0, **KIMI_K2["rope_scaling"]}
    assert model_config(new) == model_config(KIMI_K2)
    del new["rope_parameters"]
    with pytest.raises(UserError, match="lacks rope_theta"):
        model_config(new)


def test_null_means_what_it_means_there():
    null = dict.fromkeys(("q_lora_rank", "n_group", "topk_group", "n_shared_experts", "num_key_value_heads"))
    config = model_config(KIMI_K2 | null)
    assert config.q_lora_rank is None
    assert (config.n_expert_groups, config.topk_groups, config.n_shared_experts) == (1, 1, 0)


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "llama"},
        {"rope_scaling": {"type": "longrope", "factor": 32.0}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}, "rope_scaling": None},
        {"scoring_func": "softmax"},
        {"topk_method": "greedy"},
        {"norm_topk_prob": False},
        {"moe_layer_freq": 2},
        {"hidden_act": "gelu"},
        {"attention_bias": True},
        {"rope_interleave": False},
        {"rope_interleave": None},
        {"num_key_value_heads": 8},
    ],
)
def test_what_the_decoder_cannot_do_is_refused(change):
    (key, value), *_ = change.items()
    with pytest.raises(UserError, match="can(not)? be read") as error:
        model_config(KIMI_K2 | change)
    assert (repr(value.get("type") or value.get("rope_type")) if "rope_" in key and value else key) in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_factor": 1.5}, "attention_factor=1.5; only null can be read yet"),
        ({"mscale_all_dim": 0.0}, "mscale=1.0 and mscale_all_dim=0.0; both or none"),
        ({"factor": 0.5}, "yarn.factor=0.5 would shorten the context"),
        ({"beta_slow": 2.0}, "beta_slow=2.0 <= beta_fast=1.0"),
    ],
)
def test_yarn_that_cannot_be_read_is_refused(change, message):
    with pytest.raises(UserError, match=message):
        model_config(KIMI_K2 | {"rope_scaling": KIMI_K2["rope_scaling"] | change})
    without = {key: value for key, value in KIMI_K2["rope_scaling"].items() if key != "factor"}
    with pytest.raises(UserError, match="'yarn' and lacks its factor"):
        model_config(KIMI_K2 | {"rope_scaling": without})


CONFIGS = PRESETS | {
    "yarn_without_mscale": small(yarn=Yarn(4.0, mscale_all_dim=0.0)),
    "tied": small(tie_embeddings=True),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_config_that_is_written_is_the_one_that_is_read(name):
    written = json.loads(json.dumps(hf_config(CONFIGS[name])))
    assert model_config(written) == CONFIGS[name]
    old = {key: value for key, value in written.items() if key != "rope_parameters"}  # transformers before 5
    assert model_config(old) == CONFIGS[name]


def test_the_text_tower_of_kimi_k2_5():
    scaling = KIMI_K2["rope_scaling"] | {"factor": 64.0, "beta_fast": 32.0}
    text = KIMI_K2 | {"rope_scaling": scaling, "max_position_embeddings": 262_144}
    whole = {"model_type": "kimi_k25", "text_config": text, "tie_word_embeddings": True, "vision_config": {}}
    assert model_config(whole) == PRESETS["kimi_k2_5"]
    with pytest.raises(UserError, match="kimi_k25.* lacks its text_config"):
        model_config({"model_type": "kimi_k25"})


def test_missing_keys_are_named():
    with pytest.raises(UserError, match=r"config\.json lacks kv_lora_rank, q_lora_rank\."):
        model_config({key: value for key, value in KIMI_K2.items() if key not in ("kv_lora_rank", "q_lora_rank")})
