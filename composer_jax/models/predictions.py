"""The distribution over the next token, from logits that are sharded over the vocabulary (mesh axis `tensor`)."""

import chex
import jax
import jax.numpy as jnp

from composer_jax.parallel.sharding import axis_size, psum_tensor


class Predictions:
    """softmax of float32 logits [...,W], W being this device's vocabulary shard (all of it without `tensor`).

    Every result refers to the whole vocabulary and is equal on all devices that share it.
    """

    def __init__(self, logits: jax.Array):
        chex.assert_type(logits, jnp.float32)
        largest = jax.lax.stop_gradient(logits.max(-1, keepdims=True))
        if axis_size("tensor") > 1:
            largest = jax.lax.pmax(largest, "tensor")
        self._shifted = logits - largest
        self._log_total = jnp.log(psum_tensor(jnp.exp(self._shifted).sum(-1)))

    def logprob(self, tokens: jax.Array) -> jax.Array:
        """Returns log p of the integer tokens [...], float32."""
        chex.assert_type(tokens, jnp.integer)
        chex.assert_shape(tokens, self._shifted.shape[:-1])
        shard_size = self._shifted.shape[-1]
        first = jax.lax.axis_index("tensor") * shard_size if axis_size("tensor") > 1 else 0
        # A sum with one nonzero term: its gradient is elementwise, where that of a gather is a scatter.
        is_token = jnp.arange(shard_size) == (tokens - first)[..., None]
        return psum_tensor(jnp.where(is_token, self._shifted, 0).sum(-1)) - self._log_total

    def entropy(self) -> jax.Array:
        """Returns -sum_w p_w log p_w, in nats."""
        logprobs = self._logprobs
        return -psum_tensor((jnp.exp(logprobs) * logprobs).sum(-1))

    def divergence(self, student: "Predictions") -> jax.Array:
        """Returns KL(self || student) = sum_w p_w (log p_w - log q_w), in nats; no gradient reaches self."""
        logprobs = jax.lax.stop_gradient(self._logprobs)
        return psum_tensor((jnp.exp(logprobs) * (logprobs - student._logprobs)).sum(-1))

    @property
    def _logprobs(self) -> jax.Array:
        return self._shifted - self._log_total[..., None]
