"""Hugging Face folders: a round trip is exact on a mesh, from disk and from a URL."""

import dataclasses
import json

import fsspec
import jax
import numpy as np
import pytest

from composer_jax.checkpoint.folder import Folder
from composer_jax.checkpoint.huggingface import load_hf, save_hf
from composer_jax.checkpoint.huggingface.safetensors_files import split_into_files
from composer_jax.errors import UserError
from composer_jax.models.model_def import ModelDef
from composer_jax.models.rope import Llama3Rope
from composer_jax.parallel.mesh import make_mesh
from tests.checkpoint.hf_folder import CONFIG, DEFINITION, WEIGHTS, assert_same, save_weights
from tests.models.small import LLAMA, random_weights, small


def test_there_and_back_on_a_mesh_is_exact(tmp_path):
    mesh = make_mesh(data=2, expert=4)
    definition, params, bias = load_hf(save_weights(tmp_path / "hf"), mesh)
    assert definition.config.param_dtype == "bfloat16"
    assert_same((params, bias), WEIGHTS)
    placed = jax.tree.map(lambda leaf, sharding: leaf.sharding == sharding, (params, bias), DEFINITION.shardings(mesh))
    assert all(jax.tree.leaves(placed))
    gate = params["moe_layers"]["feed_forward"]["gate"]
    assert gate.addressable_shards[0].data.shape == (3, 2, 8, 32)
    save_hf(tmp_path / "again", definition, params, bias)
    for file in (tmp_path / "hf").iterdir():
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes()


@pytest.mark.parametrize("sizes", [{}, {"data": 2, "context": 2, "tensor": 2}], ids=str)
def test_a_network_without_experts_there_and_back(tmp_path, sizes):
    config = small(**LLAMA, qk_norm=True, tie_embeddings=True, llama3_rope=Llama3Rope(8.0))
    definition, weights = ModelDef(config), random_weights(config)
    save_hf(tmp_path / "hf", definition, *weights)
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["model_type"] == "qwen3"
    loaded = load_hf(tmp_path / "hf", make_mesh(**sizes) if sizes else None, "float32")
    assert loaded.definition.config == dataclasses.replace(config, dispatch="ring", remat=True)
    assert loaded.router_bias == {}
    assert_same(loaded[1:], weights)


def test_many_files_and_a_url_onto_one_device():
    url = "memory://many_files/model"
    save_weights(url, file_bytes=20_000)
    files = [name for name in Folder(url).files() if name.endswith(".safetensors")]
    assert len(files) > 5 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    loaded = load_hf(url)[1:]
    assert_same(loaded, WEIGHTS)
    assert all(leaf.devices() == {jax.devices()[0]} for leaf in jax.tree.leaves(loaded))
    fsspec.filesystem("memory").rm("/many_files", recursive=True)


def test_dtypes_are_cast_and_the_bias_stays_float32(tmp_path):
    definition, params, bias = load_hf(save_weights(tmp_path / "hf", dtype="float32"), dtype="float32")
    assert (definition.config.param_dtype, definition.config.compute_dtype) == ("float32", "float32")
    assert_same((params, bias), jax.tree.map(lambda x: x.astype(np.float32), WEIGHTS))
    assert jax.tree.leaves(load_hf(tmp_path / "hf", dtype="bfloat16").router_bias)[0].dtype == np.float32
    for dtype in ("int8", "float64", "float8_e4m3fn", "foo"):
        for refused, folder in ((load_hf, "hf"), (save_weights, "no")):
            with pytest.raises(UserError, match=f"dtype='{dtype}' is not a dtype of weights; use float32, bfloat16"):
                refused(tmp_path / folder, dtype=dtype)
    assert not (tmp_path / "no").exists()


def test_tokenizer_files_come_along(tmp_path):
    source = tmp_path / "tokenizer"
    source.mkdir()
    for name in ("tiktoken.model", "tokenization_kimi.py", "generation_config.json", "secret.txt"):
        (source / name).write_text(name)
    (source / "config.json").write_text(json.dumps({"eos_token_id": 7, "vocab_size": 3}))
    save_weights(tmp_path / "hf", tokenizer=source)
    assert (tmp_path / "hf" / "tiktoken.model").read_text() == "tiktoken.model"
    assert (tmp_path / "hf" / "tokenization_kimi.py").exists() and (tmp_path / "hf" / "generation_config.json").exists()
    assert not (tmp_path / "hf" / "secret.txt").exists()
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["eos_token_id"], config["vocab_size"]) == (7, CONFIG.vocab_size)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(UserError, match="has no tokenizer files"):
        save_weights(tmp_path / "other", tokenizer=empty)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "hf", "tokenizer"], "nothing half-written"


def test_the_config_names_the_dtype_that_was_written(tmp_path):
    definition = ModelDef(dataclasses.replace(CONFIG, param_dtype="float32"))
    save_hf(tmp_path / "hf", definition, *WEIGHTS)  # bfloat16, whatever the definition says
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_a_link_to_an_empty_folder_is_filled(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    save_weights(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert {"config.json", "model.safetensors"} <= {file.name for file in (tmp_path / "disk").iterdir()}


def test_files_are_cut_at_the_limit():
    assert split_into_files({"a": 3, "b": 3, "c": 5, "d": 9, "e": 1}, 8) == [["a", "b"], ["c"], ["d"], ["e"]]


def test_a_folder_with_something_in_it_is_not_written_to(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="exists and is not empty"):
        save_weights(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
