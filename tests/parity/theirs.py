"""The other side of the comparison: small random models of transformers, DeepSeek-V3 and others. Needs torch.

Weights come from NumPy, so that they are the same everywhere. They are drawn so that every part of the network matters
for the logits: activations of order one, norm scales away from 1, router biases that change which experts are chosen.
"""

import tempfile
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.numpy import load_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

BATCH, LENGTH = 2, 18
MARGIN = 1e-4
"""Least distance of a chosen expert (or group) from one that is not: rounding then never changes the choice."""

PLAIN = dict(
    vocab_size=61,
    hidden_size=40,
    intermediate_size=56,
    moe_intermediate_size=12,
    num_hidden_layers=3,
    num_attention_heads=3,
    num_key_value_heads=None,
    n_routed_experts=8,
    num_experts_per_tok=3,
    n_shared_experts=1,
    first_k_dense_replace=1,
    q_lora_rank=None,
    kv_lora_rank=20,
    qk_nope_head_dim=14,
    qk_rope_head_dim=6,
    v_head_dim=10,
    n_group=1,
    topk_group=1,
    routed_scaling_factor=1.0,
    rms_norm_eps=1e-6,
    rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    max_position_embeddings=64,
    tie_word_embeddings=False,
    num_nextn_predict_layers=0,
)
"""Awkward sizes: no two are equal, hardly one is a power of two."""


class Reference(NamedTuple):
    """What transformers computes: logits [B,S,W] and the logprobs [B,S-1] of tokens[:, 1:], float32."""

    logits: np.ndarray
    logprobs: np.ndarray


def yarn(theta: float, factor: float, original: int, **more: Any) -> dict[str, Any]:
    """Rotary parameters under which positions well within a test's rows lie beyond the original context."""
    return {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": factor,
        "original_max_position_embeddings": original,
        **more,
    }


def random_config(seed: int) -> dict[str, Any]:
    """A config.json with random sizes and features."""
    rng = np.random.default_rng(seed)
    pick = lambda *values: values[rng.integers(len(values))]  # noqa: E731
    groups, chosen_groups, per_group = pick((1, 1, 7), (4, 2, 3), (3, 2, 5), (2, 1, 6))
    layers = pick(3, 4)
    return dict(
        vocab_size=int(rng.integers(30, 90)),
        hidden_size=int(rng.integers(9, 40)),
        intermediate_size=int(rng.integers(5, 60)),
        moe_intermediate_size=int(rng.integers(3, 30)),
        num_hidden_layers=layers,
        num_attention_heads=int(rng.integers(1, 6)),
        num_key_value_heads=None,
        n_routed_experts=groups * per_group,
        num_experts_per_tok=int(rng.integers(1, chosen_groups * per_group)),
        n_shared_experts=pick(1, 2, 3),
        first_k_dense_replace=int(rng.integers(0, layers)),
        q_lora_rank=pick(None, int(rng.integers(3, 30))),
        kv_lora_rank=int(rng.integers(3, 30)),
        qk_nope_head_dim=int(rng.integers(1, 20)),
        qk_rope_head_dim=2 * int(rng.integers(1, 9)),
        v_head_dim=int(rng.integers(1, 20)),
        n_group=groups,
        topk_group=chosen_groups,
        routed_scaling_factor=float(rng.uniform(0.5, 3.0)),
        rms_norm_eps=pick(1e-6, 1e-5, 1e-3),
        rope_parameters=pick(
            {"rope_type": "default", "rope_theta": pick(100.0, 10_000.0, 50_000.0)},
            yarn(pick(100.0, 10_000.0), 8.0, 8, beta_fast=2.0, beta_slow=0.5, mscale=1.0, mscale_all_dim=1.0),
        ),
        max_position_embeddings=64,
        tie_word_embeddings=pick(True, False),
        num_nextn_predict_layers=0,
    )


