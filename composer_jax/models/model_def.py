"""ModelDef and Params: the network as a static description plus a nested dict of arrays.

Trainer, optimizer, checkpoint, sampler and weight sync use only these two. `ModelDef.bind` puts the arrays back into
the NNX modules inside a traced function; a compiled program runs without NNX.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from flax.traverse_util import unflatten_dict
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from composer_jax.models.attention_kinds import attention_kind
from composer_jax.models.config import ModelConfig
from composer_jax.models.decoder import Decoder
from composer_jax.models.initializers import Params, initialize
from composer_jax.models.parameter import RouterBias, matrix_axes, scale_axes
from composer_jax.ops.quantization import QuantizedArray, quantize_weight
from composer_jax.parallel.sharding import storage_sharding

__all__ = ["ModelDef", "Params"]


@dataclasses.dataclass(frozen=True)
class ModelDef:
    """The static part of a Decoder. The optimizer trains `params`; the load rule moves `router_bias`.

    Raises:
      UserError: the config's attention kind is unknown, or does not take the config's fields.
    """

    config: ModelConfig
    matrix_dtype: str = ""
    """Of a sampler's copy of the weights: "int8" or "float8_e4m3fn" stores matrices as QuantizedArrays (all but the
    embedding table, the head and the routers, as in DeepSeek-V3, arXiv 2412.19437, section 3.3); the other weights have
    config.param_dtype. Empty, as for all that trains or loads weights: every weight is one array in that dtype."""
    measures_logits: bool = False
    """Whether the Decoder's training form returns the largest attention logit of every head (Hidden.max_logits), which
    a Learner with OptimizerConfig.qk_clip needs; the attention kind must be a ClippedAttention."""
    reduce_dtype: str = "float32"
    """Dtype in which the gradients of weights are summed over devices (MeshConfig.reduce_dtype)."""

    def __post_init__(self) -> None:
        attention_kind(self.config)

    def bind(self, params: Params, router_bias: Params) -> Decoder:
        """Returns the Decoder with these arrays; call it inside a traced function."""
        graph, param_state, bias_state = _abstract(self.config, self.measures_logits)
        param_state, bias_state = nnx.clone(param_state), nnx.clone(bias_state)
        nnx.replace_by_pure_dict(param_state, params)
        nnx.replace_by_pure_dict(bias_state, router_bias)
        for _, variable in nnx.to_flat_state(param_state):
            variable.set_metadata(reduce_dtype=self.reduce_dtype)
        return nnx.merge(graph, param_state, bias_state)

    def init(self, seed: int, mesh: Mesh | None = None) -> tuple[Params, Params]:
        """Returns initial (params, router_bias), created directly in their shards where a mesh is given.

        All weights have config.param_dtype, whatever matrix_dtype is.
        """
        return self._init(seed, mesh, lambda tree: tree)

    def init_mtp(self, seed: int, mesh: Mesh | None = None) -> tuple[Params, Params | None]:
        """Returns the "mtp" subtrees of what `init` returns, without creating the others; None for one that is not."""
        return self._init(seed, mesh, lambda tree: tree.get("mtp"))

    def _init(self, seed: int, mesh: Mesh | None, select: Callable[[Params], Any]) -> tuple[Any, Any]:
        """Returns the selected part of the initial params, and of the router bias."""

        def make():
            config = self.config
            # The "rbg" generator compiles several times faster than threefry for many differently shaped weights.
            rngs = nnx.Rngs(params=jax.random.key(seed, impl="rbg"))
            _, params, bias = nnx.split(Decoder(config, rngs=rngs), nnx.Param, RouterBias)
            params, bias = nnx.to_pure_dict(params), nnx.to_pure_dict(bias)
            return select(initialize(params, config, jax.random.key(seed + 1))), select(bias)

        shardings = None if mesh is None else tuple(map(select, ModelDef(self.config).shardings(mesh)))
        return jax.jit(make, out_shardings=shardings)()

    def shapes(self) -> tuple[Params, Params]:
        """Returns (params, router_bias) as ShapeDtypeStructs."""
        _, params, bias = _abstract(self.config)
        return _map_variables(params, self._abstract_weight), _map_variables(bias, _shape_and_dtype)

    def specs(self, mesh: Mesh) -> tuple[Params, Params]:
        """Returns the PartitionSpecs under which (params, router_bias) are stored."""
        return jax.tree.map(lambda sharding: sharding.spec, self.shardings(mesh))

    def shardings(self, mesh: Mesh) -> tuple[Params, Params]:
        """Returns the NamedShardings of (params, router_bias) on a mesh.

        Raises:
          UserError: a dimension does not divide over its mesh axes.
        """
        _, params, bias = _abstract(self.config)

        def sharding(variable: nnx.Variable):
            weight, axes = self._abstract_weight(variable), tuple(variable.get_metadata()["axes"])
            # Stacked layers have a leading axis without a name.
            axes = (None,) * (len(variable.get_value().shape) - len(axes)) + axes
            if not isinstance(weight, QuantizedArray):
                return storage_sharding(mesh, weight.shape, axes)
            return QuantizedArray(
                storage_sharding(mesh, weight.values.shape, axes),
                storage_sharding(mesh, weight.scales.shape, scale_axes(axes, variable.get_metadata()["in_axes"])),
            )

        return _map_variables(params, sharding), _map_variables(bias, lambda _: NamedSharding(mesh, PartitionSpec()))

    def abstract_weights(self, mesh: Mesh) -> tuple[Params, Params]:
        """Returns the shapes, dtypes and shardings of (params, router_bias) on a mesh; raises as `shardings`."""
        return jax.tree.map(
            lambda a, sharding: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding),
            self.shapes(),
            self.shardings(mesh),
        )

    def decay_mask(self) -> Params:
        """Returns whether weight decay applies to each parameter, as bools in a tree like params."""
        return _map_variables(_abstract(self.config)[1], lambda variable: variable.get_metadata()["decays"])

    def matrix_axes(self) -> Params:
        """Returns the MatrixAxes of each parameter, or None, in a tree like params."""
        return _map_variables(_abstract(self.config)[1], matrix_axes)

    def parameter_count(self) -> int:
        """Returns the number of trained parameters, embedding and head included."""
        return sum(leaf.size for leaf in jax.tree.leaves(ModelDef(self.config).shapes()[0]))

    def active_parameter_count(self) -> int:
        """Returns the number of parameters that compute one token: all but those of experts that are not chosen."""
        config = self.config
        expert = 3 * config.d_model * config.expert_ff_dim
        if config.expert_bias:
            expert += 2 * config.expert_ff_dim + config.d_model
        idle = (config.n_experts - config.experts_per_token) * expert
        return self.parameter_count() - idle * (config.n_moe_layers + config.n_mtp_modules)

    def _abstract_weight(self, variable: nnx.Variable) -> Any:
        """Returns the shape and dtype of a weight in storage; of an 8-bit one, a QuantizedArray of them."""
        weight, metadata = _shape_and_dtype(variable), variable.get_metadata()
        if not self.matrix_dtype or metadata.get("full_precision", True):
            return weight
        return jax.eval_shape(lambda w: quantize_weight(w, metadata["in_axes"], self.matrix_dtype), weight)


def _abstract(config: ModelConfig, measures_logits: bool = False):
    """Returns the graph definition and the abstract states of params and router bias. Not cached: tracing is cheap."""
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(params=0), measures_logits=measures_logits))
    return nnx.split(model, nnx.Param, RouterBias)


def _shape_and_dtype(variable: nnx.Variable) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(variable.get_value().shape, variable.get_value().dtype)


def _map_variables(state: nnx.State, function: Callable[[nnx.Variable], Any]) -> Params:
    """Maps a function over the variables, to a nested dict."""
    return unflatten_dict({path: function(variable) for path, variable in nnx.to_flat_state(state)})
