"""Checkpoint folders: written, read back bit for bit onto any mesh, from disk or a URL; and what may be wrong."""

import dataclasses
import json
import math
from pathlib import Path

import fsspec
import jax
import ml_dtypes
import numpy as np
import pytest

from composer_jax.checkpoint.huggingface import from_tensors, hf_config, load_hf, save_hf, to_tensors
from composer_jax.checkpoint.huggingface.folder import Folder
from composer_jax.checkpoint.huggingface.safetensors_files import split_into_files, write_safetensors
from composer_jax.errors import UserError
from composer_jax.models.model_def import ModelDef
from composer_jax.parallel.mesh import make_mesh
from tests.models.small import GROUPED_QUERY, random_weights, small

# Expert width 32: groups of int4, and every mesh, divide it.
CONFIG = small(
    n_layers=4,
    d_model=16,
    expert_ff_dim=32,
    q_lora_rank=16,
    n_mtp_modules=0,
    embedding_taps=0,
    param_dtype="bfloat16",
)
DEFINITION = ModelDef(CONFIG)


WEIGHTS = jax.tree.map(lambda x, leaf: x.astype(leaf.dtype), random_weights(CONFIG), DEFINITION.shapes())


def assert_same(found, wanted) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), b, strict=True), tuple(found), tuple(wanted))


def saved(folder: Path | str, **changes) -> Path | str:
    save_hf(folder, DEFINITION, *WEIGHTS, **changes)
    return folder


