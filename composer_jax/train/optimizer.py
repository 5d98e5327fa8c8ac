"""Optimizers by name, and the learning-rate schedule of a stage."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Literal

import jax
import optax
from jax.sharding import Mesh

from composer_jax.errors import UserError
from composer_jax.extensions import resolve
from composer_jax.models.model_def import ModelDef
from composer_jax.train.muon import scale_by_muon


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer of a stage. Defaults are those of DeepSeek-V3's AdamW (arXiv 2412.19437, section 4.2), except for
    the learning rate, which every stage sets.

    Raises:
      UserError: an unknown name, or a number out of range; the message names the field.
    """

    name: str = "adamw"
    """One of OPTIMIZERS: "adamw", or "muon" (matrices by Muon, other weights by AdamW; docs/design.md). Or the import
    path of a function (OptimizerConfig, steps) -> Optimizer."""
    peak: float = 1e-3
    """Largest learning rate. Not published for these models; ours."""
    warmup: int = 0
    """Optimizer steps of linear warm-up from zero to the peak."""
    stable: float = 0.0
    """Fraction of the steps after the warm-up that have the peak, before the decay begins. Above 0 the schedule is WSD:
    warm-up, stable, decay (MiniCPM, arXiv 2404.06395, section 4; 0.9 there)."""
    decay: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape of the schedule between the end of the warm-up, or of the stable part, and the last step."""
    final: float = 0.0
    """Learning rate of the last step, as a fraction of the peak."""
    b1: float = 0.9
    """Decay rate of Adam's first moment (DeepSeek-V3: 0.9)."""
    b2: float = 0.95
    """Decay rate of Adam's second moment (DeepSeek-V3: 0.95)."""
    eps: float = 1e-8
    """Added to the root of Adam's second moment. Not published; optax's default."""
    momentum: float = 0.95
    """Of "muon": decay rate of the momentum of matrices (Moonlight, arXiv 2502.16982, section 2.1: 0.95)."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices (DeepSeek-V3: 0.1). Norm scales, biases and attention sinks do not decay."""
    clip: float = 1.0
    """Largest global norm of the gradient; a longer gradient is scaled down to it (DeepSeek-V3: 1.0)."""
    qk_clip: float | None = None
    """Largest attention logit of a head: one that exceeded it has its query and key weights scaled down after the step
    (train/qk_clip.py; 100 in Kimi K2, arXiv 2507.20534, section 2.1). None measures and clips nothing."""
    master_dtype: Literal["float32", ""] = "float32"
    """Dtype of the copy of the weights that the optimizer updates, if model.param_dtype is another one
    (train/learner.py: MasterState; DeepSeek-V3: float32). Empty: no copy; bfloat16 weights then lose most small
    updates."""
    moment_dtype: Literal["float32", "bfloat16", ""] = ""
    """Dtype in which moments are stored; a step computes with them in the dtype of its weights or a wider one. Empty:
    model.param_dtype, as in DeepSeek-V3 (section 3.3.3: bfloat16). A bfloat16 moment that a step changes by less than
    1/512, such as Adam's second with b2 above 0.998, stays as it is."""
    offload: bool = False
    """Keeps moments and master weights in the host's memory between steps. A step copies them to the devices after the
    gradient is computed, and back, so that they take no device memory beside activations."""

    def __post_init__(self):
        if ":" not in self.name:
            resolve(self.name, OPTIMIZERS, "optimizer.name")
        if self.decay not in ("cosine", "linear", "constant"):
            raise UserError(f"optimizer.decay={self.decay!r} is unknown; use 'cosine', 'linear' or 'constant'.")
        if self.master_dtype not in ("float32", ""):
            raise UserError(f"optimizer.master_dtype={self.master_dtype!r} is unknown; use 'float32' or ''.")
        if self.moment_dtype not in ("float32", "bfloat16", ""):
            raise UserError(
                f"optimizer.moment_dtype={self.moment_dtype!r} is unknown; use 'float32', 'bfloat16' or ''."
            )
        for field in ("peak", "eps", "clip"):
            if not getattr(self, field) > 0:
                raise UserError(f"optimizer.{field}={getattr(self, field)} is not positive; use a number above 0.")
        if self.qk_clip is not None and not self.qk_clip > 0:
            raise UserError(
                f"optimizer.qk_clip={self.qk_clip} is not positive; use a number above 0, or None for no clip."
            )
        for field in ("warmup", "weight_decay"):
            if not getattr(self, field) >= 0:
                raise UserError(f"optimizer.{field}={getattr(self, field)} is negative; use 0 or more.")
        for field in ("b1", "b2", "momentum"):
            if not 0 <= getattr(self, field) < 1:
                raise UserError(f"optimizer.{field}={getattr(self, field)} is not a decay rate; use 0 <= {field} < 1.")
        if not 0 <= self.stable < 1:
            raise UserError(f"optimizer.stable={self.stable} leaves no steps for the decay; use 0 <= stable < 1.")
        if not 0 <= self.final <= 1:
            raise UserError(f"optimizer.final={self.final} is not a fraction of the peak; use 0 <= final <= 1.")


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """What a Learner needs of an optimizer."""

    make_transformation: Callable[[ModelDef, Mesh | None], optax.GradientTransformation]
    """Makes everything but the learning rate for a network: gradient -> direction, which the step multiplies by minus
    the rate. The mesh is the one that shards weights and gradients (ModelDef.specs); it is None where every device has
    all of them and must compute without collectives."""
    learning_rate: Callable[[int], float]
    """The rate of an optimizer step, counted from 0. The jitted step receives it as an argument, so that changing it
    does not recompile."""
    config: OptimizerConfig = dataclasses.field(default_factory=lambda: OptimizerConfig(master_dtype=""))
    """What the step does beside the transformation: dtypes, offload, QK-clip; make_optimizer sets it."""


