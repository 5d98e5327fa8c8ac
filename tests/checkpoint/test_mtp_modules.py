"""Multi-token-prediction modules in Hugging Face folders."""

import dataclasses

import jax
import numpy as np
import pytest

from composer_jax.checkpoint.huggingface import hf_config, load_hf, save_hf
from composer_jax.errors import UserError
from composer_jax.models.model_def import ModelDef
from composer_jax.parallel.mesh import make_mesh
from tests.checkpoint.hf_folder import CONFIG, WEIGHTS, assert_same, write_folder
from tests.checkpoint.tensors import to_tensors
from tests.models.small import random_weights

MODULES = dataclasses.replace(CONFIG, n_mtp_modules=2)
MODULES_WEIGHTS = jax.tree.map(
    lambda x, leaf: x.astype(leaf.dtype), random_weights(MODULES), ModelDef(MODULES).shapes()
)


def test_mtp_modules_come_and_go_with_the_rest(tmp_path):
    save_hf(tmp_path / "modules", ModelDef(MODULES), *MODULES_WEIGHTS)
    loaded = load_hf(tmp_path / "modules", make_mesh(data=2, expert=2, tensor=2))
    assert loaded.definition.config.n_mtp_modules == 2
    assert_same(loaded[1:], MODULES_WEIGHTS)
    save_hf(tmp_path / "again", *loaded)
    for file in (tmp_path / "modules").iterdir():
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes()


def test_mtp_modules_have_the_published_names():
    """Those of DeepSeek-V3's folders: layers behind the last, each with a copy of the embedding and of the head."""
    assert hf_config(MODULES)["num_nextn_predict_layers"] == 2
    tensors, params = to_tensors(*MODULES_WEIGHTS, MODULES), MODULES_WEIGHTS[0]
    mtp = jax.tree.map(lambda leaf: leaf[1], params["mtp"])
    for name, expected in {
        "enorm": mtp["embedding_norm"]["scale"],
        "hnorm": mtp["hidden_norm"]["scale"],
        "eh_proj": mtp["projection"].T,
        "shared_head.norm": mtp["final_norm"]["scale"],
        "shared_head.head": params["head"].T,
        "embed_tokens": params["embedding"]["table"],
        "mlp.experts.3.down_proj": mtp["block"]["feed_forward"]["down"][3].T,
        "self_attn.q_a_proj": mtp["block"]["attention"]["q_down"].T,
    }.items():
        np.testing.assert_array_equal(tensors[f"model.layers.5.{name}.weight"], expected)


def test_an_mtp_module_with_another_head_is_left_out_or_refused(tmp_path):
    tensors = to_tensors(*MODULES_WEIGHTS, MODULES)
    other = "model.layers.4.shared_head.head.weight"
    tensors[other] = tensors[other] * 2
    folder = write_folder(tmp_path / "other", hf_config(MODULES), tensors)
    with pytest.raises(UserError, match=f"{other} differs .*mtp=False"):
        load_hf(folder)
    loaded = load_hf(folder, mtp=False)
    assert loaded.definition.config.n_mtp_modules == 0
    for actual, expected in zip(loaded[1:], MODULES_WEIGHTS, strict=True):
        assert_same([actual], [{name: leaf for name, leaf in expected.items() if name != "mtp"}])
    # Some folders do without the copies.
    del tensors[other], tensors["model.layers.5.embed_tokens.weight"]
    assert_same(load_hf(write_folder(tmp_path / "without", hf_config(MODULES), tensors))[1:], MODULES_WEIGHTS)


def test_mtp_modules_are_where_the_config_announces_them(tmp_path):
    """Or nowhere, as in folders that transformers wrote; half of them, or more than announced, is a mistake."""
    config_json = hf_config(MODULES)
    assert_same(load_hf(write_folder(tmp_path / "nowhere", config_json, to_tensors(*WEIGHTS, CONFIG)))[1:], WEIGHTS)
    tensors = to_tensors(*MODULES_WEIGHTS, MODULES)
    with pytest.raises(UserError, match="has, unexpected, .*model.layers.4"):
        load_hf(write_folder(tmp_path / "surprising", hf_config(CONFIG), tensors))
    half = {name: tensor for name, tensor in tensors.items() if not name.startswith("model.layers.5.")}
    with pytest.raises(UserError, match="lacks model.layers.5.enorm.weight"):
        load_hf(write_folder(tmp_path / "half", config_json, half))
