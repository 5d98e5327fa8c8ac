"""A float32 master copy of the weights for the optimizer, where the model's own are bfloat16.

A bfloat16 has 8 significant bits, so that an update below 1/512 of a weight rounds to nothing. The optimizer
accumulates updates in the master copy, and the model's weights are the rounded copy of it (Micikevicius et al. 2018,
arXiv 1710.03740, section 3.1).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from composer_jax.models.initializers import Params


class MasterState(NamedTuple):
    """Optimizer state with master weights."""

    weights: Params
    """The master copy, like params, in the master's dtype."""
    transformation: Any
    """State of the optax transformation; its dtype is that of OptimizerConfig.moment_dtype."""


def cast_floats(tree: Any, dtype: str) -> Any:
    """Returns the tree with floating arrays cast to `dtype`; others, such as counts, stay as they are."""
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


def cast_like(tree: Any, like: Any) -> Any:
    """Returns the tree with every array cast to the dtype of its counterpart."""
    return jax.tree.map(lambda x, y: x.astype(y.dtype), tree, like)
