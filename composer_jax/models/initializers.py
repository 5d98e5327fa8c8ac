"""Initialisers: what a config's `init` names. Add ours to the table; a user's is an import path in the config.

An initialiser is a function (params, config, key) -> params. It receives the params as drawn (every matrix normal, see
models/parameter.py: matrix) and returns a pytree of the same structure, shapes and dtypes. It runs inside jit.
"""

from collections.abc import Callable
from typing import Any

import jax

from composer_jax.extensions import resolve
from composer_jax.models.config import ModelConfig

Params = dict[str, Any]
Initializer = Callable[[Params, ModelConfig, jax.Array], Params]


def keep_normal(params: Params, config: ModelConfig, key: jax.Array) -> Params:
    """Returns the params as drawn."""
    return params


INITIALIZERS: dict[str, Initializer] = {"normal": keep_normal}


def initialize(params: Params, config: ModelConfig, key: jax.Array) -> Params:
    """Applies the initialiser that config.init names."""
    return resolve(config.init, INITIALIZERS, "config.model.init")(params, config, key)
