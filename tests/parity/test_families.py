"""Live comparison with transformers' architectures beside DeepSeek-V3 on small random models, float32 on the CPU: the
forward pass, its gradient, decoding from the cache, folders in both directions."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.checkpoint.huggingface import load_hf, model_config, save_hf
from composer_jax.checkpoint.huggingface.config_json import write_rope
from composer_jax.checkpoint.huggingface.tensor_layout import flatten_tree, tensor_layouts
from composer_jax.models.model_def import ModelDef
from composer_jax.models.predictions import Predictions
from composer_jax.models.rope import Llama3Rope
from tests.checkpoint.tensors import from_tensors, to_tensors
from tests.parity.decoder import TOLERANCE, decode, forward

pytestmark = pytest.mark.parity

COMMON = dict(
    vocab_size=61,
    hidden_size=40,
    intermediate_size=56,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=12,
    num_experts_per_tok=3,
    rms_norm_eps=1e-5,
    rope_parameters={"rope_type": "default", "rope_theta": 1_000.0},
    max_position_embeddings=64,
    tie_word_embeddings=False,
)
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 8.0, "original_max_position_embeddings": 8}
QWEN = COMMON | dict(model_type="qwen3_moe", num_experts=8, moe_intermediate_size=14, norm_topk_prob=True)
GLM = COMMON | dict(
    model_type="glm4_moe",
    n_routed_experts=8,
    n_shared_experts=1,
    moe_intermediate_size=14,
    first_k_dense_replace=1,
    routed_scaling_factor=1.7,
    norm_topk_prob=True,
    rope_parameters=COMMON["rope_parameters"] | {"partial_rotary_factor": 0.5},
)
GPT = COMMON | dict(
    model_type="gpt_oss", num_local_experts=8, intermediate_size=14, sliding_window=5, num_hidden_layers=4
)
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
DENSE = {key: value for key, value in COMMON.items() if key != "num_experts_per_tok"}
LLAMA = DENSE | dict(model_type="llama", hidden_size=42)  # a multiple of the heads, which transformers demands
QWEN2 = DENSE | dict(model_type="qwen2")
QWEN3 = DENSE | dict(model_type="qwen3")
CASES = {
    "llama": LLAMA,
    "llama3_tied": LLAMA | {"rope_parameters": LLAMA3, "tie_word_embeddings": True, "num_key_value_heads": 3},
    "llama_yarn_biases": LLAMA | {"rope_parameters": YARN, "attention_bias": True, "num_key_value_heads": 6},
    "qwen2": QWEN2,
    "qwen2_tied_narrow": QWEN2 | {"tie_word_embeddings": True, "num_key_value_heads": 1, "head_dim": 4},
    "qwen3": QWEN3,
    "qwen3_biases_yarn_tied": QWEN3
    | {"attention_bias": True, "rope_parameters": YARN, "tie_word_embeddings": True, "head_dim": 16},
    "qwen3_moe": QWEN,
    "qwen3_moe_some_layers": QWEN | {"mlp_only_layers": [0, 2, 3], "num_hidden_layers": 5},
    "qwen3_moe_raw_gates_biases": QWEN | {"norm_topk_prob": False, "attention_bias": True},
    "qwen3_moe_yarn_tied": QWEN | {"rope_parameters": YARN, "tie_word_embeddings": True, "num_key_value_heads": 6},
    "glm4_moe": GLM,
    "glm4_moe_large": GLM | {"use_qk_norm": True, "attention_bias": True, "n_group": 4, "topk_group": 2},
    "gpt_oss": GPT | {"rope_parameters": YARN | {"truncate": False}},
    "gpt_oss_tight_clamp": GPT | {"swiglu_limit": 0.5, "attention_bias": False, "sliding_window": 3},
}
NAMES = list(CASES)


@pytest.fixture(scope="module")
def theirs():
    from tests.parity import theirs  # imports torch

    return theirs


@pytest.fixture(scope="module", params=NAMES)
def case(request, theirs):
    """(model of transformers, tokens, what it computes, our config)."""
    seed = NAMES.index(request.param)
    model = theirs.make_model(CASES[request.param], seed)
    tokens = theirs.tokens_for(model, seed)
    config = model_config(json.loads(model.config.to_json_string()))
    return model, tokens, theirs.compute(model, tokens), dataclasses.replace(config, compute_dtype="float32")


def test_logits_and_logprobs(case, theirs):
    """With the dispatch that the test of the gradient does not take."""
    model, tokens, reference, config = case
    assert config.dispatch == "ring"
    config = dataclasses.replace(config, dispatch="dense")
    params, bias = from_tensors(theirs.in_memory(model), config)
    logits, logprobs = forward(config, params, bias, tokens)
    assert 0.3 < reference.logits.std() < 10
    worst = np.abs(logits - reference.logits).max(), np.abs(logprobs - reference.logprobs).max()
    print(f"largest difference: logits {worst[0]:.1e}, logprobs {worst[1]:.1e}")
    assert max(worst) <= TOLERANCE


def test_gradient_of_the_language_loss(case, theirs):
    """By tensor, as the largest difference relative to the largest entry."""
    model, tokens, _, config = case
    params, bias = from_tensors(theirs.in_memory(model), config)

    @jax.jit
    @jax.grad
    def gradient(params):
        decoder = ModelDef(config).bind(params, bias)
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        hidden = decoder(jnp.asarray(tokens), positions, jnp.ones_like(positions))
        logprobs = Predictions(decoder.logits(hidden.last_BSD)[:, :-1]).logprob(jnp.asarray(tokens[:, 1:]))
        return -logprobs.mean()

    expected = theirs.loss_gradient(model, tokens)
    leaves = flatten_tree(gradient(params)) | flatten_tree(bias)
    layouts = tensor_layouts(config, fused_experts=any("gate_up_proj" in name for name in expected))
    assert expected.keys() <= layouts.keys()
    for name, wanted in expected.items():
        actual = layouts[name].join_leaves(leaves)
        largest = np.abs(wanted).max()
        assert largest > 0, name
        assert np.abs(actual - wanted).max() <= 2e-4 * largest, name


def test_decoding_from_the_cache(case, theirs):
    model, tokens, reference, config = case
    logits = decode(config, *from_tensors(theirs.in_memory(model), config), tokens, step=6)
    assert np.abs(logits - reference.logits).max() <= TOLERANCE


def test_tensors_there_and_back(case, theirs):
    model, _, _, config = case
    published = theirs.on_disk(model)
    exported = to_tensors(*from_tensors(published, config), config)
    assert exported.keys() == published.keys() == tensor_layouts(config).keys()
    for name, array in exported.items():
        np.testing.assert_array_equal(array, published[name], err_msg=name, strict=True)


def test_folders_in_both_directions(case, theirs, tmp_path):
    from transformers import AutoModelForCausalLM

    model, tokens, reference, config = case
    model.save_pretrained(tmp_path / "theirs")
    loaded = load_hf(tmp_path / "theirs", dtype="float32")
    assert loaded.definition == ModelDef(dataclasses.replace(config, param_dtype="float32"))
    save_hf(tmp_path / "ours", *loaded)
    again, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", attn_implementation="eager", experts_implementation="eager", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    np.testing.assert_array_equal(theirs.compute(again.eval(), tokens).logits, reference.logits)


@pytest.mark.parametrize(
    ("dim", "theta", "scaling"),
    [(128, 500_000.0, Llama3Rope(8.0)), (64, 500_000.0, Llama3Rope(32.0)), (12, 100.0, Llama3Rope(8.0, 1.0, 4.0, 16))],
    ids=["llama_3_1_8b", "llama_3_2_1b", "small"],
)
def test_the_rescaled_frequencies_of_llama_3_are_theirs_bit_for_bit(dim, theta, scaling):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = write_rope(theta, scaling)["rope_parameters"]
    theirs = LlamaConfig(hidden_size=4 * dim, num_attention_heads=4, head_dim=dim, rope_parameters=rope)
    expected, temperature = ROPE_INIT_FUNCTIONS["llama3"](theirs)
    np.testing.assert_array_equal(scaling.frequencies(dim, theta), expected.numpy(), strict=True)
    assert temperature == scaling.rotation_scale


def test_mxfp4_means_what_it_means_there():
    import torch
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    from composer_jax.checkpoint.huggingface.quantized import dequantize_mxfp4

    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (3, 10, 2, 16), dtype=np.uint8)
    scales = rng.integers(100, 150, (3, 10, 2), dtype=np.uint8)
    expected = convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales), dtype=torch.float32)
    np.testing.assert_array_equal(dequantize_mxfp4(blocks, scales), expected.numpy())
