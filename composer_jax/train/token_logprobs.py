"""TokenScorer: the log-probability of every token of a batch, under weights that are not trained."""

import jax
import numpy as np
from jax.sharding import Mesh

from composer_jax.models.model_def import ModelDef, Params
from composer_jax.models.predictions import Predictions
from composer_jax.parallel import context
from composer_jax.parallel.context import zigzag_order
from composer_jax.parallel.mesh import BATCH_SPEC
from composer_jax.parallel.processes import gather_to_host
from composer_jax.train.forward import hidden_states, predict_positions
from composer_jax.train.shard_batch import shard_batch


class TokenScorer:
    """The compiled forward pass on a mesh, one program for each shape of batches. It holds no weights."""

    def __init__(self, definition: ModelDef, mesh: Mesh, *, plausibility: float = 0.0):
        """plausibility: of the replay of batches with routes (models/router_replay.py)."""
        self.definition, self.mesh, self.plausibility = definition, mesh, plausibility
        self._program = jax.jit(
            jax.shard_map(
                self._logprobs, mesh=mesh, in_specs=(*definition.specs(mesh), BATCH_SPEC), out_specs=BATCH_SPEC
            )
        )

    def __call__(self, params: Params, router_bias: Params, batch: dict[str, np.ndarray]) -> np.ndarray:
        """Returns log p(tokens[t] | the tokens before it in its segment), float32 [B,S], in every process.

        The entry of a segment's first token, which nothing predicts, and those of padding have no meaning.

        Args:
          batch: numpy arrays [B,S] as for a Learner (train/losses.py).

        Raises:
          UserError: the batch does not divide over the mesh.
        """
        logprobs_BS = gather_to_host(self._program(params, router_bias, shard_batch(batch, self.mesh)))
        if (parts := self.mesh.shape["context"]) == 1:
            return logprobs_BS
        in_order_BS = np.empty_like(logprobs_BS)
        in_order_BS[:, zigzag_order(logprobs_BS.shape[1], parts)] = logprobs_BS
        return in_order_BS

    def _logprobs(self, params, router_bias, batch):
        decoder = self.definition.bind(params, router_bias)
        hidden = hidden_states(decoder, batch, plausibility=self.plausibility)

        def at_position(main: Predictions, token: jax.Array):
            return main.logprob(token)

        tokens_BS, chunk = context.shift_left(batch["tokens"]), decoder.config.head_chunk
        return context.shift_right(predict_positions(decoder, at_position, chunk, (hidden.last_BSD,), tokens_BS))
