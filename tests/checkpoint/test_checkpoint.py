"""A checkpoint is opened once: config, tokenizer, chat format, generation defaults and weights come from one object."""

import gguf
import jax
import pytest

from composer_jax.checkpoint.checkpoint import open_checkpoint
from composer_jax.checkpoint.convert import convert
from composer_jax.errors import UserError
from composer_jax.models import supported_dtype
from composer_jax.ops.local_gpu import LocalGpu
from tests.checkpoint.gguf.small_gguf import write_small
from tests.checkpoint.hf_folder import assert_same
from tests.opened_files import opened_files
from tests.stages.base_model import NETWORK, weights, write_base


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = write_base(tmp_path_factory.mktemp("checkpoint") / "small")
    (folder / "generation_config.json").write_text('{"temperature": 0.25, "eos_token_id": 3}')
    return folder


def use_everything(checkpoint):
    """Uses what a checkpoint has, each twice."""
    for _ in range(2):
        text = checkpoint.text
        assert text.tokenizer.decode(text.tokenizer.encode("a path")) == "a path"
        assert text.chat_format.generation_prompt and text.defaults and text.end_tokens
        assert text.config == checkpoint.config
        assert "tokenizer.json" in checkpoint.tokenizer_files()


def test_each_file_of_a_folder_is_opened_once(folder):
    with opened_files(folder) as counts:
        checkpoint = open_checkpoint(f"hf:{folder}")
        assert not counts, "opening reads no file"
        assert checkpoint.config.d_model == NETWORK.d_model
        assert counts == {"config.json": 1}
        use_everything(checkpoint)
        assert_same(checkpoint.load(dtype="float32")[1:], weights())
    assert checkpoint.text.defaults.temperature == 0.25 and 3 in checkpoint.text.end_tokens
    shards = {file.name for file in folder.glob("*.safetensors")}
    assert counts.keys() == {file.name for file in folder.iterdir()}
    assert {name: count for name, count in counts.items() if name not in shards and count != 1} == {}


def test_a_text_needs_only_the_files_that_describe_it(tmp_path):
    folder = write_base(tmp_path / "small")
    (folder / "vocab.json").write_text("{}")
    with opened_files(folder) as counts:
        assert open_checkpoint(str(folder)).text.end_tokens
    assert "tokenizer.json" in counts and "vocab.json" not in counts
    assert open_checkpoint(str(folder)).tokenizer_files()["vocab.json"] == b"{}"


def test_the_header_of_a_gguf_file_is_parsed_once(tmp_path, monkeypatch):
    parsed = []

    class CountingReader(gguf.GGUFReader):
        def __init__(self, *args):
            parsed.append(args)
            super().__init__(*args)

    path = write_small(tmp_path / "a.gguf")
    monkeypatch.setattr(gguf, "GGUFReader", CountingReader)
    checkpoint = open_checkpoint(f"gguf:{path}")
    assert checkpoint.text.tokenizer.encode("a") and checkpoint.text.defaults.end_ids
    assert checkpoint.tokenizer_files() and checkpoint.load().definition.config.d_model == checkpoint.config.d_model
    assert len(parsed) == 1


def test_a_native_checkpoint_has_the_tokenizer_of_its_runs_base(folder, tmp_path):
    step = tmp_path / "run" / "checkpoints" / "sft"
    convert(f"hf:{folder}", str(step), "float32")
    for file in step.glob("*.json*"):
        file.unlink()
    checkpoint = open_checkpoint(str(step))
    with pytest.raises(UserError, match="sft has no tokenizer.json"):
        _ = checkpoint.text.tokenizer
    assert checkpoint.tokenizer_files() is None and checkpoint.name == "sft"

    write_base(tmp_path / "run" / "base")
    with opened_files(tmp_path / "run" / "base") as counts:
        checkpoint = open_checkpoint(str(step))
        use_everything(checkpoint)
    assert set(counts.values()) == {1}
    loaded = checkpoint.load(dtype="bfloat16")
    assert loaded.definition.config.param_dtype == "bfloat16"
    assert {leaf.dtype.name for leaf in jax.tree.leaves(loaded.params)} == {"bfloat16"}


def test_a_card_without_bfloat16_converts_as_any_other(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(supported_dtype, "local_gpu", lambda: LocalGpu("Tesla T4", (7, 5), 91002))
    convert(f"hf:{folder}", str(tmp_path / "native"), "bfloat16")
    checkpoint = open_checkpoint(str(tmp_path / "native"))
    assert checkpoint.config.compute_dtype == "bfloat16"
    assert checkpoint.load().definition.config.compute_dtype == "float32", "this card computes in it"


def test_a_file_that_cannot_be_read_is_a_sentence(tmp_path):
    folder = write_base(tmp_path / "small")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to(tmp_path / "gone")
    checkpoint = open_checkpoint(str(folder))
    with pytest.raises(UserError, match=r"small/tokenizer.json cannot be read \(.*No such file.*\); download it again"):
        _ = checkpoint.text.tokenizer
    assert checkpoint.load(dtype="float32").definition.config.d_model == NETWORK.d_model


@pytest.mark.parametrize("prefix", ["", "hf:"])
def test_there_is_nothing_at_the_address(tmp_path, prefix):
    with pytest.raises(UserError, match="there is no folder .*none"):
        open_checkpoint(f"{prefix}{tmp_path / 'none'}")
    with pytest.raises(UserError, match="holds neither the steps of a native" if not prefix else "has no config.json"):
        _ = open_checkpoint(f"{prefix}{tmp_path}").config
