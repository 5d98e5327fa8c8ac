"""How much arithmetic a network asks for, from its config alone."""

from composer_jax.models.config import ModelConfig


def forward_flops(config: ModelConfig, tokens: int) -> float:
    """Floating-point operations of one forward pass over a document of so many tokens, MTP modules included.

    Counts two for every multiplication of a matrix product: projections, the chosen and shared experts, router, head,
    and the causal half of attention's scores and mixtures. A training step takes three times as many (without
    recomputation, which is overhead: this is what MFU is measured against, as in PaLM, arXiv 2204.02311, appendix B).
    """
    c = config
    x = c.qk_nope_dim + c.qk_rope_dim
    if c.kv_lora_rank is None:
        projections = c.d_model * (c.n_heads * x + c.n_kv_heads * (x + c.v_head_dim))
    else:
        query = c.d_model * c.n_heads * x
        if c.q_lora_rank is not None:
            query = c.q_lora_rank * (c.d_model + c.n_heads * x)
        expansion = c.kv_lora_rank * c.n_heads * (c.qk_nope_dim + c.v_head_dim)
        projections = query + c.d_model * (c.kv_lora_rank + c.qk_rope_dim) + expansion
    projections += c.n_heads * c.v_head_dim * c.d_model
    experts = 3 * c.d_model * c.expert_ff_dim * (c.experts_per_token + c.n_shared_experts) + c.d_model * c.n_experts
    dense = 3 * c.d_model * c.dense_ff_dim
    head = c.d_model * c.vocab_size
    module = c.n_mtp_modules * (2 * c.d_model**2 + projections + experts + head)
    per_token = c.n_layers * projections + c.n_dense_layers * dense + c.n_moe_layers * experts + head + module

    def seen(window: int | None) -> float:
        """Pairs of a query and a key that it sees."""
        if window is None or window >= tokens:
            return tokens * (tokens + 1) / 2
        return window * (window + 1) / 2 + (tokens - window) * window

    pairs = sum(seen(c.sliding_window if c.has_window(layer) else None) for layer in range(c.n_layers))
    pairs += c.n_mtp_modules * seen(None)
    return 2 * (tokens * per_token + pairs * c.n_heads * (x + c.v_head_dim))
