"""The network in NumPy, float64, one document, one token and one head at a time.

Written from the equations of DeepSeek-V3 (arXiv 2412.19437, sections 2.1 and 2.2), so that it shares nothing with the
code under test but the names of the weights.
"""

import itertools

import jax
import numpy as np

from composer_jax.models.config import ModelConfig


def to_numpy(tree):
    return {k: to_numpy(v) for k, v in tree.items()} if isinstance(tree, dict) else np.asarray(tree, np.float64)


def layer(tree, index: int):
    """Layer `index` of a stack."""
    return {k: layer(v, index) for k, v in tree.items()} if isinstance(tree, dict) else tree[index]


def rms_norm(x, scale, eps):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * scale


def silu(x):
    return x / (1 + np.exp(-x))


def swiglu(p, x):
    return (silu(x @ p["gate"]) * (x @ p["up"])) @ p["down"]


def rotate(x, position: int, theta: float):
    """Each pair (x_2i, x_2i+1) as a complex number, turned by position * theta^(-2i/dim)."""
    pairs = x[0::2] + 1j * x[1::2]
    turned = pairs * np.exp(1j * position * theta ** (-np.arange(0, len(x), 2) / len(x)))
    out = np.empty(len(x))
    out[0::2], out[1::2] = turned.real, turned.imag
    return out


def attention(p, x, config: ModelConfig):
    """Equations 1 to 11, without a cache: keys and values of every head are written out."""
    n, (k, r) = len(x), (config.qk_nope_dim, config.kv_lora_rank)
    out = np.zeros_like(x)
    for t in range(n):
        query_in = x[t]
        if config.q_lora_rank is not None:
            query_in = rms_norm(query_in @ p["q_down"], p["q_norm"]["scale"], config.norm_eps)
        for h in range(config.n_heads):
            q = query_in @ p["q"][:, h]
            q = np.concatenate([q[:k], rotate(q[k:], t, config.rope_theta)])
            logits, values = [], []
            for s in range(t + 1):
                down = x[s] @ p["kv_down"]
                latent = rms_norm(down[:r], p["kv_norm"]["scale"], config.norm_eps)
                key = np.concatenate([latent @ p["k_up"][:, h], rotate(down[r:], s, config.rope_theta)])
                logits.append(config.attention_scale * (q @ key) / np.sqrt(k + config.qk_rope_dim))
                values.append(latent @ p["v_up"][:, h])
            weights = np.exp(np.array(logits) - max(logits))
            weights /= weights.sum()
            out[t] += (weights @ np.array(values)) @ p["out"][h]
    return out


def chosen_experts(scores, bias, config: ModelConfig) -> list[int]:
    """The experts of one token, best first."""
    choice = scores + bias
    size = config.n_experts // config.n_expert_groups
    strength = [sum(sorted(choice[g * size : (g + 1) * size])[-2:]) for g in range(config.n_expert_groups)]
    groups = sorted(range(config.n_expert_groups), key=lambda g: -strength[g])[: config.topk_groups]
    candidates = [e for e in range(config.n_experts) if e // size in groups]
    return sorted(candidates, key=lambda e: -choice[e])[: config.experts_per_token]


def moe(p, bias, x, config: ModelConfig):
    """Equations 12 to 16."""
    out = np.zeros_like(x)
    for t in range(len(x)):
        scores = 1 / (1 + np.exp(-(x[t] @ p["router"]["weight"])))
        ids = chosen_experts(scores, bias, config)
        total = sum(scores[e] for e in ids)
        for e in ids:
            expert = {name: p[name][e] for name in ("gate", "up", "down")}
            out[t] += config.routed_scaling_factor * scores[e] / total * swiglu(expert, x[t])
        if config.n_shared_experts:
            out[t] += swiglu(p["shared"], x[t])
    return out


def block(p, bias, x, config: ModelConfig):
    """`bias` is None in a dense layer."""
    x = x + attention(p["attention"], rms_norm(x, p["attention_norm"]["scale"], config.norm_eps), config)
    normed = rms_norm(x, p["feed_forward_norm"]["scale"], config.norm_eps)
    if bias is None:
        return x + swiglu(p["feed_forward"], normed)
    return x + moe(p["feed_forward"], bias, normed, config)


def embed(p, tokens, config: ModelConfig):
    table = p["embedding"]["table"]
    x = table[tokens]
    for j in range(1, config.embedding_taps + 1):
        for t in range(j, len(tokens)):
            x[t] += table[tokens[t - j]] @ p["embedding"]["taps"][j - 1]
    return x


def trunk(params, bias, tokens, config: ModelConfig):
    """States [n,D] before the final norm, of one document that starts at position 0."""
    params, bias = to_numpy(params), to_numpy(bias)
    x = embed(params, np.asarray(tokens), config)
    dense, moe = itertools.count(), itertools.count()  # the next layer of each stack
    for i in range(config.n_layers):
        if config.n_experts == 0 or i < config.n_dense_layers or i in (config.dense_layers or ()):
            x = block(layer(params["dense_layers"], next(dense)), None, x, config)
        else:
            j = next(moe)
            router_bias = bias["moe_layers"]["feed_forward"]["router"]["bias"][j]
            x = block(layer(params["moe_layers"], j), router_bias, x, config)
    return x


def head(params, x, config: ModelConfig):
    params = to_numpy(params)
    return x @ (params["embedding"]["table"].T if config.tie_embeddings else params["head"])


def logits(params, bias, tokens, config: ModelConfig):
    scale = to_numpy(params)["final_norm"]["scale"]
    return head(params, rms_norm(trunk(params, bias, tokens, config), scale, config.norm_eps), config)


def mtp_logits(params, bias, tokens, config: ModelConfig):
    """Equations 21 to 23 at every depth k: row i of the k-th array predicts tokens[i+k+1]; [n-k, vocab]."""
    everything, bias = to_numpy(params), to_numpy(bias)
    eps, embedded = config.norm_eps, embed(everything, np.asarray(tokens), config)
    x = rms_norm(trunk(params, bias, tokens, config), everything["final_norm"]["scale"], eps)
    out = []
    for k in range(1, config.n_mtp_modules + 1):
        p, b = (jax.tree.map(lambda leaf, k=k: leaf[k - 1], tree.get("mtp")) for tree in (everything, bias))
        joined = np.concatenate(
            [
                rms_norm(embedded[k:], p["embedding_norm"]["scale"], eps),
                rms_norm(x[:-1], p["hidden_norm"]["scale"], eps),
            ],
            axis=1,
        )
        router_bias = b["block"]["feed_forward"]["router"]["bias"] if config.n_experts else None
        x = block(p["block"], router_bias, joined @ p["projection"], config)
        out.append(head(params, rms_norm(x, p["final_norm"]["scale"], eps), config))
    return out
