"""gguf:FILE as an address: loaded onto a mesh, converted to both other formats, scored."""

import json

import jax
import numpy as np
import pytest

from composer_jax.checkpoint.address import parse
from composer_jax.checkpoint.checkpoint import open_checkpoint
from composer_jax.checkpoint.convert import convert
from composer_jax.checkpoint.gguf.container import GGUFContainer
from composer_jax.checkpoint.huggingface import load_hf
from composer_jax.errors import UserError
from composer_jax.parallel.mesh import make_mesh
from tests.checkpoint.gguf.small_gguf import hf_tensors, write_small
from tests.checkpoint.hf_folder import assert_same


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_small(tmp_path_factory.mktemp("gguf") / "a.gguf")


def test_addresses_of_files(path, tmp_path):
    assert str(parse(f"gguf:{path}")) == f"gguf:{path}"
    assert open_checkpoint(str(path)).address == parse(f"gguf:{path}")  # known by its suffix
    assert parse(f"gguf:{path}").format == "gguf"
    with pytest.raises(UserError, match="cannot read .*no.gguf: No such file"):
        open_checkpoint(f"gguf:{tmp_path / 'no.gguf'}")


def test_weights_are_streamed_onto_a_mesh(path):
    mesh = make_mesh(jax.devices()[:4], data=2, tensor=2)
    definition, params, _ = open_checkpoint(f"gguf:{path}").load(mesh)
    down = params["dense_layers"]["feed_forward"]["down"]
    assert down.shape == (2, 64, 32) and len({shard.device for shard in down.addressable_shards}) == 4
    assert down.sharding == definition.shardings(mesh)[0]["dense_layers"]["feed_forward"]["down"]
    np.testing.assert_array_equal(down[1], hf_tensors()["model.layers.1.mlp.down_proj.weight"].T)
    assert open_checkpoint(f"gguf:{path}").load(dtype="bfloat16").params["final_norm"]["scale"].dtype == "bfloat16"


def test_there_and_on_to_both_formats(path, tmp_path):
    direct = open_checkpoint(f"gguf:{path}").load()
    assert str(convert(f"gguf:{path}", str(tmp_path / "native"))) == str(tmp_path / "native")
    convert(str(path), f"hf:{tmp_path / 'hf'}")
    assert_same(open_checkpoint(str(tmp_path / "native")).load()[1:], direct[1:])
    assert_same(load_hf(tmp_path / "hf")[1:], direct[1:])
    for folder in ("native", "hf"):
        names = {file.name for file in (tmp_path / folder).iterdir()}
        assert {"tokenizer.json", "tokenizer_config.json", "generation_config.json"} <= names
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["model_type"], config["bos_token_id"], config["eos_token_id"]) == ("llama", 1, 2)


def test_a_file_without_tokenizer_gives_a_folder_without(tmp_path):
    path = write_small(tmp_path / "a.gguf", without=("tokenizer.ggml.model",))
    convert(f"gguf:{path}", f"hf:{tmp_path / 'hf'}")
    assert not (tmp_path / "hf" / "tokenizer.json").exists()


def test_what_cannot_be_converted_is_refused_before_any_tensor_is_read(path, tmp_path, monkeypatch):
    monkeypatch.setattr(GGUFContainer, "read", None)
    with pytest.raises(UserError, match="would be a GGUF file, which is not written; use hf:DIR or DIR"):
        convert(f"gguf:{path}", f"gguf:{tmp_path / 'b.gguf'}")
    unknown = write_small(tmp_path / "u.gguf", tokenizer__ggml__pre="tekken")
    with pytest.raises(UserError, match="splits text by 'tekken'"):
        convert(f"gguf:{unknown}", f"hf:{tmp_path / 'hf'}")
    assert not (tmp_path / "hf").exists()
    wrong = write_small(tmp_path / "w.gguf", without=("blk.1.ffn_up.weight",))
    with pytest.raises(UserError, match="lacks model.layers.1.mlp.up_proj.weight"):
        open_checkpoint(f"gguf:{wrong}").load()
