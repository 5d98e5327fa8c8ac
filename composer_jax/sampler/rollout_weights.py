"""The sampler's own copy of the learner's weights: cast or quantised, in the shardings of the sampler's mesh."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from composer_jax.errors import UserError
from composer_jax.models.model_def import ModelDef, Params
from composer_jax.ops.quantization import LARGEST, QuantizedArray, quantize_weight
from composer_jax.sampler.config import SamplerConfig


def rollout_model_def(definition: ModelDef, sampler: SamplerConfig) -> ModelDef:
    """Returns the network with the weights as a sampler stores them, and with the cache that its drafts need.

    An 8-bit sampler.param_dtype applies to matrices; the other weights keep their dtype. Raises UserError for drafts of
    an MTP module from a network that has none, or 8-bit weights in a network that rounds its weights itself, as sampler
    and learner would then round different numbers.
    """
    config, changes = definition.config, {}
    if sampler.param_dtype in LARGEST:
        for field in ("precision", "expert_qat"):
            if (value := getattr(config, field)) != "none":
                raise UserError(
                    f"sampler.param_dtype={sampler.param_dtype!r} rounds weights that model.{field}={value!r} rounds, "
                    "too; leave sampler.param_dtype empty."
                )
    if sampler.drafts == "mtp":
        if not config.n_mtp_modules:
            raise UserError('sampler.drafts="mtp" needs a network with an MTP module; use "prompt_lookup" or none.')
        changes["cache_mtp"] = True
    if sampler.param_dtype and sampler.param_dtype not in LARGEST:
        changes["param_dtype"] = sampler.param_dtype
    matrix_dtype = sampler.param_dtype if sampler.param_dtype in LARGEST else definition.matrix_dtype
    return ModelDef(dataclasses.replace(config, **changes), matrix_dtype)


class RolloutWeights:
    """Makes the sampler's copies of (params, router_bias). The conversion is one jitted program, compiled once."""

    def __init__(self, definition: ModelDef, mesh: Mesh) -> None:
        """definition: of the copies (rollout_model_def). mesh: the sampler's."""
        self._shapes, self._shardings = definition.shapes(), definition.shardings(mesh)
        self._convert = jax.jit(lambda weights: _map_weights(convert_weight, self._shapes, weights))

    def to_rollout(self, params: Params, router_bias: Params, *, copy: bool) -> tuple[Params, Params]:
        """Returns weights of the learner in the sampler's dtypes and shardings.

        The conversion runs where the weights are, so to another mesh they travel in the sampler's dtypes. Raises
        ValueError for weights of another network.

        Args:
          params, router_bias: arrays in any floating dtype and on any mesh; 8-bit ones only if all have the sampler's
            dtypes and `copy` is False.
          copy: False shares the arrays that have the sampler's layout, if all have its dtypes.
        """
        weights = (params, router_bias)
        if copy or not all(jax.tree.leaves(_map_weights(_has_dtype, self._shapes, weights))):
            weights = self._convert(weights)
        return jax.device_put(weights, self._shardings)

    def replace(self, held: list[jax.Array | None], params: Params, router_bias: Params) -> tuple[Params, Params]:
        """Replaces the changed tensors of a sampler's weights, one after another; returns the weights.

        An old tensor is freed before the new one is placed, so old and new weights never exist together on a device. If
        this raises, what is left is a mixture of two versions.

        Args:
          held: the leaves of the sampler's weights, which nobody else holds; None where there is none yet. Emptied.
          params, router_bias: HostTensors; not for 8-bit weights, which are made on the devices from whole arrays.
        """
        tensors, tree = jax.tree.flatten((params, router_bias))
        to, shardings = jax.tree.leaves(self._shapes), jax.tree.leaves(self._shardings)
        placed = []
        held.reverse()
        for tensor, weight, sharding in zip(tensors, to, shardings, strict=True):
            array = held.pop()
            if array is None or tensor.is_changed:
                del array
                # Waiting for each keeps the host's copies of the others from being made meanwhile.
                array = jax.block_until_ready(tensor.place(weight.dtype, sharding))
            placed.append(array)
        return jax.tree.unflatten(tree, placed)


def _has_dtype(to: jax.ShapeDtypeStruct | QuantizedArray, weight: jax.Array | QuantizedArray) -> bool:
    if isinstance(to, QuantizedArray) != isinstance(weight, QuantizedArray):
        return False
    return all(a.dtype == b.dtype for a, b in zip(jax.tree.leaves(to), jax.tree.leaves(weight), strict=True))


def _map_weights(function, shapes, weights):
    """Maps function(abstract weight, weight) over two trees; an abstract QuantizedArray is one weight."""
    return jax.tree.map(function, shapes, weights, is_leaf=lambda node: isinstance(node, QuantizedArray))


def convert_weight(to: jax.ShapeDtypeStruct | QuantizedArray, weight: jax.Array) -> jax.Array | QuantizedArray:
    """Returns a copy of a weight in the dtype of `to`; an abstract QuantizedArray makes it 8-bit."""
    if not isinstance(to, QuantizedArray):
        return jnp.copy(weight).astype(to.dtype)
    in_axes = tuple(axis for axis, size in enumerate(to.scales.shape) if size < weight.shape[axis])
    return quantize_weight(weight, in_axes, to.values.dtype.name)
