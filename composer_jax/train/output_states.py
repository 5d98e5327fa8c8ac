"""OutputStates: the hidden states at chosen outputs of a batch, under weights that are not trained."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from composer_jax.models.model_def import ModelDef, Params
from composer_jax.parallel import context
from composer_jax.parallel.mesh import ROW_SPEC
from composer_jax.parallel.processes import gather_to_host
from composer_jax.train.forward import hidden_states
from composer_jax.train.shard_batch import field_spec, shard_batch
from composer_jax.train.teacher_kl import states_at

ROW_FIELDS = ("tokens", "positions", "segments", "weights")


class OutputStates:
    """The compiled forward pass on a mesh, one program for each shape of batches. It holds no weights."""

    def __init__(self, definition: ModelDef, mesh: Mesh):
        self.definition, self.mesh = definition, mesh
        specs = {name: field_spec(name) for name in (*ROW_FIELDS, "feedback_outputs")}
        self._program = jax.jit(
            jax.shard_map(self._states, mesh=mesh, in_specs=(*definition.specs(mesh), specs), out_specs=ROW_SPEC)
        )

    def __call__(
        self, params: Params, router_bias: Params, batch: dict[str, np.ndarray], outputs_BN: np.ndarray
    ) -> np.ndarray:
        """Returns the normalised last states [B,N,D] at these outputs, compute dtype, in every process.

        Experts are those that the router chooses, whatever routes the batch has.

        Args:
          batch: numpy arrays [B,S]; of its fields, those of ROW_FIELDS are used.
          outputs_BN: int32, positions in the row; the states of negative ones are zero.

        Raises:
          UserError: the batch does not divide over the mesh.
        """
        fields = {name: batch[name] for name in ROW_FIELDS} | {"feedback_outputs": outputs_BN}
        return gather_to_host(self._program(params, router_bias, shard_batch(fields, self.mesh)))

    def _states(self, params, router_bias, batch):
        decoder = self.definition.bind(params, router_bias)
        states_BND, is_here_BN = states_at(hidden_states(decoder, batch).last_BSD, batch["feedback_outputs"])
        states_BND = jnp.where(is_here_BN[..., None], states_BND, 0)
        # One device of the axis has the state and the others add zeros, so that the sum is exact. On an axis of size 1
        # it only removes the axis from the type (shard_map's VMA).
        return jax.lax.psum(states_BND, context.AXIS)