def write_folder(folder: Path, config: dict, tensors: dict[str, np.ndarray]) -> Path:
    """A checkpoint folder from arrays that are already in their stored form."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    entries = [(name, array.shape, array.dtype) for name, array in tensors.items()]
    write_safetensors(Folder(folder), "model.safetensors", entries, lambda name: np.ascontiguousarray(tensors[name]))
    return folder


@pytest.mark.parametrize("sizes", [(1, 1), (8, 1), (1, 8), (2, 4), (4, 2)])
def test_there_and_back_on_every_mesh_is_exact(tmp_path, sizes):
    data, expert = sizes
    mesh = make_mesh(jax.devices()[: data * expert], data=data, expert=expert)
    definition, params, bias = load_hf(saved(tmp_path / "hf"), mesh)
    assert definition.config.param_dtype == "bfloat16"
    assert_same((params, bias), WEIGHTS)
    placed = jax.tree.map(lambda leaf, sharding: leaf.sharding == sharding, (params, bias), DEFINITION.shardings(mesh))
    assert all(jax.tree.leaves(placed))
    gate = params["moe_layers"]["feed_forward"]["gate"]
    assert gate.addressable_shards[0].data.shape == (3, 8 // expert, 16 // data, 32)
    save_hf(tmp_path / "again", definition, params, bias)
    for file in (tmp_path / "hf").iterdir():
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes()


def test_many_files_and_a_url():
    url = "memory://bucket/model"
    saved(url, file_bytes=20_000)
    files = [name for name in Folder(url).files() if name.endswith(".safetensors")]
    assert len(files) > 5 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert_same(load_hf(url)[1:], WEIGHTS)
    fsspec.filesystem("memory").rm("/bucket", recursive=True)


def test_a_single_device_takes_everything(tmp_path):
    _, params, _ = load_hf(saved(tmp_path / "hf"))
    assert {leaf.devices() == {jax.devices()[0]} for leaf in jax.tree.leaves(params)} == {True}


def test_dtypes_are_cast_and_the_bias_stays_float32(tmp_path):
    definition, params, bias = load_hf(saved(tmp_path / "hf", dtype="float32"), dtype="float32")
    assert (definition.config.param_dtype, definition.config.compute_dtype) == ("float32", "float32")
    assert_same((params, bias), jax.tree.map(lambda x: x.astype(np.float32), WEIGHTS))
    assert jax.tree.leaves(load_hf(tmp_path / "hf", dtype="bfloat16").router_bias)[0].dtype == np.float32
    for dtype in ("int8", "float64", "float8_e4m3fn", "foo"):
        for refused, folder in ((load_hf, "hf"), (saved, "no")):
            with pytest.raises(UserError, match=f"dtype='{dtype}' is not a dtype of weights; use float32, bfloat16"):
                refused(tmp_path / folder, dtype=dtype)
    assert not (tmp_path / "no").exists()


def test_tokenizer_files_come_along(tmp_path):
    source = tmp_path / "tokenizer"
    source.mkdir()
    for name in ("tiktoken.model", "tokenization_kimi.py", "generation_config.json", "secret.txt"):
        (source / name).write_text(name)
    (source / "config.json").write_text(json.dumps({"eos_token_id": 7, "vocab_size": 3}))
    saved(tmp_path / "hf", tokenizer=source)
    assert (tmp_path / "hf" / "tiktoken.model").read_text() == "tiktoken.model"
    assert (tmp_path / "hf" / "tokenization_kimi.py").exists() and (tmp_path / "hf" / "generation_config.json").exists()
    assert not (tmp_path / "hf" / "secret.txt").exists()
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["eos_token_id"], config["vocab_size"]) == (7, CONFIG.vocab_size)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(UserError, match="has no tokenizer files"):
        saved(tmp_path / "other", tokenizer=empty)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "hf", "tokenizer"], "nothing half-written"


def test_the_config_names_the_dtype_that_was_written(tmp_path):
    definition = ModelDef(dataclasses.replace(CONFIG, param_dtype="float32"))
    save_hf(tmp_path / "hf", definition, *WEIGHTS)  # bfloat16, whatever the definition says
    assert_same(load_hf(tmp_path / "hf")[1:], WEIGHTS)


# ------------------------------------------------------------------------------------------------------------ MTP

MODULES = dataclasses.replace(CONFIG, n_mtp_modules=2)
MODULES_WEIGHTS = jax.tree.map(
    lambda x, leaf: x.astype(leaf.dtype), random_weights(MODULES), ModelDef(MODULES).shapes()
)


@pytest.fixture
def with_modules(tmp_path) -> Path:
    save_hf(tmp_path / "modules", ModelDef(MODULES), *MODULES_WEIGHTS)
    return tmp_path / "modules"


@pytest.mark.parametrize("sizes", [{"data": 2, "expert": 4}, {"context": 2, "expert": 2, "tensor": 2}], ids=str)
def test_mtp_modules_come_and_go_with_the_rest(with_modules, tmp_path, sizes):
    loaded = load_hf(with_modules, make_mesh(**sizes))
    assert loaded.definition.config.n_mtp_modules == 2
    assert_same(loaded[1:], MODULES_WEIGHTS)
    save_hf(tmp_path / "again", *loaded)
    for file in with_modules.iterdir():
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes()


def test_mtp_modules_have_the_published_names():
    """Those of DeepSeek-V3's folders: layers behind the last, each with a copy of the embedding and of the head."""
    assert hf_config(MODULES)["num_nextn_predict_layers"] == 2
    tensors, params = to_tensors(*MODULES_WEIGHTS, MODULES), MODULES_WEIGHTS[0]
    mtp = jax.tree.map(lambda leaf: leaf[1], params["mtp"])
    for name, wanted in {
        "enorm": mtp["embedding_norm"]["scale"],
        "hnorm": mtp["hidden_norm"]["scale"],
        "eh_proj": mtp["projection"].T,
        "shared_head.norm": mtp["final_norm"]["scale"],
        "shared_head.head": params["head"].T,
        "embed_tokens": params["embedding"]["table"],
        "mlp.experts.3.down_proj": mtp["block"]["feed_forward"]["down"][3].T,
        "self_attn.q_a_proj": mtp["block"]["attention"]["q_down"].T,
    }.items():
        np.testing.assert_array_equal(tensors[f"model.layers.5.{name}.weight"], wanted)


def test_mtp_modules_can_be_left_out(with_modules):
    loaded = load_hf(with_modules, mtp=False)
    assert loaded.definition.config.n_mtp_modules == 0
    for found, wanted in zip(loaded[1:], MODULES_WEIGHTS, strict=True):
        assert_same([found], [{name: leaf for name, leaf in wanted.items() if name != "mtp"}])


def test_an_mtp_module_with_another_head_is_refused(with_modules, tmp_path):
    tensors = to_tensors(*MODULES_WEIGHTS, MODULES)
    other = "model.layers.4.shared_head.head.weight"
    tensors[other] = tensors[other] * 2
    folder = write_folder(tmp_path / "other", hf_config(MODULES), tensors)
    with pytest.raises(UserError, match=f"{other} differs from lm_head.weight, .*leave the modules out \\(mtp=False"):
        load_hf(folder)
    assert load_hf(folder, mtp=False).definition.config.n_mtp_modules == 0
    # Some folders do without the copies.
    del tensors[other], tensors["model.layers.5.embed_tokens.weight"]
    assert_same(load_hf(write_folder(tmp_path / "without", hf_config(MODULES), tensors))[1:], MODULES_WEIGHTS)


