"""Forward passes of weights that are not trained: the log-probability of every token, or states at chosen outputs.

Each is one compiled program for each shape of batches, on a mesh. The objects hold no weights.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from composer_jax.data.host_batch import HostField
from composer_jax.models.model_def import ModelDef, Params
from composer_jax.models.predictions import Predictions
from composer_jax.parallel import context
from composer_jax.parallel.context import zigzag_order
from composer_jax.parallel.mesh import BATCH_SPEC, ROW_SPEC
from composer_jax.parallel.processes import gather_to_host
from composer_jax.train.forward import hidden_states, predict_positions
from composer_jax.train.shard_batch import field_spec, shard_batch
from composer_jax.train.teacher_kl import states_at

ROW_FIELDS = ("tokens", "positions", "segments", "weights")


def states_fields(batch: Mapping[str, HostField], outputs_BN: HostField) -> dict[str, HostField]:
    """Returns the fields that OutputStates uses of a batch and these outputs."""
    return {name: batch[name] for name in ROW_FIELDS} | {"feedback_outputs": outputs_BN}


class TokenScorer:
    """The log-probability of every token of a batch."""

    def __init__(self, definition: ModelDef, mesh: Mesh, *, plausibility: float = 0.0):
        """plausibility: of the replay of batches with routes (models/router_replay.py)."""
        self.definition, self.mesh, self.plausibility = definition, mesh, plausibility
        self._program = jax.jit(
            jax.shard_map(
                self._logprobs, mesh=mesh, in_specs=(*definition.specs(mesh), BATCH_SPEC), out_specs=BATCH_SPEC
            )
        )

    def __call__(self, params: Params, router_bias: Params, batch: Mapping[str, HostField]) -> np.ndarray:
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


class OutputStates:
    """The hidden states at chosen outputs of a batch."""

    def __init__(self, definition: ModelDef, mesh: Mesh):
        self.definition, self.mesh = definition, mesh
        specs = {name: field_spec(name) for name in (*ROW_FIELDS, "feedback_outputs")}
        self._program = jax.jit(
            jax.shard_map(self._states, mesh=mesh, in_specs=(*definition.specs(mesh), specs), out_specs=ROW_SPEC)
        )

    def __call__(
        self, params: Params, router_bias: Params, batch: Mapping[str, HostField], outputs_BN: HostField
    ) -> np.ndarray:
        """Returns the normalised last states [B,N,D] at these outputs, compute dtype, in every process.

        Experts are those that the router chooses, whatever routes the batch has.

        Args:
          batch: numpy arrays [B,S]; of its fields, those of ROW_FIELDS are used.
          outputs_BN: int32, positions in the row; the states of negative ones are zero.

        Raises:
          UserError: the batch does not divide over the mesh.
        """
        fields = states_fields(batch, outputs_BN)
        return gather_to_host(self._program(params, router_bias, shard_batch(fields, self.mesh)))

    def _states(self, params, router_bias, batch):
        decoder = self.definition.bind(params, router_bias)
        states_BND, is_here_BN = states_at(hidden_states(decoder, batch).last_BSD, batch["feedback_outputs"])
        states_BND = jnp.where(is_here_BN[..., None], states_BND, 0)
        # One device of the axis has the state and the others add zeros, so that the sum is exact. On an axis of size 1
        # it only removes the axis from the type (shard_map's VMA).
        return jax.lax.psum(states_BND, context.AXIS)
