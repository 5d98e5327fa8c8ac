"""config.json of the families: read as the presets, written as it was read, and bad values get one sentence."""

import dataclasses
import json

import pytest

from composer_jax.checkpoint.huggingface import hf_config, model_config
from composer_jax.checkpoint.huggingface.families import FAMILIES
from composer_jax.errors import UserError
from composer_jax.models.rope import Yarn
from tests.models.networks import NETWORKS
from tests.parity.published_configs import KIMI_K2, PUBLISHED
from tests.parity.small_config import small


def test_config_of_kimi_k2():
    assert model_config(KIMI_K2) == NETWORKS["kimi_k2"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_configs_of_other_families(name):
    assert model_config(PUBLISHED[name]) == NETWORKS[name]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("qwen3_30b_a3b", {"hidden_size": None}, "hidden_size=None, which is not a whole number"),
        ("qwen3_30b_a3b", {"num_key_value_heads": 0}, "n_kv_heads=0 must be a whole number"),
        ("qwen3_30b_a3b", {"num_attention_heads": -1}, "num_attention_heads=-1, which cannot be negative"),
        ("qwen3_30b_a3b", {"head_dim": "128"}, "head_dim='128', which is not a whole number"),
        ("qwen3_30b_a3b", {"attention_bias": "false"}, "attention_bias='false', which is not true or false"),
        ("qwen3_30b_a3b", {"rope_scaling": [4]}, r"\[4\], which is not an object"),
        ("qwen3_30b_a3b", {"rope_scaling": {"type": "yarn", "factor": "4"}}, "factor='4', which is not a number"),
        ("glm_4_5", {"partial_rotary_factor": "0.5"}, "partial_rotary_factor='0.5', which is not a number"),
        ("glm_4_5", {"partial_rotary_factor": 2.0}, "qk_nope_dim=-128"),
        ("smollm2_135m", {"num_key_value_heads": 0}, "n_kv_heads=0 must be a whole number"),
        ("smollm2_135m", {"mlp_bias": True}, "mlp_bias=True; only False is supported"),
        ("smollm2_135m", {"hidden_act": "gelu"}, "hidden_act='gelu'; only 'silu' is supported"),
        ("smollm2_135m", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5; only 1 is supported"),
        ("qwen2_5_coder_7b", {"use_sliding_window": True}, "use_sliding_window=True; only False is supported"),
        ("qwen3_8b", {"use_sliding_window": True}, "use_sliding_window=True; only False is supported"),
        ("qwen3_8b", {"layer_types": ["sliding_attention"] * 36}, "only 'full_attention' is supported"),
        ("qwen3_30b_a3b", {"decoder_sparse_step": 0}, "decoder_sparse_step=0, which must be 1 or more"),
        ("qwen3_30b_a3b", {"mlp_only_layers": 3}, "mlp_only_layers=3, which is not a list"),
        ("qwen3_30b_a3b", {"mlp_only_layers": ["3"]}, r"mlp_only_layers=\['3'\], which is not a list"),
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
    edited = model_config(hf_config(NETWORKS["qwen3_30b_a3b"]) | {"rope_scaling": scaling})
    assert (edited.yarn.factor, edited.yarn.original_context, edited.rope_theta) == (4.0, 32_768, 1_000_000.0)
    config = hf_config(NETWORKS["qwen3_30b_a3b"]) | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
    assert model_config(config).yarn.original_context == config["max_position_embeddings"]


def test_a_rotary_part_that_their_rounding_would_change_is_refused():
    odd = small(kv_lora_rank=None, n_kv_heads=3, qk_nope_dim=14, qk_rope_dim=30, v_head_dim=44, rope_halves=True)
    with pytest.raises(UserError, match="qk_rope_dim=30 cannot be stored in a glm4_moe checkpoint"):
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
        {"model_type": "mistral"},
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
    with pytest.raises(UserError, match="supported") as error:
        model_config(KIMI_K2 | change)
    assert (repr(value.get("type") or value.get("rope_type")) if "rope_" in key and value else key) in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_factor": 1.5}, "attention_factor=1.5; only null is supported"),
        ({"mscale_all_dim": 0.0}, "mscale=1.0 and mscale_all_dim=0.0; both or none"),
        ({"factor": 0.5}, "yarn.factor=0.5 shortens the context"),
        ({"beta_slow": 2.0}, "beta_slow=2.0 <= beta_fast=1.0"),
    ],
)
def test_yarn_that_cannot_be_read_is_refused(change, message):
    with pytest.raises(UserError, match=message):
        model_config(KIMI_K2 | {"rope_scaling": KIMI_K2["rope_scaling"] | change})
    without = {key: value for key, value in KIMI_K2["rope_scaling"].items() if key != "factor"}
    with pytest.raises(UserError, match="'yarn' and lacks its factor"):
        model_config(KIMI_K2 | {"rope_scaling": without})


