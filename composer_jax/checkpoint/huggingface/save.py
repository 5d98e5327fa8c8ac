"""Writes weights as a Hugging Face checkpoint folder: safetensors, config.json and the tokenizer's files."""

import contextlib
import json
import shutil
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from composer_jax.checkpoint.dtypes import require_float_dtype
from composer_jax.checkpoint.folder import Folder
from composer_jax.checkpoint.huggingface.config_json import hf_config
from composer_jax.checkpoint.huggingface.safetensors_files import INDEX, split_into_files, write_safetensors
from composer_jax.checkpoint.huggingface.weights import export_layouts, flatten_leaves
from composer_jax.errors import UserError
from composer_jax.models.model_def import ModelDef, Params
from composer_jax.observe.progress import Progress

FILE_BYTES = 5_000_000_000

TOKENIZER_FILES = (
    "tokenizer",
    "tokenization_",
    "tiktoken",
    "special_tokens",
    "added_tokens",
    "vocab",
    "merges",
    "chat_template",
    "generation_config",
)
"""Prefixes of the names of files that are copied unchanged from one checkpoint folder to another."""

CONFIG_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Keys of config.json that belong to the tokenizer and are copied with it."""


def save_hf(
    path: str | Path,
    definition: ModelDef,
    params: Params,
    router_bias: Params,
    *,
    tokenizer: str | Path | Mapping[str, bytes] | None = None,
    dtype: str | None = None,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Writes a folder that transformers and `load_hf` read.

    One tensor at a time passes through host memory. A local folder appears when it is complete; at a URL, config.json
    is written last, because nothing can be read without it.

    Args:
      path: a folder that does not exist or is empty, or a URL that fsspec knows.
      tokenizer: a folder or URL whose tokenizer files are copied, and the ids of special tokens in its config.json;
        or these files, name -> content.
      dtype: of the weights; None keeps theirs. The router bias stays float32.
      file_bytes: maximum bytes of one file.

    Raises:
      UserError: the folder is not empty or cannot be written; a part of the network cannot be stored in this format;
        the arrays do not fit the definition; several processes call it.
    """
    if jax.process_count() > 1:
        raise UserError("save_hf writes from one process; restore the checkpoint in a single process to save it.")
    config = definition.config
    table = export_layouts(config)
    leaves = flatten_leaves(params, router_bias, config, table)
    require_float_dtype(dtype)
    dtypes = {
        name: np.dtype(dtype if dtype and "router.bias" not in tensor.leaves[0] else leaves[tensor.leaves[0]].dtype)
        for name, tensor in table.items()
    }
    described = hf_config(config) | {"torch_dtype": dtypes["model.embed_tokens.weight"].name}
    files = tokenizer if isinstance(tokenizer, Mapping | None) else read_tokenizer_files(Folder(tokenizer))
    if files and "config.json" in files:
        described |= {key: value for key, value in json.loads(files["config.json"]).items() if key in CONFIG_KEYS}

    target = Folder(Path(path).expanduser().resolve() if Folder(path).local else path)
    sizes = {name: int(np.prod(tensor.shape)) * dtypes[name].itemsize for name, tensor in table.items()}
    with _create_folder(target, path) as folder, Progress(sum(sizes.values()), "byte", f"save {path}") as progress:

        def get(name: str) -> np.ndarray:
            progress.update(sizes[name])
            return table[name].join_leaves(leaves).astype(dtypes[name], copy=False)

        weight_map: dict[str, str] = {}
        for file, names in _name_files(split_into_files(sizes, file_bytes)).items():
            write_safetensors(folder, file, [(name, table[name].shape, dtypes[name]) for name in names], get)
            weight_map |= dict.fromkeys(names, file)
        _write_json(folder, INDEX, {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map})
        if files:
            write_tokenizer_files(files, folder)
        _write_json(folder, "config.json", described)


def _name_files(files: list[list[str]]) -> dict[str, list[str]]:
    """Returns the tensors of each file by its published name."""
    if len(files) == 1:
        return {"model.safetensors": files[0]}
    return {f"model-{i:05d}-of-{len(files):05d}.safetensors": names for i, names in enumerate(files, 1)}


@contextlib.contextmanager
def _create_folder(target: Folder, path: str | Path) -> Iterator[Folder]:
    """Yields the folder to write to. A local one is temporary and is renamed to `target` if the block succeeds."""
    target.require_empty()
    if target.local and Path(target.root).is_mount():
        raise UserError(f"{path} is a mount point, which cannot be created by a rename; name a folder in it.")
    temporary = Folder(f"{target.root}.{uuid.uuid4().hex[:8]}") if target.local else target
    try:
        temporary.fs.makedirs(temporary.root, exist_ok=True)
        yield temporary
        if target.local:
            if target.fs.exists(target.root):
                Path(target.root).rmdir()
            Path(temporary.root).rename(target.root)
    except OSError as error:
        left = "no files were left" if target.local else "delete the written files before trying again"
        raise UserError(f"cannot write {path}: {error.strerror or error}; {left}.") from error
    finally:
        if target.local:
            shutil.rmtree(temporary.root, ignore_errors=True)


def read_tokenizer_files(folder: Folder) -> dict[str, bytes]:
    """Returns the tokenizer's files in a folder and its config.json, if any, name -> content.

    Raises:
      UserError: there are none, one cannot be read, or config.json is no JSON object.
    """
    names = folder.files()
    files = {name: folder.content(name) for name in names if name.startswith(TOKENIZER_FILES)}
    if not files:
        raise UserError(f"{folder.name} has no tokenizer files.")
    if "config.json" in names:
        files["config.json"] = json.dumps(folder.json("config.json")).encode()
    return files


def write_tokenizer_files(files: Mapping[str, bytes], folder: Folder) -> None:
    """Writes files of `read_tokenizer_files` into a folder, except config.json, which describes a network."""
    folder.fs.makedirs(folder.root, exist_ok=True)
    for name, content in files.items():
        if name.startswith(TOKENIZER_FILES):
            with folder.fs.open(folder.path(name), "wb") as opened:
                opened.write(content)


def _write_json(folder: Folder, file: str, value: dict[str, Any]) -> None:
    with folder.fs.open(folder.path(file), "wb") as opened:
        opened.write((json.dumps(value, indent=2) + "\n").encode())
