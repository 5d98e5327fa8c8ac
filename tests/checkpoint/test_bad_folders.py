"""A wrong Hugging Face folder is refused with one sentence before any tensor is read."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from composer_jax.checkpoint.huggingface import load_hf, save_hf
from composer_jax.errors import UserError
from composer_jax.models.model_def import ModelDef
from composer_jax.parallel.mesh import make_mesh
from tests.checkpoint.hf_folder import CONFIG, save_weights
from tests.models.small import random_weights


def edit_config(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def only_a_header(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:50])


WRONG = {
    "no folder": (lambda folder: folder.rename(folder.with_name("gone")), "there is no|has no config.json"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "has no config.json; is it the folder"),
    "torn config": (lambda folder: (folder / "config.json").write_text("{"), "config.json is not JSON"),
    "other architecture": (lambda folder: edit_config(folder, model_type="mistral"), "model_type='mistral'"),
    "other sizes": (lambda folder: edit_config(folder, vocab_size=65), r"embed_tokens.weight as \[64, 16\]"),
    "fewer layers": (lambda folder: edit_config(folder, num_hidden_layers=3), "has, unexpected, model.layers.3."),
    "words for numbers": (
        lambda folder: edit_config(folder, hidden_size="16"),
        "hidden_size='16', which is not a whole number",
    ),
    "no weight map": (lambda folder: (folder / "model.safetensors.index.json").write_text("{}"), "has no weight_map"),
    "more layers": (lambda folder: edit_config(folder, num_hidden_layers=5), "lacks model.layers.4.input_layernorm"),
    "fewer experts": (lambda folder: edit_config(folder, n_routed_experts=4), "has, unexpected, .*and 32 more"),
    "truncated": (cut, "model.safetensors is truncated: it has [0-9]+ bytes of [0-9]+"),
    "truncated in the header": (only_a_header, "is truncated or damaged: it has 50 bytes"),
    "empty file": (lambda folder: (folder / "model.safetensors").write_bytes(b""), "has 0 bytes"),
    "no file": (lambda folder: (folder / "model.safetensors").unlink(), "lacks model.safetensors, which its"),
}


@pytest.fixture(scope="module")
def right(tmp_path_factory):
    return save_weights(tmp_path_factory.mktemp("right") / "hf")


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_one_sentence_before_anything_is_read(right, tmp_path, name, monkeypatch):
    spoil, message = WRONG[name]
    spoil(shutil.copytree(right, tmp_path / "hf"))
    monkeypatch.setattr("composer_jax.checkpoint.huggingface.quantized.CheckpointFiles.read", None)
    with pytest.raises(UserError, match=message):
        load_hf(tmp_path / "hf")


def test_a_mesh_that_does_not_divide(tmp_path):
    config = dataclasses.replace(CONFIG, n_experts=6)
    save_hf(tmp_path / "hf", ModelDef(config), *random_weights(config))
    with pytest.raises(UserError, match="6 experts do not divide over mesh axis expert=4"):
        load_hf(tmp_path / "hf", make_mesh(data=2, expert=4))
