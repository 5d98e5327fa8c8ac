"""Writes weights as a Hugging Face checkpoint folder: safetensors, config.json and the tokenizer's files."""

import json
import shutil
import uuid
from pathlib import Path

import numpy as np

from composer_jax.checkpoint.huggingface.config_json import hf_config
from composer_jax.checkpoint.huggingface.files import INDEX, Folder, shard, write_safetensors
from composer_jax.checkpoint.huggingface.layout import layout
from composer_jax.checkpoint.huggingface.weights import as_leaves
from composer_jax.errors import UserError
from composer_jax.models.definition import Definition, Params
from composer_jax.observe.progress import Progress

FILE_BYTES = 5_000_000_000

TOKENIZER_FILES = (
    "tokenizer",
    "special_tokens",
    "added_tokens",
    "vocab",
    "merges",
    "chat_template",
    "generation_config",
)
"""How the names of the files begin that go from one checkpoint folder to another as they are."""


def save_hf(
    path: str | Path,
    definition: Definition,
    params: Params,
    router_bias: Params,
    *,
    tokenizer: str | Path | None = None,
    dtype: str | None = None,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Writes a folder that transformers (`DeepseekV3ForCausalLM`) and `load_hf` read.

    One tensor at a time passes through host memory. A local folder appears when it is complete; behind a URL the index,
    without which nothing can be read, is written last.

    Args:
      path: a folder that does not exist or is empty, or a URL that fsspec knows.
      tokenizer: a folder or URL whose tokenizer files are copied.
      dtype: of the weights, None keeps theirs. The bias of the router stays float32.
      file_bytes: the most bytes in one file.

    Raises:
      UserError: the folder has something in it or cannot be written; a part of the network has no place in such a
        checkpoint; the arrays are not those of the definition.
    """
    config = definition.config
    table = layout(config)
    leaves = as_leaves(params, router_bias, config, table)
    dtypes = {
        name: np.dtype(dtype if dtype and "router.bias" not in tensor.leaves[0] else leaves[tensor.leaves[0]].dtype)
        for name, tensor in table.items()
    }
    target = Folder(path)
    if target.fs.exists(target.root) and (not target.fs.isdir(target.root) or target.files()):
        raise UserError(f"{path} is there already and not empty; choose another folder, or delete it.")
    draft = Folder(f"{target.root}.{uuid.uuid4().hex[:8]}") if target.local else target
    sizes = {name: int(np.prod(tensor.shape)) * dtypes[name].itemsize for name, tensor in table.items()}
    files = shard(sizes, file_bytes)
    names = [
        "model.safetensors" if len(files) == 1 else f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
        for i in range(len(files))
    ]
    try:
        draft.fs.makedirs(draft.root, exist_ok=True)
        with Progress(sum(sizes.values()), "byte", f"save {path}") as progress:

            def get(name: str) -> np.ndarray:
                progress.update(sizes[name])
                return table[name].joined(leaves).astype(dtypes[name], copy=False)

            for file, inside in zip(names, files, strict=True):
                write_safetensors(draft, file, [(name, table[name].shape, dtypes[name]) for name in inside], get)
        described = hf_config(config) | {"torch_dtype": dtype or config.param_dtype}
        _write_json(draft, "config.json", described)
        if tokenizer is not None:
            copy_tokenizer(Folder(tokenizer), draft)
        weight_map = {name: file for file, inside in zip(names, files, strict=True) for name in inside}
        _write_json(draft, INDEX, {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map})
        if target.local:
            if target.fs.exists(target.root):
                Path(target.root).rmdir()
            Path(draft.root).rename(target.root)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}; nothing was left there.") from error
    finally:
        if target.local:
            shutil.rmtree(draft.root, ignore_errors=True)


def copy_tokenizer(source: Folder, target: Folder) -> None:
    """Copies the tokenizer's files from one folder to another. Raises a UserError if there are none."""
    files = [file for file in source.files() if file.startswith(TOKENIZER_FILES)]
    if not files:
        raise UserError(f"{source.name} has no tokenizer files.")
    target.fs.makedirs(target.root, exist_ok=True)
    for file in files:
        with target.fs.open(target.path(file), "wb") as opened:
            opened.write(source.fs.cat_file(source.path(file)))


def _write_json(folder: Folder, file: str, value: dict) -> None:
    with folder.fs.open(folder.path(file), "wb") as opened:
        opened.write((json.dumps(value, indent=2) + "\n").encode())
