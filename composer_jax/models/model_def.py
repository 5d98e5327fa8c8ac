"""ModelDef and Params: the network as a static description plus a nested dict of arrays.

Trainer, optimizer, checkpoint, sampler and weight sync see only these. `ModelDef.bind` puts the arrays back into the
NNX modules inside a traced function; nothing is dispatched through NNX at run time.
"""

import dataclasses

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from composer_jax.models.config import ModelConfig
from composer_jax.models.decoder import Decoder
from composer_jax.models.initializers import Params, initialize
from composer_jax.models.parameter import RouterBias
from composer_jax.parallel.sharding import storage_sharding

__all__ = ["ModelDef", "Params"]


@dataclasses.dataclass(frozen=True)
class ModelDef:
    """The static part of a Decoder. `params` are what the optimizer trains, `router_bias` what the load rule moves."""

    config: ModelConfig

    def bind(self, params: Params, router_bias: Params) -> Decoder:
        """The Decoder with these arrays; call it inside a traced function."""
        graph, param_state, bias_state = _abstract(self.config)
        param_state, bias_state = nnx.clone(param_state), nnx.clone(bias_state)
        nnx.replace_by_pure_dict(param_state, params)
        nnx.replace_by_pure_dict(bias_state, router_bias)
        return nnx.merge(graph, param_state, bias_state)

    def init(self, seed: int, mesh: Mesh | None = None) -> tuple[Params, Params]:
        """Random (params, router_bias), created directly in their shards when a mesh is given."""

        def make():
            config = self.config
            # The "rbg" generator compiles several times faster than threefry for many differently shaped weights.
            rngs = nnx.Rngs(params=jax.random.key(seed, impl="rbg"))
            _, params, bias = nnx.split(Decoder(config, rngs=rngs), nnx.Param, RouterBias)
            params, bias = nnx.to_pure_dict(params), nnx.to_pure_dict(bias)
            return initialize(params, config, jax.random.key(seed + 1)), bias

        return jax.jit(make, out_shardings=None if mesh is None else self.shardings(mesh))()

    def shapes(self) -> tuple[Params, Params]:
        """(params, router_bias) as ShapeDtypeStructs."""
        _, params, bias = _abstract(self.config)
        return tuple(
            jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), nnx.to_pure_dict(s)) for s in (params, bias)
        )

    def specs(self, mesh: Mesh) -> tuple[Params, Params]:
        """PartitionSpecs under which (params, router_bias) are stored."""
        return jax.tree.map(lambda sharding: sharding.spec, self.shardings(mesh))

    def shardings(self, mesh: Mesh) -> tuple[Params, Params]:
        """NamedShardings of (params, router_bias) on a mesh; a UserError names sizes that do not divide."""
        _, params, bias = _abstract(self.config)
        return (
            _map_axes(params, lambda shape, axes: storage_sharding(mesh, shape, axes)),
            _map_axes(bias, lambda *_: NamedSharding(mesh, PartitionSpec())),
        )

    def parameter_count(self) -> int:
        """All trained numbers, embedding and head included."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.shapes()[0]))

    def active_parameter_count(self) -> int:
        """Those that one token meets: all but the routed experts that it was not sent to."""
        config = self.config
        expert = 3 * config.d_model * config.expert_ff_dim
        if config.expert_bias:
            expert += 2 * config.expert_ff_dim + config.d_model
        idle = (config.n_experts - config.experts_per_token) * expert
        return self.parameter_count() - idle * (config.n_moe_layers + config.n_mtp_modules)


def _abstract(config: ModelConfig):
    """Graph definition and abstract states; NNX caches nothing here and tracing a tiny constructor is cheap."""
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(params=0)))
    return nnx.split(model, nnx.Param, RouterBias)


def _map_axes(state: nnx.State, function) -> Params:
    """A pure dict of function(shape, logical axes) for each variable; stacked layers get a leading unnamed axis."""
    pure = {}
    for path, variable in nnx.to_flat_state(state):
        shape = variable.get_value().shape
        axes = tuple(variable.get_metadata()["axes"])
        node = pure
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = function(shape, (None,) * (len(shape) - len(axes)) + axes)
    return pure
