"""GGUF files: config.json, tensors bit for bit, and one sentence for whatever is wrong before any tensor is read."""

import contextlib
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from composer_jax.checkpoint.checkpoint import open_checkpoint
from composer_jax.checkpoint.gguf import open_gguf
from composer_jax.checkpoint.gguf.container import GGUFContainer
from composer_jax.errors import UserError
from composer_jax.models.rope import Llama3Rope, plain_frequencies
from tests.checkpoint.gguf.small_gguf import (
    HEAD,
    HEADS,
    TOKENS,
    gguf_tensors,
    hf_tensors,
    metadata,
    write_gguf,
    write_small,
)


def test_config_json_names_what_transformers_reads(tmp_path):
    config = open_gguf(write_small(tmp_path / "a.gguf")).config
    assert config == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(TOKENS),
        "max_position_embeddings": 128,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,  # the shortest number that is the stored float32
        "rope_theta": 1000.0,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    untied = open_gguf(write_small(tmp_path / "b.gguf", "qwen2", tied=False)).config
    assert (untied["model_type"], untied["tie_word_embeddings"]) == ("qwen2", False)


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_tensors_have_the_names_and_rows_of_transformers(tmp_path, arch):
    expected = hf_tensors(arch, tied=False)
    tensors = open_gguf(write_small(tmp_path / "a.gguf", arch, tied=False)).tensors
    assert tensors.shapes == {name: array.shape for name, array in expected.items()}
    assert sum(tensors.sizes.values()) == sum(array.nbytes for array in expected.values())
    for name, array in expected.items():
        read = tensors.read(name)
        assert read.dtype == np.float32
        np.testing.assert_array_equal(read, array, err_msg=name)


def test_the_rows_of_q_are_stored_in_another_order():
    stored = gguf_tensors(hf_tensors())["blk.0.attn_q.weight"]
    theirs = hf_tensors()["model.layers.0.self_attn.q_proj.weight"]
    np.testing.assert_array_equal(stored[:3], theirs[[0, HEAD // 2, 1]])
    assert stored.shape == (HEADS * HEAD, 32)


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "Q5_0", "F16", "BF16"])
def test_quantised_tensors_are_what_the_library_dequantises(tmp_path, kind):
    kind = gguf.GGMLQuantizationType[kind]
    name = "blk.1.ffn_down.weight"
    stored = gguf_tensors(hf_tensors())
    path = write_gguf(tmp_path / "a.gguf", stored, metadata(), quantized={name: kind})
    tensors = open_gguf(path).tensors
    read = tensors.read("model.layers.1.mlp.down_proj.weight")
    assert read.dtype == np.float32 and read.shape == tensors.shapes["model.layers.1.mlp.down_proj.weight"]
    np.testing.assert_array_equal(read, gguf.dequantize(gguf.quantize(stored[name], kind), kind))
    assert 0 < np.abs(read - stored[name]).max() < 0.2


def rope_freqs(theta: float, width: int, factor: float, low: float, high: float, original: int) -> np.ndarray:
    """The divisors that llama.cpp's converter writes for Llama 3's scaling, pair by pair."""
    divisors = []
    for i in range(0, width, 2):
        wavelength = 2 * np.pi * theta ** (i / width)
        if wavelength < original / high:
            divisors.append(1.0)
        elif wavelength > original / low:
            divisors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


def write_scaled(path: Path, divisors: np.ndarray, width: int, theta: float) -> Path:
    values = metadata() | {"llama.attention.key_length": width, "llama.attention.value_length": width}
    values["llama.rope.freq_base"] = theta
    return write_gguf(path, gguf_tensors(hf_tensors()) | {"rope_freqs.weight": divisors}, values)


@pytest.mark.parametrize(("factor", "width"), [(8.0, 128), (32.0, 64), (32.0, 128)])
def test_the_scaling_of_llama_3_is_recovered_from_its_frequencies(tmp_path, factor, width):
    divisors = rope_freqs(500_000.0, width, factor, 1.0, 4.0, 8192)
    path = write_scaled(tmp_path / "a.gguf", divisors, width, 500_000.0)
    config = open_gguf(path).config
    scaling = open_checkpoint(f"gguf:{path}").config.rope_scaling
    assert scaling == Llama3Rope(factor, 1.0, 4.0, 8192)
    plain = plain_frequencies(width, 500_000.0)
    np.testing.assert_allclose(plain / scaling.frequencies(width, 500_000.0), divisors, rtol=1e-5)
    assert config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


@pytest.mark.parametrize(
    "divisors",
    [
        np.linspace(1, 8, 64, dtype=np.float32),
        np.ones(64, np.float32),
        np.ones(3, np.float32),
        np.full(64, np.nan, np.float32),
    ],
)
def test_other_frequencies_are_refused(tmp_path, divisors):
    with pytest.raises(UserError, match=r"rope_freqs.weight in .*a.gguf does not hold the frequencies of Llama 3's"):
        open_gguf(write_scaled(tmp_path / "a.gguf", divisors, 128, 500_000.0))


def test_yarn_is_read(tmp_path):
    path = write_small(
        tmp_path / "a.gguf",
        "qwen2",
        qwen2__rope__scaling__type="yarn",
        qwen2__rope__scaling__factor=4.0,
        qwen2__rope__scaling__original_context_length=32,
    )
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    assert open_gguf(path).config["rope_scaling"] == yarn


def cut(by: int):
    return lambda path: path.write_bytes(path.read_bytes()[:-by])


def head(size: int):
    return lambda path: path.write_bytes(path.read_bytes()[:size])


SPOILED = {
    "no file": (lambda path: path.unlink(), "cannot read .*a.gguf: No such file"),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), "cannot read .*a.gguf: Is a directory"),
    "another format": (
        lambda path: path.write_bytes(b"PK\x03\x04 and more"),
        r"is not a GGUF file: it begins with b'PK",
    ),
    "empty": (lambda path: path.write_bytes(b""), "is not a GGUF file: it begins with b''"),
    "truncated tensors": (cut(200), r"a.gguf of [0-9,]+ bytes is truncated or damaged \(it needs [0-9,]+ bytes\)"),
    "truncated metadata": (head(900), "is truncated or damaged"),
    "truncated header": (head(10), "is truncated or damaged"),
    "another version": (lambda path: path.write_bytes(b"GGUF\x01" + path.read_bytes()[5:]), "appears to be version 1"),
}