def test_which_layers_of_qwen3_moe_have_experts():
    """The cases of transformers' Qwen3MoeDecoderLayer."""
    base = PUBLISHED["qwen3_30b_a3b"] | {"num_hidden_layers": 6}

    def dense(**changes):
        config = model_config(base | changes)
        assert hf_config(config)["mlp_only_layers"] == [i for i in range(6) if config.is_dense(i)]
        return config.n_dense_layers, config.dense_layers

    assert dense() == dense(mlp_only_layers=None) == (0, None)
    assert dense(mlp_only_layers=[0, 1]) == (2, None)
    assert dense(mlp_only_layers=[4, 1, 9]) == (0, (1, 4))
    assert dense(decoder_sparse_step=2) == (0, (0, 2, 4))
    assert dense(decoder_sparse_step=3, mlp_only_layers=[2]) == (5, None)
    dense_everywhere = model_config(base | {"decoder_sparse_step": 7})
    assert dense_everywhere == model_config(base | {"num_experts": 0})
    assert dense_everywhere.n_experts == 0 and hf_config(dense_everywhere)["model_type"] == "qwen3"


def test_what_a_llama_config_may_leave_out():
    """Llama 2's config.json has no rope_theta, that of Llama 1 no num_key_value_heads."""
    old = {k: v for k, v in PUBLISHED["smollm2_135m"].items() if k not in ("rope_theta", "num_key_value_heads")}
    config = model_config(old)
    assert (config.rope_theta, config.n_kv_heads) == (10_000.0, 9)
    assert model_config(old | {"num_key_value_heads": None}) == config


def test_qwen3_has_heads_of_128_unless_its_config_says_otherwise():
    without = {key: value for key, value in PUBLISHED["qwen3_8b"].items() if key != "head_dim"}
    assert model_config(without | {"num_attention_heads": 16}).v_head_dim == 128


@pytest.mark.parametrize("key", ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"])
def test_the_rescaling_of_llama_3_needs_all_its_numbers(key):
    published = PUBLISHED["llama_3_1_8b"]
    scaling = {name: value for name, value in published["rope_scaling"].items() if name != key}
    with pytest.raises(UserError, match=f"'llama3' and lacks its {key}"):
        model_config(published | {"rope_scaling": scaling})
    with pytest.raises(UserError, match=f"{key}='8', which is not a"):
        model_config(published | {"rope_scaling": scaling | {key: "8"}})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qk_norm": True, "n_mtp_modules": 1}, "n_mtp_modules=1 cannot be stored in a qwen3 checkpoint"),
        ({"out_bias": True}, "qkv_bias=False and out_bias=True share the key attention_bias of a llama checkpoint"),
        ({"attention_sinks": True}, "attention_sinks=True cannot be stored in a llama checkpoint"),
        ({"n_heads": 15}, "n_heads=15 cannot be stored in a llama checkpoint"),
    ],
)
def test_a_network_without_experts_that_no_family_has_is_refused(changes, message):
    with pytest.raises(UserError, match=message):
        hf_config(dataclasses.replace(NETWORKS["smollm2_135m"], **({"n_heads": 9, "n_kv_heads": 3} | changes)))
    latent = dataclasses.replace(
        NETWORKS["smollm2_135m"], n_kv_heads=None, kv_lora_rank=16, qk_nope_dim=64, rope_halves=False
    )
    with pytest.raises(UserError, match="n_experts=0 cannot be stored in a deepseek_v3 checkpoint"):
        hf_config(latent)


