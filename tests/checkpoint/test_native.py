"""Weights in our own format: the notes describe the network, not how its weights were initialised."""

import jax
import numpy as np
import pytest

from composer_jax.checkpoint.native import model_notes, read_model_config, restore_weights
from composer_jax.checkpoint.store import CheckpointStore
from composer_jax.errors import UserError
from composer_jax.models.model_def import ModelDef
from tests.models.small import small

CONFIG = small()


@pytest.mark.parametrize("init", ["induction", "their.initialisers:orthogonal"])
def test_weights_are_readable_where_their_initialiser_is_unknown(tmp_path, init):
    """Version 0.1.0 wrote init="induction"; a user's initialiser may be missing where the weights are read."""
    definition = ModelDef(CONFIG)
    params, router_bias = definition.init(0, None)
    fields = model_notes(definition)["model"] | {"init": init}
    with CheckpointStore(tmp_path, notes={"model": fields}) as store:
        store.save(1, arrays={"params": params, "router_bias": router_bias})
    with CheckpointStore(tmp_path) as store:
        assert read_model_config(store) == CONFIG
        restored = restore_weights(store, ModelDef(read_model_config(store)), None)
    jax.tree.map(np.testing.assert_array_equal, restored, (params, router_bias))


def test_notes_hold_the_network_without_its_initialiser(tmp_path):
    notes = model_notes(ModelDef(small(init="composer_jax.demo.induction:apply_induction")))
    assert "init" not in notes["model"]
    with CheckpointStore(tmp_path, notes=notes) as store:
        store.save(1, arrays={"w": np.zeros(2)})
        assert read_model_config(store) == CONFIG


def test_a_checkpoint_without_a_network_in_its_notes_is_refused(tmp_path):
    with CheckpointStore(tmp_path) as store:
        store.save(1, arrays={"w": np.zeros(2)})
        with pytest.raises(UserError, match="no model config in its notes"):
            read_model_config(store)
