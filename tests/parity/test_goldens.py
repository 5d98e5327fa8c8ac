"""Comparison with transformers for everyone: against its logits in golden files, without PyTorch."""

import dataclasses

import jax
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict

from composer_jax.checkpoint.huggingface import model_config
from composer_jax.checkpoint.huggingface.tensor_layout import flatten_tree
from composer_jax.models.model_def import ModelDef
from tests.checkpoint.tensors import from_tensors, to_tensors
from tests.parity.decoder import TOLERANCE, decode, forward
from tests.parity.goldens import FOLDER, GOLDENS, load


def golden_and_ours(name):
    golden = load(name)
    config = dataclasses.replace(model_config(golden.config), compute_dtype="float32")
    return golden, config, *from_tensors(golden.state, config)


def logprobs_of(logits, tokens):
    logits = logits[:, :-1].astype(np.float64)
    normal = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return np.take_along_axis(normal, tokens[:, 1:, None], -1)[..., 0]


@pytest.mark.parametrize("name", GOLDENS)
def test_training_forward(name):
    golden, config, params, bias = golden_and_ours(name)
    logits, logprobs = forward(config, params, bias, golden.tokens)
    assert golden.logits.std() > 0.3
    assert np.abs(logits - golden.logits).max() <= TOLERANCE
    assert np.abs(logprobs - logprobs_of(golden.logits, golden.tokens)).max() <= TOLERANCE


@pytest.mark.parametrize("name", GOLDENS)
def test_decoding_from_the_cache(name):
    golden, config, params, bias = golden_and_ours(name)
    logits = decode(config, params, bias, golden.tokens, step=6)
    assert np.abs(logits - golden.logits).max() <= TOLERANCE


@pytest.mark.parametrize("name", GOLDENS)
def test_round_trip(name):
    golden, config, params, bias = golden_and_ours(name)
    exported = to_tensors(params, bias, config)
    one = {"gpt_oss": "experts.gate_up_proj", **dict.fromkeys(("llama", "qwen2", "qwen3"), "mlp.up_proj")}
    assert any(one.get(name, "experts.0.up_proj") in key for key in exported)
    for key in exported.keys() & golden.state.keys():
        np.testing.assert_array_equal(exported[key], golden.state[key], err_msg=key)
    np.testing.assert_equal(from_tensors(exported, config), (params, bias))


WRONG = {
    "one group": {"n_expert_groups": 1, "topk_groups": 1},
    "rotary base": {"rope_theta": 20_000.0},
    "attention scale": {"attention_scale": 0.8},
}


@pytest.mark.parametrize("change", [*WRONG, "no router bias", "norm scales forgotten"])
def test_the_comparison_would_notice(change):
    """A network that lacks one ingredient is far from the golden logits: the tolerance hides nothing."""
    golden, config, params, bias = golden_and_ours("deepseek_grouped_fused")
    if change in WRONG:
        config = dataclasses.replace(config, **WRONG[change])
    elif change == "no router bias":
        bias = jax.tree.map(np.zeros_like, bias)
    else:
        for stack in ("dense_layers", "moe_layers"):
            scale = params[stack]["attention"]["kv_norm"]["scale"]
            scale[...] = 1
    logits, _ = forward(config, params, bias, golden.tokens)
    assert np.abs(logits - golden.logits).max() > 50 * TOLERANCE


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", {"llama3_rope": None}),
        ("qwen2", {"qkv_bias": False}),
        ("qwen3", {"qk_norm": False}),
    ],
    ids=str,
)
def test_the_comparison_would_notice_in_a_network_of_another_family(name, changes):
    golden, config, params, bias = golden_and_ours(name)
    config = dataclasses.replace(config, **changes)
    expected = flatten_tree(ModelDef(config).shapes()[0])
    params = unflatten_dict({key: leaf for key, leaf in flatten_tree(params).items() if key in expected}, sep=".")
    logits, _ = forward(config, params, bias, golden.tokens)
    assert np.abs(logits - golden.logits).max() > 50 * TOLERANCE


def test_there_is_a_file_for_every_name():
    files = {path.stem: path.stat().st_size for path in FOLDER.glob("*.npz")}
    assert files.keys() == set(GOLDENS)
    assert sum(files.values()) < 800_000
