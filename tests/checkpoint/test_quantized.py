"""Quantised Hugging Face folders are read as the floats that they encode."""

import json
import math
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest

from composer_jax.checkpoint.folder import Folder
from composer_jax.checkpoint.huggingface import hf_config, load_hf
from composer_jax.checkpoint.huggingface.quantized import CheckpointFiles
from composer_jax.checkpoint.huggingface.safetensors_files import SafetensorsFolder
from composer_jax.errors import UserError
from composer_jax.parallel.mesh import make_mesh
from tests.checkpoint.hf_folder import CONFIG, WEIGHTS, assert_same, write_folder
from tests.checkpoint.tensors import from_tensors, to_tensors
from tests.models.small import GROUPED_QUERY, random_weights, small


def fp8(weight: np.ndarray, block: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(q, scale_inv, what they mean), block by block."""
    rows, columns = weight.shape
    scale = np.empty((math.ceil(rows / block), math.ceil(columns / block)), np.float32)
    q, value = np.empty(weight.shape, ml_dtypes.float8_e4m3fn), np.empty(weight.shape, np.float32)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            part = np.s_[i * block : (i + 1) * block, j * block : (j + 1) * block]
            scale[i, j] = np.abs(weight[part]).max() / 448
            q[part] = (weight[part] / scale[i, j]).astype(q.dtype)
            value[part] = q[part].astype(np.float32) * scale[i, j]
    return q, scale, value


def int4(weight: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(packed, scale, what they mean), weight by weight."""
    rows, columns = weight.shape
    scale = np.empty((rows, columns // group), ml_dtypes.bfloat16)
    packed, value = np.zeros((rows, columns // 8), np.uint32), np.empty(weight.shape, np.float32)
    for i in range(rows):
        for j in range(columns):
            if j % group == 0:
                scale[i, j // group] = np.abs(weight[i, j : j + group]).max() / 7
            s = float(scale[i, j // group])
            q = int(np.clip(np.round(weight[i, j] / s), -8, 7))
            packed[i, j // 8] |= (q + 8) << (4 * (j % 8))
            value[i, j] = q * s
    return packed.view(np.int32), scale, value


def float_tensors() -> dict[str, np.ndarray]:
    return {
        name: array.astype(np.float32) if "bias" not in name else array
        for name, array in to_tensors(*WEIGHTS, CONFIG).items()
    }


def test_block_fp8(tmp_path):
    stored, meant = {}, {}
    for name, array in float_tensors().items():
        if "proj" in name:
            stored[name], stored[f"{name}_scale_inv"], meant[name] = fp8(array, 10)  # blocks that do not divide
        else:
            stored[name] = meant[name] = array
    quantization = {"quant_method": "fp8", "weight_block_size": [10, 10]}
    config = hf_config(CONFIG) | {"quantization_config": quantization}
    folder = write_folder(tmp_path / "fp8", config, stored)
    definition, params, bias = load_hf(folder, dtype="float32")
    assert_same((params, bias), from_tensors(meant, definition.config))

    name = "model.layers.0.self_attn.o_proj.weight"
    for change, message in (
        ({f"{name}_scale_inv": None}, f"{name}_scale_inv is missing"),
        ({f"{name}_scale_inv": np.ones((1, 1), np.float32)}, r"_scale_inv is \[1, 1\]; \[2, 2\] belongs to \[16, 12\]"),
    ):
        wrong = {key: value for key, value in (stored | change).items() if value is not None}
        with pytest.raises(UserError, match=message):
            load_hf(write_folder(tmp_path / message[-9:].strip("] "), config, wrong))


def int4_config(**changes) -> dict:
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 8} | changes
    groups = {"group_0": {"weights": weights, "targets": ["Linear"]}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}


def test_int4_in_the_folder_of_a_model_that_also_sees(tmp_path):
    stored, meant = {"vision_tower.patch_embed.weight": np.zeros((2, 3), np.float32)}, {}
    for name, array in float_tensors().items():
        full = f"language_model.{name}"
        if ".experts." in name:
            packed, scale, meant[name] = int4(array, 8)
            stored |= {f"{full}_packed": packed, f"{full}_scale": scale, f"{full}_shape": np.array(array.shape)}
        else:
            stored[full] = meant[name] = array
    text = hf_config(CONFIG) | {"model_type": "kimi_k2", "quantization_config": int4_config()}
    config = {"model_type": "kimi_k25", "text_config": text}
    folder = write_folder(tmp_path / "int4", config, stored)
    mesh = make_mesh(data=2, expert=4)
    definition, params, bias = load_hf(folder, mesh, dtype="float32")
    assert_same((params, bias), from_tensors(meant, definition.config))

    for change, message in (
        ({"num_bits": 8}, "num_bits=8; only 4"),
        ({"symmetric": False}, "symmetric=False; only True"),
        ({"group_size": 16}, r"weight_scale is \[32, 2\]; \[32, 1\] belongs to groups of 16 of 16"),
    ):
        text["quantization_config"] = int4_config(**change)
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(UserError, match=message):
            load_hf(folder)
    text["quantization_config"] = {"quant_method": "awq"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="quant_method='awq'"):
        load_hf(folder)


def mxfp4(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(blocks, scales, what they mean) of [E,I,O], weight by weight; values are the nearest that the format has."""
    magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    experts, rows, columns = weight.shape
    blocks = np.zeros((experts, columns, rows // 32, 16), np.uint8)
    scales, value = np.zeros(blocks.shape[:3], np.uint8), np.empty_like(weight, np.float32)
    for e, o, i in np.ndindex(experts, columns, rows):
        group = weight[e, i - i % 32 : i - i % 32 + 32, o]
        exponent = int(np.floor(np.log2(np.abs(group).max()))) - 2
        scaled = float(weight[e, i, o]) / 2.0**exponent
        code = int(np.argmin([abs(abs(scaled) - m) for m in magnitudes]))
        scales[e, o, i // 32] = exponent + 127
        blocks[e, o, i // 32, i % 32 // 2] |= (code + 8 * (scaled < 0)) << (4 * (i % 2))
        value[e, i, o] = (-1 if scaled < 0 else 1) * magnitudes[code] * 2.0**exponent
    return blocks, scales, value


def test_mxfp4(tmp_path):
    sizes = dict(d_model=32, expert_ff_dim=32, n_experts=2, experts_per_token=1, n_dense_layers=0, n_layers=2)
    shared = dict(n_shared_experts=0, routed_scaling_factor=1.0, n_mtp_modules=0, embedding_taps=0)
    heads = dict(qk_nope_dim=0, qk_rope_dim=6, swiglu_limit=7.0)
    config = small(**(GROUPED_QUERY | sizes | shared | heads))
    params, bias = random_weights(config)
    stored, meant = {}, {}
    for name, array in to_tensors(params, jax.tree.map(np.zeros_like, bias), config).items():
        if name.endswith(("gate_up_proj", "down_proj")):
            stored[f"{name}_blocks"], stored[f"{name}_scales"], meant[name] = mxfp4(array)
        else:
            stored[name] = meant[name] = array
    described = hf_config(config) | {"quantization_config": {"quant_method": "mxfp4"}}
    definition, *actual = load_hf(write_folder(tmp_path / "mxfp4", described, stored), dtype="float32")
    assert_same(actual, from_tensors(meant, definition.config))
    del stored["model.layers.1.mlp.experts.down_proj_scales"]
    with pytest.raises(UserError, match="experts.down_proj_scales is missing"):
        load_hf(write_folder(tmp_path / "wrong", described, stored))


def retype(folder: Path, name: str, dtype: str) -> None:
    """Calls the bytes of a tensor something else."""
    file = folder / "model.safetensors"
    data = file.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    header[name]["dtype"] = dtype
    encoded = json.dumps(header).encode()
    file.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data[end:])


PROJECTION = "model.layers.0.self_attn.o_proj.weight"


def test_scales_that_are_powers_of_two_are_read_exactly(tmp_path):
    power = np.array([[127, 120], [1, 200]], np.uint8)
    stored = {PROJECTION: np.linspace(-448, 448, 16 * 12).astype(ml_dtypes.float8_e4m3fn).reshape(16, 12)}
    stored[f"{PROJECTION}_scale_inv"] = power.view(ml_dtypes.float8_e8m0fnu)
    folder = write_folder(tmp_path / "fp8", {}, stored)
    files = CheckpointFiles(SafetensorsFolder(Folder(folder)), {"quant_method": "fp8", "weight_block_size": [10, 10]})
    scale = np.ldexp(np.float32(1), power.astype(np.int32) - 127).repeat(10, 0)[:16].repeat(10, 1)[:, :12]
    np.testing.assert_array_equal(files.read(PROJECTION), stored[PROJECTION].astype(np.float32) * scale)

    weight = np.linspace(-6, 6, 2 * 32 * 3).astype(np.float32).reshape(2, 32, 3)
    blocks, scales, meant = mxfp4(weight)
    stored = {"down_proj_blocks": blocks, "down_proj_scales": scales.view(ml_dtypes.float8_e8m0fnu)}
    folder = write_folder(tmp_path / "mxfp4", {}, stored)
    files = CheckpointFiles(SafetensorsFolder(Folder(folder)), {"quant_method": "mxfp4"})
    np.testing.assert_array_equal(files.read("down_proj"), meant)


@pytest.mark.parametrize(
    "dtype",
    # All dtypes of safetensors 0.8 that weights cannot have here, and one that does not exist.
    "BOOL U8 I8 F8_E5M2 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ I16 U16 I32 U32 C64 I64 U64 F4 F6_E2M3 F6_E3M2 F9".split(),
)
def test_numbers_that_are_no_weights_are_refused_by_name(tmp_path, dtype):
    folder = write_folder(tmp_path / "folder", hf_config(CONFIG), float_tensors())
    retype(folder, PROJECTION, dtype)
    sizes = {"F8_E8M0": 1, "U8": 1, "I32": 4, "I64": 8}
    damaged = dtype in sizes and sizes[dtype] != 4
    with pytest.raises(UserError, match=f"{PROJECTION} .*bytes for" if damaged else f"{PROJECTION} is {dtype}; floats"):
        load_hf(folder)
    if dtype not in sizes:
        with pytest.raises(UserError, match=f"{PROJECTION} in model.safetensors is {dtype}; F64, .* can be read"):
            SafetensorsFolder(Folder(folder)).read(PROJECTION)


@pytest.mark.parametrize(
    ("quantization", "name", "was", "dtype"),
    [
        ({"quant_method": "fp8", "weight_block_size": [8, 8]}, "x.weight_scale_inv", np.float32, "I32"),
        (int4_config(), "x.weight_scale", np.float32, "U32"),
        ({"quant_method": "mxfp4"}, "x_scales", np.uint8, "I8"),
        ({"quant_method": "mxfp4"}, "x_blocks", np.uint8, "F4"),
    ],
)
def test_scales_of_other_numbers_are_refused_by_name(tmp_path, quantization, name, was, dtype):
    tensors = {
        "x.weight_scale_inv": {"x.weight": np.zeros((8, 8), ml_dtypes.float8_e4m3fn)},
        "x.weight_scale": {"x.weight_packed": np.zeros((1, 1), np.int32)},
        "x_scales": {"x_blocks": np.zeros((1, 1, 1, 16), np.uint8)},
        "x_blocks": {"x_scales": np.zeros((1, 1, 1), np.uint8)},
    }[name]
    shape = {"x_scales": (1, 1, 1), "x_blocks": (1, 1, 1, 16)}.get(name, (1, 1))
    folder = write_folder(tmp_path / "folder", {}, {**tensors, name: np.zeros(shape, was)})
    CheckpointFiles(SafetensorsFolder(Folder(folder)), quantization)
    retype(folder, name, dtype)
    with pytest.raises(UserError, match=f"{name} is {dtype}; .* can be read"):
        CheckpointFiles(SafetensorsFolder(Folder(folder)), quantization)