def test_mtp_modules_are_where_the_config_announces_them(tmp_path):
    """Or nowhere, as in folders that transformers wrote; half of them, or more than announced, is a mistake."""
    announced = hf_config(MODULES)
    assert_same(load_hf(write_folder(tmp_path / "nowhere", announced, to_tensors(*WEIGHTS, CONFIG)))[1:], WEIGHTS)
    tensors = to_tensors(*MODULES_WEIGHTS, MODULES)
    with pytest.raises(UserError, match="has, unexpected, .*model.layers.4"):
        load_hf(write_folder(tmp_path / "surprising", hf_config(CONFIG), tensors))
    half = {name: tensor for name, tensor in tensors.items() if not name.startswith("model.layers.5.")}
    with pytest.raises(UserError, match="lacks model.layers.5.enorm.weight"):
        load_hf(write_folder(tmp_path / "half", announced, half))


# -----------------------------------------------------------------------------------------------------------------


def test_a_link_to_an_empty_folder_is_filled(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    assert_same(load_hf(saved(tmp_path / "link"))[1:], WEIGHTS)
    assert (tmp_path / "link").is_symlink() and (tmp_path / "disk" / "config.json").exists()


def test_files_are_cut_at_the_limit():
    assert split_into_files({"a": 3, "b": 3, "c": 5, "d": 9, "e": 1}, 8) == [["a", "b"], ["c"], ["d"], ["e"]]


# ------------------------------------------------------------------------------------------------------- quantised


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
    definition, *found = load_hf(write_folder(tmp_path / "mxfp4", described, stored), dtype="float32")
    assert_same(found, from_tensors(meant, definition.config))
    del stored["model.layers.1.mlp.experts.down_proj_scales"]
    with pytest.raises(UserError, match="experts.down_proj_scales is missing"):
        load_hf(write_folder(tmp_path / "wrong", described, stored))


# ------------------------------------------------------------------------------------------------------- bad input


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
    "other architecture": (lambda folder: edit_config(folder, model_type="llama"), "model_type='llama'"),
    "other sizes": (lambda folder: edit_config(folder, vocab_size=65), r"embed_tokens.weight as \[64, 16\]"),
    "fewer layers": (lambda folder: edit_config(folder, num_hidden_layers=3), "has, unexpected, model.layers.3."),
    "words for numbers": (
        lambda folder: edit_config(folder, hidden_size="16"),
        "hidden_size='16', which is not a whole number",
    ),
    "no weight map": (lambda folder: (folder / "model.safetensors.index.json").write_text("{}"), "has no weight_map"),
    "more layers": (lambda folder: edit_config(folder, num_hidden_layers=5), "lacks model.layers.4.input_layernorm"),
    "fewer experts": (lambda folder: edit_config(folder, n_routed_experts=4), "has, unexpected, .*and 32 more"),
    "cut short": (cut, "model.safetensors is cut short: it has [0-9]+ bytes of [0-9]+"),
    "cut in the header": (only_a_header, "is cut short or damaged: it has 50 bytes"),
    "empty file": (lambda folder: (folder / "model.safetensors").write_bytes(b""), "has 0 bytes"),
    "no file": (lambda folder: (folder / "model.safetensors").unlink(), "lacks model.safetensors, which its"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_one_sentence_before_anything_is_read(tmp_path, name, monkeypatch):
    spoil, message = WRONG[name]
    spoil(saved(tmp_path / "hf"))
    monkeypatch.setattr("composer_jax.checkpoint.huggingface.quantized.CheckpointFiles.read", None)
    with pytest.raises(UserError, match=message):
        load_hf(tmp_path / "hf")


def test_a_mesh_that_does_not_divide(tmp_path):
    definition = ModelDef(dataclasses.replace(CONFIG, n_experts=6))
    save_hf(tmp_path / "hf", definition, *definition.init(0))
    with pytest.raises(UserError, match="6 experts do not divide over mesh axis expert=4"):
        load_hf(tmp_path / "hf", make_mesh(data=2, expert=4))


def test_a_folder_with_something_in_it_is_not_written_to(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="is there already and not empty"):
        saved(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    empty = tmp_path / "empty"
    empty.mkdir()
    assert_same(load_hf(saved(empty))[1:], WEIGHTS)
