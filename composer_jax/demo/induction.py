"""Initialisation that starts some heads as n-gram copying ("induction") heads. Ours; not part of K2.

Copying is what a coding agent does most: names, paths and old lines are copied into tool calls. A from-scratch model of
a million parameters does not find that circuit within a few million tokens, so it is written into the weights to start
from. With embedding taps W_j = S^j for one orthogonal S, the stream holds x_t = e_t + S e_{t-1} + S^2 e_{t-2} + ...,
and

    <S x_t, x_s> = e_t . e_{s-1} + e_{t-1} . e_{s-2} + ... + cross terms that are near zero,

so a head with query S x_t and key x_s looks for the place s whose preceding n-gram equals the current one. Its value
copies x_s, whose leading term is the token that followed. (Mimetic initialisation, in the spirit of arXiv 2305.09828.)
"""

import jax
import jax.numpy as jnp

from composer_jax.errors import UserError
from composer_jax.models.config import ModelConfig

QUERY_GAIN = 2.0
"""Makes a full n-gram match stand about ten nats above an unrelated position at the widths of the tiny preset."""
OUTPUT_GAIN = 1.0


def orthogonal(key: jax.Array, rows: int, columns: int) -> jax.Array:
    """Returns a matrix with orthonormal columns (rows >= columns)."""
    return _orthonormal_factor(jax.random.normal(key, (rows, rows)))[:, :columns]


@jax.custom_batching.sequential_vmap
def _orthonormal_factor(matrix: jax.Array) -> jax.Array:
    """Returns Q of matrix = QR, one matrix at a time.

    On a CPU, JAX's factorisation of several matrices shares them out over XLA's thread pool and waits, inside that
    pool, until all are done. Two devices with a few such operations each can fill the pool with waiting threads, and
    the process stalls for good.
    """
    return jnp.linalg.qr(matrix)[0]


def apply_induction(params: dict, config: ModelConfig, key: jax.Array) -> dict:
    """Returns params with the taps, and half of the heads of every layer, set to the copying circuit.

    Raises:
      UserError: the network has no latent attention with direct queries (kv_lora_rank set, q_lora_rank None).
    """
    if config.kv_lora_rank is None or config.q_lora_rank is not None:
        raise UserError(
            f"init={config.init!r} needs kv_lora_rank and no q_lora_rank, not kv_lora_rank={config.kv_lora_rank} and "
            f"q_lora_rank={config.q_lora_rank}; use init='normal'."
        )
    d, r, k, v = config.d_model, config.kv_lora_rank, config.qk_nope_dim, config.v_head_dim
    shift_key, key = jax.random.split(key)
    shift = orthogonal(shift_key, d, d)
    taps = jnp.stack([jnp.linalg.matrix_power(shift.T, j) for j in range(1, config.embedding_taps + 1)])
    params = {**params, "embedding": {**params["embedding"], "taps": taps.astype(config.param_dtype)}}

    def one_layer(attention: dict, key: jax.Array) -> dict:
        down_key, *head_keys = jax.random.split(key, 1 + config.n_heads // 2)
        down = orthogonal(down_key, d, r)
        new = dict(attention)
        new["kv_down"] = attention["kv_down"].at[:, :r].set(down)
        for h, head_key in enumerate(head_keys):
            key_key, value_key = jax.random.split(head_key)
            key_up, value_up = orthogonal(key_key, r, k), orthogonal(value_key, r, v)
            query = QUERY_GAIN * shift.T @ down @ key_up
            new["q"] = new["q"].at[:, h].set(jnp.concatenate([query, jnp.zeros((d, config.qk_rope_dim))], axis=-1))
            new["k_up"] = new["k_up"].at[:, h].set(key_up)
            new["v_up"] = new["v_up"].at[:, h].set(value_up)
            new["out"] = new["out"].at[h].set(OUTPUT_GAIN * (down @ value_up).T)
        return new

    for name in ("dense_layers", "moe_layers"):
        if name in params:
            n = params[name]["attention"]["q"].shape[0]
            key, layers_key = jax.random.split(key)
            attention = jax.vmap(one_layer)(params[name]["attention"], jax.random.split(layers_key, n))
            params[name] = {**params[name], "attention": attention}
    return params
