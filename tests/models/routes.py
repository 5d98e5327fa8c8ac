"""The experts that a network chooses by itself, read from its routers as it runs."""

import dataclasses

import jax
import numpy as np

from composer_jax.models import moe
from composer_jax.models.config import ModelConfig
from composer_jax.models.model_def import ModelDef


def chosen_routes(monkeypatch, config: ModelConfig, weights, batch: dict[str, np.ndarray]) -> np.ndarray:
    """Returns int16 [B,S,L,k], the choices of the training form for rows; padding has choices, too."""
    calls = []
    router = moe.Router.__call__

    def spy(self, x_TD, replay=None):
        routing = router(self, x_TD, replay)
        jax.debug.callback(lambda ids: calls.append(np.asarray(ids)), routing.ids_Tk, ordered=True)
        return routing

    definition = ModelDef(dataclasses.replace(config, remat=False))
    fields = (batch["tokens"], batch["positions"], batch["segments"])
    with monkeypatch.context() as patch:
        patch.setattr(moe.Router, "__call__", spy)
        jax.jit(lambda: definition.bind(*weights)(*fields))()
        jax.effects_barrier()
    assert len(calls) == config.n_moe_layers
    return np.stack(calls, axis=1).reshape(*batch["tokens"].shape, config.n_moe_layers, -1).astype(np.int16)