def make_model(config: dict[str, Any], seed: int) -> PreTrainedModel:
    """A model in float32 whose weights are exact in float16 (golden files store them so).

    config: of the architecture that its model_type names, DeepSeek-V3's without.
    """
    config = {"model_type": "deepseek_v3", **config}
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**config), attn_implementation="eager", experts_implementation="eager", dtype="float32"
    ).eval()
    rng = np.random.default_rng(seed)
    # A tied head is the embedding itself and comes up once.
    tensors = dict(model.named_parameters())
    tensors |= {name: buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")}
    with torch.no_grad():
        for name, tensor in tensors.items():
            value = rng.standard_normal(tuple(tensor.shape))
            if name.endswith("norm.weight"):
                value = 1 + 0.2 * value
            elif name.endswith("e_score_correction_bias"):
                value = 0.3 * value
            elif name.endswith(("bias", "sinks")):
                value = 0.5 * value
            elif "embed_tokens" not in name or config["tie_word_embeddings"]:
                value = 1.2 * value / np.sqrt(max(tensor.shape[-1], 1))
            tensor.copy_(torch.from_numpy(value.astype(np.float16).astype(np.float32)))
    return model


def compute(model: PreTrainedModel, tokens: np.ndarray) -> Reference:
    ids = torch.from_numpy(np.asarray(tokens, np.int64))
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits
        logprobs = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return Reference(logits.numpy(), logprobs.numpy())


def tokens_for(model: PreTrainedModel, seed: int) -> np.ndarray:
    """Random tokens [B,S] int32 for which no choice of the router is close."""
    rng = np.random.default_rng(seed)
    for _ in range(50):
        tokens = rng.integers(0, model.config.vocab_size, (BATCH, LENGTH)).astype(np.int32)
        if routing_margin(model, tokens) > MARGIN:
            return tokens
    raise AssertionError(f"fifty random batches all have a router score within {MARGIN} of another")


def routing_margin(model: PreTrainedModel, tokens: np.ndarray) -> float:
    """How far the closest choice of any router is from turning out otherwise, in units of its scores."""
    config, margins = model.config, []
    groups = getattr(config, "n_group", 1)

    def gap(scores: torch.Tensor, chosen: int) -> None:
        if chosen < scores.shape[-1]:
            ranked = scores.sort(-1, descending=True).values
            margins.append((ranked[:, chosen - 1] - ranked[:, chosen]).min().item())

    def watch(router, _, outputs):
        scores = outputs[0].softmax(-1)
        if hasattr(router, "e_score_correction_bias"):
            scores = outputs[0].sigmoid() + router.e_score_correction_bias
        scores = scores.view(len(scores), groups, -1)
        if groups > 1:
            strength = scores.topk(2, -1).values.sum(-1)
            gap(strength, config.topk_group)
            best = torch.zeros_like(strength).scatter(1, strength.topk(config.topk_group, -1).indices, 1)
            scores = scores[best.bool()]
        gap(scores.reshape(len(outputs[0]), -1), config.num_experts_per_tok)

    routers = [module for module in model.modules() if "router" in type(module).__name__.lower()]
    assert bool(routers) == hasattr(config, "num_experts_per_tok")
    hooks = [router.register_forward_hook(watch) for router in routers]
    compute(model, tokens)
    for hook in hooks:
        hook.remove()
    return min(margins, default=1.0)


def loss_gradient(model: PreTrainedModel, tokens: np.ndarray) -> dict[str, np.ndarray]:
    """The gradient of the mean of -log p(tokens[:, 1:]), by the names of the tensors in memory."""
    ids = torch.from_numpy(np.asarray(tokens, np.int64))
    model.zero_grad()
    with torch.enable_grad():
        logprobs = model(ids, use_cache=False).logits[:, :-1].log_softmax(-1)
        (-logprobs.gather(-1, ids[:, 1:, None]).mean()).backward()
    return {name: tensor.grad.numpy() for name, tensor in model.named_parameters()}


def in_memory(model: PreTrainedModel) -> dict[str, np.ndarray]:
    """The tensors as transformers holds them: the experts of a layer stacked."""
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}


def on_disk(model: PreTrainedModel) -> dict[str, np.ndarray]:
    """The tensors as transformers writes them: one per expert, and no head where it is tied."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(f"{folder}/model.safetensors")
