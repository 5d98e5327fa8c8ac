"""The Learner: (TrainState, batches) -> (TrainState, metrics), jitted once per batch shape.

A step has two compiled programs: `gradient` computes the gradient of one batch on the whole mesh under shard_map, and
`update` applies the accumulated gradient. A third program, `evaluate`, computes the loss without a gradient. The
gradient is summed over the mesh in one of two ways:

- "collective": inside `gradient`, by the transposes of the parameter gathers.
- "host": each replica keeps its own gradient, and the host adds them. On a CPU with few cores XLA's collectives can
  starve each other's threads and stall. Programs without collectives cannot, and two replicas still use two cores.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from composer_jax.data.host_batch import HostField
from composer_jax.errors import UserError
from composer_jax.models.model_def import ModelDef, Params
from composer_jax.models.router import updated_bias
from composer_jax.ops.shapes import check_shapes
from composer_jax.parallel.mesh import TOKEN_AXES
from composer_jax.train.forward import Batch
from composer_jax.train.losses import Loss, Normalisers
from composer_jax.train.optimizer import Optimizer
from composer_jax.train.qk_clip import check_attention_logits, check_qk_clip, clip_heads
from composer_jax.train.shard_batch import field_spec, shard_batch

HOST_MEMORY = "pinned_host"
"""JAX's name of the host's memory that devices read and write by themselves."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """What a step changes; donated to it."""

    params: Params
    router_bias: Params
    optimizer: Any
    """State of the optax transformation; a MasterState around it if there are master weights."""
    step: jax.Array
    """int32 scalar: steps taken, skipped ones included, so that the host can count them without asking the devices."""


class MasterState(NamedTuple):
    """Optimizer state with a float32 master copy of the weights, where the model's own are bfloat16.

    A bfloat16 has 8 significant bits, so that an update below 1/512 of a weight rounds to nothing. The optimizer
    accumulates updates in the master copy, and the model's weights are the rounded copy of it (Micikevicius et al.
    2018, arXiv 1710.03740, section 3.1).
    """

    weights: Params
    """The master copy, like params, in the master's dtype."""
    transformation: Any
    """State of the optax transformation; its dtype is that of OptimizerConfig.moment_dtype."""


@dataclasses.dataclass(frozen=True)
class StepMetrics:
    """Metrics of a step that the devices may not have finished yet."""

    arrays: dict[str, Any]
    """Sums and maxima of the loss, grad_norm and skipped, float32 []; "counts", where the network has experts: tokens
    per expert by stack, float32 [L,E]."""
    learning_rate: float

    def fetch(self) -> dict[str, float]:
        """Waits for the step and returns its metrics; `Learner.step` lists them."""
        arrays = dict(self.arrays)
        counts = arrays.pop("counts", None)
        metrics = {name: float(value) for name, value in arrays.items()} | {"learning_rate": self.learning_rate}
        if counts is not None:
            metrics["load_imbalance"] = load_imbalance(counts["moe_layers"])
            metrics["router_entropy"] /= max(1.0, _sum_counts(counts))
        return metrics


