"""Live comparison with transformers' DeepseekV3ForCausalLM on small random models, float32 on the CPU."""

import dataclasses
import json

import numpy as np
import pytest

from composer_jax.checkpoint.huggingface import load_hf, model_config, save_hf
from composer_jax.checkpoint.huggingface.tensor_layout import tensor_layouts
from composer_jax.models.model_def import ModelDef
from tests.checkpoint.tensors import from_tensors, to_tensors
from tests.parity.decoder import TOLERANCE, forward
from tests.parity.goldens import GOLDENS, load

pytestmark = pytest.mark.parity

YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 64.0,
    "original_max_position_embeddings": 8,
    "beta_fast": 2.0,
    "beta_slow": 0.2,
}
CHOSEN = {
    "plain": {},
    "q_lora": {"q_lora_rank": 18, "routed_scaling_factor": 2.827},
    "deepseek": {"q_lora_rank": 18, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 2},
    "tied": {"tie_word_embeddings": True, "n_shared_experts": 2},
    # Exposes which epsilon the norms of the latents use: transformers' is not the one of the config.
    "large_eps": {"rms_norm_eps": 0.3, "q_lora_rank": 18},
    # K2.5's rules, and those of a file that says nothing of mscale; angles that differ between pairs.
    "yarn": {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}, "qk_rope_head_dim": 16},
    "yarn_two_scales": {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}, "qk_rope_head_dim": 16},
    "yarn_plain": {"rope_parameters": YARN | {"truncate": False}, "qk_rope_head_dim": 16, "q_lora_rank": 18},
    "all_moe": {"first_k_dense_replace": 0, "n_shared_experts": 0, "num_experts_per_tok": 1},
}

RANDOM = 2
NAMES = [*CHOSEN, *(f"random{seed}" for seed in range(RANDOM))]


@pytest.fixture(scope="module")
def theirs():
    from tests.parity import theirs  # imports torch

    return theirs


@pytest.fixture(scope="module", params=NAMES)
def case(request, theirs):
    """(model of transformers, tokens, what it computes, our config)."""
    seed = NAMES.index(request.param)
    if request.param in CHOSEN:
        hf_config = theirs.PLAIN | CHOSEN[request.param]
    else:
        hf_config = theirs.random_config(seed)
    model = theirs.make_model(hf_config, seed)
    tokens = theirs.tokens_for(model, seed)
    config = model_config(json.loads(model.config.to_json_string()))
    return model, tokens, theirs.compute(model, tokens), dataclasses.replace(config, compute_dtype="float32")


def test_logits_and_logprobs(case, theirs):
    model, tokens, reference, config = case
    params, bias = from_tensors(theirs.in_memory(model), config)
    logits, logprobs = forward(config, params, bias, tokens)
    assert 0.3 < reference.logits.std() < 10  # neither too small to see a difference, nor too large to bound it
    worst = np.abs(logits - reference.logits).max(), np.abs(logprobs - reference.logprobs).max()
    print(f"largest difference: logits {worst[0]:.1e}, logprobs {worst[1]:.1e}")
    assert max(worst) <= TOLERANCE


def test_round_trip_is_exact(case, theirs):
    model, _, _, config = case
    published = theirs.on_disk(model)
    params, bias = from_tensors(published, config)
    exported = to_tensors(params, bias, config)
    empty = {name for name, array in published.items() if array.size == 0}
    assert exported.keys() == published.keys() - empty
    for name, array in exported.items():
        assert array.dtype == published[name].dtype
        np.testing.assert_array_equal(array, published[name], err_msg=name)

    held = theirs.in_memory(model)
    fused = tensor_layouts(config, fused_experts=True)
    for name, tensor in fused.items():
        assert tensor.shape == held[name].shape, name
    again = from_tensors(held, config)
    np.testing.assert_equal(again, (params, bias))


def test_we_read_what_transformers_writes(case, tmp_path):
    model, tokens, reference, _ = case
    model.save_pretrained(tmp_path)
    definition, params, bias = load_hf(tmp_path, dtype="float32")
    logits, _ = forward(definition.config, params, bias, tokens)
    assert np.abs(logits - reference.logits).max() <= TOLERANCE


def test_transformers_reads_what_we_write(case, theirs, tmp_path):
    from transformers import DeepseekV3ForCausalLM

    model, tokens, reference, config = case
    save_hf(tmp_path / "ours", ModelDef(config), *from_tensors(theirs.in_memory(model), config), file_bytes=50_000)
    loaded, report = DeepseekV3ForCausalLM.from_pretrained(
        tmp_path / "ours", attn_implementation="eager", experts_implementation="eager", output_loading_info=True
    )
    missing = {name for name in report["missing_keys"] if loaded.get_parameter(name).numel()}
    assert not missing and not report["unexpected_keys"] and not report["mismatched_keys"]
    # The same bits and the same network: config.json is ours, too.
    np.testing.assert_array_equal(theirs.compute(loaded.eval(), tokens).logits, reference.logits)


@pytest.mark.parametrize("case", ["q_lora"], indirect=True)
def test_transformers_is_not_disturbed_by_mtp_modules(case, theirs, tmp_path):
    """It has none: it names their tensors as not used, and computes the same."""
    from transformers import DeepseekV3ForCausalLM

    model, tokens, reference, config = case
    with_modules = dataclasses.replace(config, n_mtp_modules=2)
    params, bias = ModelDef(with_modules).init(0)
    trunk = from_tensors(theirs.in_memory(model), config)
    weights = ({**params, **trunk[0]}, {**bias, **trunk[1]})
    save_hf(tmp_path / "ours", ModelDef(with_modules), *weights)
    loaded, report = DeepseekV3ForCausalLM.from_pretrained(
        tmp_path / "ours", attn_implementation="eager", experts_implementation="eager", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["mismatched_keys"]
    layers = tuple(f"model.layers.{config.n_layers + i}." for i in range(2))
    assert all(name.startswith(layers) for name in report["unexpected_keys"])
    np.testing.assert_array_equal(theirs.compute(loaded.eval(), tokens).logits, reference.logits)


@pytest.mark.parametrize("name", GOLDENS)
def test_golden_files_are_what_transformers_computes(name, theirs):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    golden = load(name)
    config = AutoConfig.for_model(**golden.config)
    state = {key: torch.from_numpy(array) for key, array in golden.state.items()}
    kind = type(AutoModelForCausalLM.from_config(config))
    eager = dict(attn_implementation="eager", experts_implementation="eager")
    model = kind.from_pretrained(None, config=config, state_dict=state, **eager).eval()
    assert theirs.routing_margin(model, golden.tokens) > theirs.MARGIN
    np.testing.assert_allclose(theirs.compute(model, golden.tokens).logits, golden.logits, atol=2e-5)
