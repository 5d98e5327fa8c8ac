"""AdamW with global-norm clipping, and the learning-rate schedules of the stages."""

import dataclasses
import math
from typing import Literal

import jax
import optax

from composer_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """Defaults: DeepSeek-V3's AdamW (betas 0.9 / 0.95, decay 0.1, clip 1.0). The learning rates are a stage's own."""

    peak: float
    """Largest learning rate."""
    steps: int
    """Optimizer steps of the whole stage; the schedule ends there."""
    warmup: int = 0
    """Steps of linear warm-up from zero."""
    decay: Literal["cosine", "linear", "constant"] = "cosine"
    final: float = 0.0
    """The last learning rate as a fraction of the peak."""
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    """Applied to matrices (two or more dimensions beside the layer axis), not to norms."""
    clip: float = 1.0
    """Largest global gradient norm."""

    def __post_init__(self):
        if self.decay not in ("cosine", "linear", "constant"):
            raise UserError(f"decay={self.decay!r} is unknown; use 'cosine', 'linear' or 'constant'.")
        if self.steps < 1 or self.peak <= 0:
            raise UserError(f"An optimizer needs steps >= 1 and peak > 0, got steps={self.steps}, peak={self.peak}.")

    def learning_rate(self, step: int) -> float:
        """The rate of optimizer step `step`, counted from 0."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        done = min(1.0, (step - self.warmup) / max(1, self.steps - self.warmup))
        shape = {"cosine": 0.5 * (1 + math.cos(math.pi * done)), "linear": 1 - done, "constant": 1.0}[self.decay]
        return self.peak * (self.final + (1 - self.final) * shape)

    def transformation(self) -> optax.GradientTransformation:
        """Everything but the learning rate, which the step receives as a number so that changing it never
        recompiles."""

        def is_matrix(path, leaf) -> bool:
            return path[-1].key != "scale"

        return optax.chain(
            optax.clip_by_global_norm(self.clip),
            optax.scale_by_adam(self.b1, self.b2, self.eps),
            optax.add_decayed_weights(
                self.weight_decay, lambda tree: jax.tree_util.tree_map_with_path(is_matrix, tree)
            ),
        )