class Learner:
    """The compiled step of one loss. It holds no weights."""

    def __init__(
        self,
        definition: ModelDef,
        optimizer: Optimizer,
        loss: Loss,
        mesh: Mesh,
        *,
        reduction: Literal["collective", "host"] = "collective",
        reduce_dtype: Literal["float32", "bfloat16"] = "float32",
        router_bias_update_rate: float = 0.0,
    ):
        """
        Args:
          reduction: how gradients are summed over `replica` (the module's docstring); "host" needs a single process.
          reduce_dtype: in which devices sum gradients (MeshConfig).
          router_bias_update_rate: step of the router bias towards even load (DeepSeek-V3: 1e-3); 0 freezes the bias,
            and a network without experts has none.
        """
        if reduction not in ("collective", "host"):
            raise UserError(f"reduction={reduction!r} is unknown; use 'collective' or 'host'.")
        if optimizer.config.qk_clip is not None:
            check_qk_clip(definition.config)
        definition = dataclasses.replace(definition, reduce_dtype=reduce_dtype)
        self.definition, self.optimizer, self.mesh = definition, optimizer, mesh
        self.host_reduction = reduction == "host" and mesh.shape["replica"] > 1
        self.replicated = NamedSharding(mesh, PartitionSpec())
        self.transformation = optimizer.make_transformation(definition, None if self.host_reduction else mesh)
        settings, param_dtype = optimizer.config, definition.config.param_dtype
        self.master_dtype = "" if settings.master_dtype == param_dtype else settings.master_dtype
        self.moment_dtype = settings.moment_dtype or param_dtype
        self.update_dtype = self.master_dtype or jnp.promote_types(param_dtype, self.moment_dtype).name
        self._trains: Callable[[str], bool] = getattr(loss, "trains", lambda _: True)
        self._gradient = jax.jit(self._sharded_program(loss, with_gradient=True))
        self._evaluate = jax.jit(self._sharded_program(loss, with_gradient=False))
        self._accumulate = jax.jit(_accumulate, donate_argnums=0)
        self._accumulate_first = jax.jit(_accumulate)
        self._update = jax.jit(self._apply, static_argnames="router_bias_update_rate", donate_argnums=0)
        self.router_bias_update_rate = router_bias_update_rate

    def init_state(self, params: Params, router_bias: Params) -> TrainState:
        """A TrainState at step 0 with a copy of the weights; a step donates its state, not the arrays given here."""
        params, router_bias = jax.jit(
            lambda t: jax.tree.map(jnp.copy, t), out_shardings=self.definition.shardings(self.mesh)
        )((params, router_bias))
        optimizer = jax.jit(self._init_optimizer, out_shardings=self._optimizer_shardings())(params)
        return TrainState(params, router_bias, optimizer, jax.device_put(jnp.int32(0), self.replicated))

    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and shardings of a TrainState; works on a mesh of devices that this machine lacks."""
        params, router_bias = self.definition.shapes()
        param_shardings, bias_shardings = self.definition.shardings(self.mesh)
        optimizer = jax.eval_shape(self._init_optimizer, params)
        return TrainState(
            _with_shardings(params, param_shardings),
            _with_shardings(router_bias, bias_shardings),
            _with_shardings(optimizer, self._optimizer_shardings()),
            _with_shardings(jax.ShapeDtypeStruct((), jnp.int32), self.replicated),
        )

    def programs(
        self, batch: dict[str, jax.ShapeDtypeStruct], *, accumulates: bool = False
    ) -> dict[str, tuple[Callable, tuple, dict]]:
        """The programs of a step with abstract arguments, to be traced or compiled.

        Args:
          batch: shapes and dtypes of the batch's fields, [B,S] each.
          accumulates: whether the step adds the gradients of several batches.

        Returns:
          {"gradient": (jitted function, arguments, keyword arguments), "update" and "evaluate": the same}.
        """
        state = self.abstract_state()
        scalar = jax.ShapeDtypeStruct((), np.float32, sharding=self.replicated)
        fields = {name: NamedSharding(self.mesh, field_spec(name)) for name in batch}
        batch = {name: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=fields[name]) for name, a in batch.items()}
        gradient = (state.params, state.router_bias, batch, scalar)
        total = jax.eval_shape(self._gradient, *gradient)
        if accumulates:
            total = jax.eval_shape(_accumulate, total, total)
        shardings = jax.tree.map(lambda _: self.replicated, total)
        shardings["gradient"] = self.definition.shardings(self.mesh)[0]
        update = (state, _with_shardings(total, shardings), scalar)
        return {
            "gradient": (self._gradient, gradient, {}),
            "evaluate": (self._evaluate, gradient, {}),
            "update": (self._update, update, {"router_bias_update_rate": self.router_bias_update_rate}),
        }

    def _init_optimizer(self, params: Params) -> Any:
        state = _cast_floats(self.transformation.init(params), self.moment_dtype)
        return MasterState(_cast_floats(params, self.master_dtype), state) if self.master_dtype else state

    def _optimizer_shardings(self, *, in_use: bool = False) -> Any:
        """Shardings of the optimizer's state: a parameter's moments and master weight have the parameter's own.

        With optimizer.offload they lie in the host's memory, except while a step has them in use.
        """
        params = self.definition.shardings(self.mesh)[0]
        if self.optimizer.config.offload and not in_use:
            params = jax.tree.map(lambda sharding: sharding.with_memory_kind(HOST_MEMORY), params)
        is_masked = lambda leaf: isinstance(leaf, optax.MaskedNode)  # noqa: E731
        state = optax.tree_map_params(
            self.transformation,
            lambda leaf, sharding: leaf if is_masked(leaf) else sharding,
            jax.eval_shape(self.transformation.init, self.definition.shapes()[0]),
            params,
            transform_non_params=lambda _: self.replicated,
            is_leaf=is_masked,
        )
        return MasterState(params, state) if self.master_dtype else state

    def step(
        self, state: TrainState, batches: Iterable[Mapping[str, HostField]], normalisers: Normalisers
    ) -> tuple[TrainState, dict[str, float]]:
        """Takes one optimizer step over one or more accumulated batches, whose shapes may differ.

        The gradients of several batches are added in float32, 4 bytes a parameter, sharded like the weights; that of a
        single batch stays in the dtype of the weights.

        A step whose gradient has a norm that is not finite is skipped: weights, optimizer and router bias stay as they
        are, and the step counter and the learning rate go on.

        Args:
          state: donated; use the returned one.
          batches: dicts of fields [B,S], arrays of NumPy or what makes their blocks (train/shard_batch.py); B must
            divide over the batch axes of the mesh.
          normalisers: what the loss divides its sums by: a number, for example the number of loss tokens of all
            batches, or the LossTermNormalisers of train/losses.py.

        Returns:
          The state after the step, and metrics: the sums and maxima of the loss, grad_norm, learning_rate, skipped (1
          for a skipped step, else 0), where the network has experts load_imbalance (load of the busiest expert over
          the mean, averaged over layers) and router_entropy (nats, mean over tokens and layers), and under QK-clip
          max_attention_logit (the largest of the forward passes, over the layers that learn).

        Raises:
          UserError: the batch does not divide over the mesh.
          ValueError: there are no batches.
        """
        state, metrics = self.start_step(state, batches, normalisers, int(state.step))
        return state, metrics.fetch()

    def start_step(
        self,
        state: TrainState,
        batches: Iterable[Mapping[str, HostField]],
        normalisers: Normalisers,
        steps_taken: int,
    ) -> tuple[TrainState, StepMetrics]:
        """`step` without waiting for the devices, so that the host can prepare the next step meanwhile.

        Args:
          steps_taken: the value of state.step, which would have to be fetched otherwise.
        """
        total = None
        for batch in batches:
            total = self.add_gradient(total, state, batch, normalisers)
        if total is None:
            raise ValueError("a step needs at least one batch")
        return self.apply_gradient(state, total, steps_taken)

    def add_gradient(
        self,
        total: dict[str, Any] | None,
        state: TrainState,
        batch: Mapping[str, HostField],
        normalisers: Normalisers,
    ) -> dict[str, Any]:
        """Returns the gradients of the batches before this one, and of this one; None: of none. `total` is donated."""
        part = self.gradient(state.params, state.router_bias, batch, normalisers)
        return part if total is None else self._add(total, part)

    def apply_gradient(
        self, state: TrainState, total: dict[str, Any], steps_taken: int
    ) -> tuple[TrainState, StepMetrics]:
        """The end of a step, after `add_gradient` of all its batches; both arguments are donated."""
        if self.host_reduction:
            total = jax.device_put(total, self.replicated)
        rate = self.optimizer.learning_rate(steps_taken)
        state, sums, maxima = self._update(
            state, total, np.float32(rate), router_bias_update_rate=self.router_bias_update_rate
        )
        return state, StepMetrics(sums | maxima, rate)

    def _add(self, total: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
        """The sum of the results of two batches, in float32. `total` is donated, except a bfloat16 one, whose memory
        a float32 sum cannot take."""
        is_wide = all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(total["gradient"]))
        return (self._accumulate if is_wide else self._accumulate_first)(total, part)

    def gradient(
        self, params: Params, router_bias: Params, batch: Mapping[str, HostField], normalisers: Normalisers
    ) -> dict[str, Any]:
        """The gradient of one batch, before an optimizer sees it.

        Args:
          batch: numpy arrays [B,S]; B must divide over the batch axes of the mesh.
          normalisers: as in `step`.

        Returns:
          {"gradient": like params, "sums" and "maxima": those of the LossOutput}. With host reduction, every array has
          a leading axis over replicas that is yet to be reduced.
        """
        return self._gradient(params, router_bias, self.shard_batch(batch), jax.tree.map(np.float32, normalisers))

    def evaluate(self, state: TrainState, batches: Iterable[dict[str, np.ndarray]]) -> dict[str, float]:
        """The sums of the loss over batches, computed without a gradient; the state does not change.

        With experts, "routed" is the sum of their counts: router_entropy / routed is the mean entropy of the routers.
        """
        sums: dict[str, float] = {}
        for batch in batches:
            part = self._evaluate(state.params, state.router_bias, self.shard_batch(batch), np.float32(1))["sums"]
            if (counts := part.pop("counts", None)) is not None:
                part["routed"] = _sum_counts(counts)
            for name, value in part.items():
                sums[name] = sums.get(name, 0.0) + float(np.sum(value))
        return sums

    def shard_batch(self, batch: Mapping[str, HostField]) -> Batch:
        """`shard_batch` on the Learner's mesh."""
        return shard_batch(batch, self.mesh)

    def _sharded_program(self, loss: Loss, *, with_gradient: bool):
        """The loss on the whole mesh, (params, router_bias, batch, normalisers) -> dict.

        Its keys are "gradient" (None without gradient), "sums" and "maxima".
        """
        reduced = tuple(a for a in TOKEN_AXES if not (self.host_reduction and a == "replica"))
        clips = with_gradient and self.optimizer.config.qk_clip is not None
        definition = dataclasses.replace(self.definition, measures_logits=clips)

        def program(params, router_bias, batch, normalisers):
            if self.host_reduction:
                params = jax.tree.map(lambda w: jax.lax.pcast(w, "replica", to="varying"), params)

            def objective(params):
                params = {
                    name: weights if self._trains(name) else jax.lax.stop_gradient(weights)
                    for name, weights in params.items()
                }
                out = loss(definition.bind(params, router_bias), batch, normalisers)
                return out.loss, out

            if with_gradient:
                (_, out), gradient = jax.value_and_grad(objective, has_aux=True)(params)
            else:
                (_, out), gradient = objective(params), None
            sums = jax.tree.map(lambda x: jax.lax.psum(x, reduced), out.sums | {"loss": out.loss})
            maxima = jax.tree.map(lambda x: jax.lax.pmax(x, reduced), out.maxima)
            part = {"gradient": gradient, "sums": sums, "maxima": maxima}
            return jax.tree.map(lambda x: x[None], part) if self.host_reduction else part

        param_specs, bias_specs = self.definition.specs(self.mesh)

        def sharded(params, router_bias, batch, normalisers):
            inner = jax.eval_shape(lambda p, b, x: loss_shapes(definition, loss, p, b, x), params, router_bias, batch)
            if clips:
                check_attention_logits(inner.maxima)
            lead = ("replica",) if self.host_reduction else ()
            is_spec = lambda s: isinstance(s, PartitionSpec)  # noqa: E731
            gradient_specs = jax.tree.map(lambda s: PartitionSpec(*lead, *s), param_specs, is_leaf=is_spec)
            out_specs = {
                "gradient": gradient_specs if with_gradient else None,
                "sums": jax.tree.map(lambda _: PartitionSpec(*lead), inner.sums | {"loss": inner.loss}),
                "maxima": jax.tree.map(lambda _: PartitionSpec(*lead), inner.maxima),
            }
            return jax.shard_map(
                program,
                mesh=self.mesh,
                in_specs=(param_specs, bias_specs, {name: field_spec(name) for name in batch}, PartitionSpec()),
                out_specs=out_specs,
            )(params, router_bias, batch, normalisers)

        return sharded

    def _apply(self, state: TrainState, total, learning_rate, *, router_bias_update_rate: float):
        if self.host_reduction:
            total = {
                "gradient": jax.tree.map(lambda x: x.sum(0), total["gradient"]),
                "sums": jax.tree.map(lambda x: x.sum(0), total["sums"]),
                "maxima": jax.tree.map(lambda x: x.max(0), total["maxima"]),
            }
        gradient, sums, maxima = total["gradient"], total["sums"], dict(total["maxima"])
        norm = optax.tree.norm(gradient)
        is_finite = jnp.isfinite(norm)
        max_logits = {name: of for name, of in maxima.pop("attention_logits", {}).items() if self._trains(name)}
        if self.optimizer.config.offload:
            on_device = jax.device_put(state.optimizer, self._optimizer_shardings(in_use=True))
            state = dataclasses.replace(state, optimizer=on_device)
        params, optimizer = self._update_weights(state, gradient, learning_rate, is_finite, max_logits)
        if self.optimizer.config.offload:
            optimizer = jax.device_put(optimizer, self._optimizer_shardings())
        if max_logits:
            maxima["max_attention_logit"] = jnp.stack([of.max() for of in max_logits.values()]).max()
        router_bias = state.router_bias
        if router_bias_update_rate and "counts" in sums:
            counts = {name: count_LE for name, count_LE in sums["counts"].items() if self._trains(name)}
            moved = update_router_bias(router_bias, counts, router_bias_update_rate)
            router_bias = _where(is_finite, moved, router_bias)
        sums = sums | {"grad_norm": norm, "skipped": 1 - is_finite.astype(jnp.float32)}
        return TrainState(params, router_bias, optimizer, state.step + 1), sums, maxima

    def _update_weights(
        self,
        state: TrainState,
        gradient: Params,
        learning_rate: jax.Array,
        is_finite: jax.Array,
        max_logits: dict[str, jax.Array],
    ) -> tuple[Params, Any]:
        """Returns params and the optimizer's state after a step; those before it unless `is_finite`, bool [].

        max_logits: those of QK-clip (train/qk_clip.py); empty without it.

        With master weights the old params are not read, because they are those of the old master.
        """
        weights, stored = state.optimizer if self.master_dtype else (state.params, state.optimizer)
        gradient, old = _cast_floats((gradient, stored), self.update_dtype)
        direction, new = self.transformation.update(gradient, old, weights)
        new = _cast_like(_where(is_finite, new, old), stored)
        updated = jax.tree.map(lambda w, u: (w - learning_rate * u).astype(w.dtype), weights, direction)
        if self.optimizer.config.qk_clip is not None:
            updated = clip_heads(updated, max_logits, self.optimizer.config.qk_clip, self.definition.config)
        updated = _where(is_finite, updated, weights)
        updated |= {name: weights[name] for name in weights if not self._trains(name)}
        if not self.master_dtype:
            return updated, new
        return _cast_like(updated, state.params), MasterState(updated, new)


