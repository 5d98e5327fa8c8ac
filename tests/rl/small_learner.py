"""A Learner of a small network whose policy loss clips nothing unless a test asks for it."""

import jax
import numpy as np

from composer_jax.models.model_def import ModelDef
from composer_jax.parallel.mesh import make_mesh
from composer_jax.train.learner import Learner
from composer_jax.train.losses import PolicyLoss, PolicyLossConfig
from composer_jax.train.optimizer import OptimizerConfig, make_optimizer


def small_learner(config, peak=1e-3, mesh=None, ratio_low=1.0) -> Learner:
    loss = PolicyLoss(PolicyLossConfig(ratio_low=ratio_low, ratio_high=1e9, dual_clip=np.inf))
    optimizer = make_optimizer(OptimizerConfig(peak=peak), steps=20)
    return Learner(ModelDef(config), optimizer, loss, mesh or make_mesh(jax.devices()[:1]))