@pytest.mark.parametrize("name", SPOILED)
def test_a_damaged_file_is_one_sentence(tmp_path, name):
    path = write_small(tmp_path / "a.gguf")
    spoil, message = SPOILED[name]
    spoil(path)
    with pytest.raises(UserError, match=message):
        open_gguf(path)


def test_every_cut_and_every_damaged_byte_is_a_sentence_or_harmless(tmp_path):
    path = write_small(tmp_path / "a.gguf")
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    for size in np.linspace(0, len(whole) - 40, 20, dtype=int):
        path.write_bytes(whole[:size])
        with pytest.raises(UserError):
            open_gguf(path)
    for _ in range(60):
        at = int(rng.integers(4, 8000))  # header, metadata, descriptions of tensors
        path.write_bytes(whole[:at] + bytes([whole[at] ^ int(rng.integers(1, 256))]) + whole[at + 1 :])
        with contextlib.suppress(UserError):
            _ = open_gguf(path).texts


REFUSED = {
    "architecture": (dict(arch="mamba"), "general.architecture='mamba'.* supported are llama, qwen2, qwen3"),
    "missing key": (dict(without=("llama.block_count",)), "a.gguf lacks llama.block_count in its metadata"),
    "missing embedding": (dict(without=("token_embd.weight",)), "lacks the tensor token_embd.weight"),
    "experts": (dict(llama__expert_count=8), "llama.expert_count=8; only 0 is supported"),
    "text for a number": (dict(llama__block_count="2"), "llama.block_count='2', which is not a whole number"),
    "a number per layer": (
        dict(llama__attention__head_count=[4, 4]),
        "head_count=2 values, which is not a whole number",
    ),
    "boolean for a number": (dict(llama__rope__freq_base=True), "freq_base=True, which is not a number"),
    "scaling": (
        dict(llama__rope__scaling__type="linear"),
        "rope.scaling.type='linear'; supported are 'none' and 'yarn'",
    ),
    "partial rotation": (
        dict(llama__rope__dimension_count=4, llama__attention__key_length=8),
        "dimension_count=4 for heads",
    ),
    "parts": (dict(split__count=3), "is one of 3 parts; join them with llama-gguf-split --merge"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_read_is_named(tmp_path, name, monkeypatch):
    changes, message = REFUSED[name]
    path = write_small(tmp_path / "a.gguf", **changes)
    monkeypatch.setattr(GGUFContainer, "read", None)  # before any tensor is read
    with pytest.raises(UserError, match=message):
        open_gguf(path)


@pytest.mark.parametrize(
    ("name", "array", "words"),
    [
        ("blk.0.attn_rot_embd.weight", np.ones(3, np.float32), "which no llama network has"),
        ("blk.1.ffn_up.weight", np.ones((64, 32), np.int32), "type I32"),
    ],
)
def test_a_tensor_that_no_network_has_or_the_library_cannot_read(tmp_path, name, array, words):
    with pytest.raises(UserError, match=f"{name}.*{words}"):
        open_gguf(write_gguf(tmp_path / "a.gguf", gguf_tensors(hf_tensors()) | {name: array}, metadata()))


def test_an_address_in_a_bucket():
    with pytest.raises(UserError, match="a GGUF file has to be local: download it first"):
        open_gguf("gs://bucket/a.gguf")


def test_a_big_endian_file(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama", endianess=gguf.GGUFEndian.BIG)
    writer.add_tensor("token_embd.weight", np.ones((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UserError, match="is big-endian"):
        open_gguf(tmp_path / "a.gguf")


def test_the_library_is_missing(tmp_path, monkeypatch):
    path = write_small(tmp_path / "a.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UserError, match=r'pip install "composer_jax\[gguf\]"'):
        open_gguf(path)
