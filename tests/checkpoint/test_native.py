"""Weights in our own format: the notes describe the network, not how its weights were initialised."""

import jax
import numpy as np
import pytest

from composer_jax.checkpoint.native import model_notes, read_model_config, restore_weights
from composer_jax.checkpoint.store import CheckpointStore
from composer_jax.errors import UserError
from composer_jax.models.model_def import ModelDef
from composer_jax.models.rope import Llama3Rope
from composer_jax.parallel.mesh import make_mesh
from tests.models.small import LLAMA, random_weights, small

CONFIG = small()


def test_weights_are_readable_where_their_initialiser_is_unknown(tmp_path):
    """Version 0.1.0 wrote init="induction"; a user's initialiser may be missing where the weights are read."""
    params, router_bias = random_weights(CONFIG)
    for init in ("induction", "their.initialisers:orthogonal"):
        notes = {"model": model_notes(ModelDef(CONFIG))["model"] | {"init": init}}
        with CheckpointStore(tmp_path / init, notes=notes) as store:
            store.save(1, arrays={"params": params, "router_bias": router_bias})
        with CheckpointStore(tmp_path / init) as store:
            assert read_model_config(store) == CONFIG
    with CheckpointStore(tmp_path / init) as store:
        restored = restore_weights(store, ModelDef(CONFIG), None)
    jax.tree.map(np.testing.assert_array_equal, restored, (params, router_bias))


@pytest.mark.parametrize(
    "config",
    [
        small(**LLAMA, llama3_rope=Llama3Rope(8.0)),
        small(n_layers=4, n_dense_layers=0, dense_layers=(0, 2), n_mtp_modules=0),
    ],
    ids=["no_experts", "experts_in_every_other_layer"],
)
def test_a_network_with_experts_in_no_or_some_layers_comes_back(tmp_path, config):
    weights = random_weights(config)
    with CheckpointStore(tmp_path, notes=model_notes(ModelDef(config))) as store:
        store.save(1, arrays=dict(zip(("params", "router_bias"), weights, strict=True)))
    with CheckpointStore(tmp_path) as store:
        assert read_model_config(store) == config
        for mesh in (None, make_mesh(data=2, expert=2, tensor=2)):
            restored = restore_weights(store, ModelDef(config), mesh)
            assert jax.tree.structure(restored) == jax.tree.structure(weights)
            jax.tree.map(np.testing.assert_array_equal, restored, weights)


def test_notes_hold_the_network_without_what_weights_do_not_need_elsewhere(tmp_path):
    notes = model_notes(ModelDef(small(init="composer_jax.demo.induction:apply_induction", attention_form="cudnn")))
    assert not {"init", "attention_form"} & notes["model"].keys()
    with CheckpointStore(tmp_path, notes=notes) as store:
        store.save(1, arrays={"w": np.zeros(2)})
        assert read_model_config(store) == CONFIG


def test_a_checkpoint_without_a_network_in_its_notes_is_refused(tmp_path):
    with CheckpointStore(tmp_path) as store:
        store.save(1, arrays={"w": np.zeros(2)})
        with pytest.raises(UserError, match="no model config in its notes"):
            read_model_config(store)