def make_optimizer(config: OptimizerConfig, steps: int) -> Optimizer:
    """Builds the optimizer that `config` names, for a stage of `steps` optimizer steps.

    Raises:
      UserError: steps < 1, or an import path that does not resolve.
    """
    if steps < 1:
        raise UserError(f"An optimizer needs at least one step, not steps={steps}.")
    return dataclasses.replace(resolve(config.name, OPTIMIZERS, "optimizer.name")(config, steps), config=config)


def learning_rate_schedule(config: OptimizerConfig, steps: int) -> Callable[[int], float]:
    """Linear warm-up to the peak, the stable part, then the decay of `config`, which ends at step `steps`."""
    decay_start = config.warmup + config.stable * max(0, steps - config.warmup)

    def learning_rate(step: int) -> float:
        if step < config.warmup:
            return config.peak * (step + 1) / config.warmup
        progress = min(1.0, max(0.0, step - decay_start) / max(1.0, steps - decay_start))
        shape = {"cosine": 0.5 * (1 + math.cos(math.pi * progress)), "linear": 1 - progress, "constant": 1.0}
        return config.peak * (config.final + (1 - config.final) * shape[config.decay])

    return learning_rate


def adamw(config: OptimizerConfig, steps: int) -> Optimizer:
    """AdamW (arXiv 1711.05101) after clipping by the global norm."""
    return _clip_and_decay(config, steps, lambda *_: optax.scale_by_adam(config.b1, config.b2, config.eps))


def muon(config: OptimizerConfig, steps: int) -> Optimizer:
    """Muon for matrices and AdamW for the other weights (train/muon.py), after clipping by the global norm."""

    def make_direction(definition: ModelDef, mesh: Mesh | None) -> optax.GradientTransformation:
        of_matrices = scale_by_muon(config.momentum, definition, mesh)
        of_others = optax.scale_by_adam(config.b1, config.b2, config.eps)
        is_matrix = lambda axes: "muon" if axes else "adamw"  # noqa: E731
        kinds = jax.tree.map(is_matrix, definition.matrix_axes(), is_leaf=lambda axes: axes is None)
        return optax.partition({"muon": of_matrices, "adamw": of_others}, kinds)

    return _clip_and_decay(config, steps, make_direction)


def _clip_and_decay(
    config: OptimizerConfig, steps: int, make_direction: Callable[[ModelDef, Mesh | None], optax.GradientTransformation]
) -> Optimizer:
    def make_transformation(definition: ModelDef, mesh: Mesh | None) -> optax.GradientTransformation:
        return optax.chain(
            optax.clip_by_global_norm(config.clip),
            make_direction(definition, mesh),
            optax.add_decayed_weights(config.weight_decay, definition.decay_mask()),
        )

    return Optimizer(make_transformation, learning_rate_schedule(config, steps))


OPTIMIZERS: Mapping[str, Callable[[OptimizerConfig, int], Optimizer]] = {"adamw": adamw, "muon": muon}
"""Builders by OptimizerConfig.name."""