def loss_shapes(definition: ModelDef, loss: Loss, params, router_bias, batch):
    """The LossOutput outside shard_map, where weights have their whole shapes; for jax.eval_shape."""
    return loss(definition.bind(params, router_bias), batch, jnp.float32(1))


def update_router_bias(router_bias: Params, counts: dict[str, jax.Array], rate: float) -> Params:
    """The router bias after one step towards even load.

    Args:
      counts: by stack of layers, tokens of the global batch that chose each expert, float32 [L,E]. A stack that is not
        in it keeps its bias.
    """
    updated = dict(router_bias)
    for name, count_LE in counts.items():

        def update(bias_LE, count_LE=count_LE):
            check_shapes(bias_LE=(bias_LE, jnp.float32), count_LE=(count_LE, jnp.float32))
            return updated_bias(bias_LE, count_LE, rate)

        updated[name] = jax.tree.map(update, router_bias[name])
    return updated


def _sum_counts(counts: dict[str, Any]) -> float:
    """Returns the sum of the counts of all stacks."""
    return float(sum(np.asarray(counts_LE).sum(dtype=np.float64) for counts_LE in counts.values()))


def load_imbalance(counts_LE) -> float:
    """Load of the busiest expert over the mean load, averaged over layers; 1 is even load."""
    counts_LE = np.asarray(counts_LE)
    return float((counts_LE.max(-1) / np.maximum(counts_LE.mean(-1), 1e-9)).mean())


def _with_shardings(shapes: Any, shardings: Any) -> Any:
    return jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), shapes, shardings)


def _cast_floats(tree: Any, dtype: str) -> Any:
    """Returns the tree with floating arrays cast to `dtype`; others, such as counts, stay as they are."""
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


def _cast_like(tree: Any, like: Any) -> Any:
    """Returns the tree with every array cast to the dtype of its counterpart."""
    return jax.tree.map(lambda x, y: x.astype(y.dtype), tree, like)


def _where(condition: jax.Array, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)


def _accumulate(total, part):
    add = lambda a, b: jax.tree.map(jnp.add, *_cast_floats((a, b), "float32"))  # noqa: E731
    return {
        "gradient": add(total["gradient"], part["gradient"]),
        "sums": add(total["sums"], part["sums"]),
        "maxima": jax.tree.map(jnp.maximum, total["maxima"], part["maxima"]),
    }
