"""The distribution over the next token, of which each device of the mesh axis `tensor` has the logits of its words."""

import jax
import jax.numpy as jnp

from composer_jax.parallel.sharding import axis_size, psum_tensor


class Predictions:
    """softmax of float32 logits [...,W]; W are this device's words of the vocabulary, all of them without `tensor`.

    Everything it tells is about the whole vocabulary, and equal on all devices that share it.
    """

    def __init__(self, logits: jax.Array):
        largest = jax.lax.stop_gradient(logits.max(-1, keepdims=True))
        if axis_size("tensor") > 1:
            largest = jax.lax.pmax(largest, "tensor")
        self._shifted = logits - largest
        self._log_total = jnp.log(psum_tensor(jnp.exp(self._shifted).sum(-1)))

    def logprob(self, tokens: jax.Array) -> jax.Array:
        """log p of the tokens [...], float32."""
        words = self._shifted.shape[-1]
        first = jax.lax.axis_index("tensor") * words if axis_size("tensor") > 1 else 0
        # A sum over one that is not zero: its gradient is no scatter into all words.
        chosen = jnp.arange(words) == (tokens - first)[..., None]
        return psum_tensor(jnp.where(chosen, self._shifted, 0).sum(-1)) - self._log_total

    def entropy(self) -> jax.Array:
        """-sum_w p_w log p_w, in nats."""
        logprobs = self._logprobs
        return -psum_tensor((jnp.exp(logprobs) * logprobs).sum(-1))

    def divergence(self, student: "Predictions") -> jax.Array:
        """KL(self || student) = sum_w p_w (log p_w - log q_w); no gradient reaches self."""
        logprobs = jax.lax.stop_gradient(self._logprobs)
        return psum_tensor((jnp.exp(logprobs) * (logprobs - student._logprobs)).sum(-1))

    @property
    def _logprobs(self) -> jax.Array:
        return self._shifted - self._log_total[..., None]