@pytest.mark.parametrize(
    ("name", "model_type"),
    [("smollm2_135m", "llama"), ("llama_3_1_8b", "llama"), ("qwen2_5_coder_7b", "qwen2"), ("qwen3_8b", "qwen3")],
)
def test_the_family_of_a_network_without_experts(name, model_type):
    assert hf_config(NETWORKS[name])["model_type"] == model_type


CONFIGS = NETWORKS | {
    "experts_in_every_other_layer": dataclasses.replace(NETWORKS["qwen3_30b_a3b"], dense_layers=(0, 2, 5)),
    "llama_with_biases": dataclasses.replace(NETWORKS["smollm2_135m"], qkv_bias=True, out_bias=True),
    "llama_with_yarn": dataclasses.replace(NETWORKS["smollm2_135m"], yarn=Yarn(4.0, mscale_all_dim=0.0)),
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
    assert model_config(whole) == NETWORKS["kimi_k2_5"]
    with pytest.raises(UserError, match="kimi_k25.* lacks its text_config"):
        model_config({"model_type": "kimi_k25"})


def test_missing_keys_are_named():
    with pytest.raises(UserError, match=r"config\.json lacks kv_lora_rank, q_lora_rank\."):
        model_config({key: value for key, value in KIMI_K2.items() if key not in ("kv_lora_rank", "q_lora_rank")})


MINIMAL = {
    name: {key: value for key, value in config.items() if key in required}
    for name, config in {**PUBLISHED, "kimi_k2": KIMI_K2 | {"model_type": "deepseek_v3"}}.items()
    for family in FAMILIES
    if family.model_type == config["model_type"]
    for required in [{"model_type", "rope_theta", *(key for keys in family.fields.values() for key in keys.split())}]
}
"""Published configs without every key that may be left out."""


@pytest.mark.parametrize("name", MINIMAL)
def test_what_a_config_leaves_out_has_the_default_of_transformers(name):
    """Of the whole minimal config, and of the published one without any one of its keys."""
    from transformers import AutoConfig

    published = PUBLISHED[name] if name in PUBLISHED else KIMI_K2 | {"model_type": "deepseek_v3"}
    heads = {"num_key_value_heads": published["num_key_value_heads"]}  # of DeepSeek-V3's attention always all
    less = [MINIMAL[name] | heads, *({k: v for k, v in published.items() if k != key} | heads for key in published)]
    read = 0
    for config in less:
        try:
            ours = model_config(config)
        except UserError as error:
            missing = set(published) - set(config)
            assert any(f"lacks {key}" in str(error) or f"{key}=None" in str(error) for key in missing)
            continue
        assert ours == model_config(AutoConfig.for_model(**config).to_dict()), set(published) - set(config)
        read += 1
    assert read > len(published) - len(MINIMAL[name])


@pytest.mark.parametrize("key", ["n_group", "topk_group", "n_shared_experts"])
def test_a_default_that_transformers_and_the_published_code_do_not_share_has_to_be_stated(key):
    """transformers has 8 groups, 4 of them chosen, and 1 shared expert; the code beside the weights has none."""
    with pytest.raises(UserError, match=f"config.json lacks {key}"):
        model_config({k: v for k, v in KIMI_K2.items() if k != key})


@pytest.mark.parametrize("rope", [{}, {"rope_scaling": None}, {"rope_scaling": {}, "rope_theta": 10_000}])
def test_gpt_oss_without_a_rescaling_has_that_of_its_family(rope):
    from transformers import AutoConfig

    config = {key: value for key, value in PUBLISHED["gpt_oss_20b"].items() if not key.startswith("rope_")} | rope
    read = model_config(config)
    assert read.yarn == Yarn(
        factor=32.0, original_context=4096, beta_fast=32.0, beta_slow=1.0, mscale_all_dim=0.0, truncate=False
    )
    assert read.rope_theta == rope.get("rope_theta", 150_000)
    assert read == model_config(AutoConfig.for_model(**config).to_dict())
    plain = config | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e4}}
    assert model_config(plain).yarn is None and model_config(hf_config(model_config(plain))) == model_config(plain)
