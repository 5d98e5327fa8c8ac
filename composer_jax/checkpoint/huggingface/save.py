"""Writes weights as a Hugging Face checkpoint folder: safetensors, config.json and the tokenizer's files."""

import json
import shutil
import uuid
from pathlib import Path

import jax
import numpy as np

from composer_jax.checkpoint.dtypes import require_float_dtype
from composer_jax.checkpoint.huggingface.config_json import hf_config
from composer_jax.checkpoint.huggingface.folder import Folder
from composer_jax.checkpoint.huggingface.safetensors_files import INDEX, split_into_files, write_safetensors
from composer_jax.checkpoint.huggingface.weights import flatten_leaves, written
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
"""How the names of the files begin that go from one checkpoint folder to another as they are."""

CONFIG_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""What config.json says beside the network, and goes along with the tokenizer."""


def save_hf(
    path: str | Path,
    definition: ModelDef,
    params: Params,
    router_bias: Params,
    *,
    tokenizer: str | Path | None = None,
    dtype: str | None = None,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Writes a folder that transformers and `load_hf` read.

    One tensor at a time passes through host memory. A local folder appears when it is complete; behind a URL
    config.json, without which nothing can be read, is written last.

    Args:
      path: a folder that does not exist or is empty, or a URL that fsspec knows.
      tokenizer: a folder or URL whose tokenizer files are copied, and the ids of special tokens in its config.json.
      dtype: of the weights, None keeps theirs. The bias of the router stays float32.
      file_bytes: the most bytes in one file.

    Raises:
      UserError: the folder has something in it or cannot be written; a part of the network has no place in such a
        checkpoint; the arrays are not those of the definition; several processes call it.
    """
    if jax.process_count() > 1:
        raise UserError(
            "save_hf writes from one process; restore the checkpoint in a single process and save it there."
        )
    config = definition.config
    table = written(config)
    leaves = flatten_leaves(params, router_bias, config, table)
    require_float_dtype(dtype)
    dtypes = {
        name: np.dtype(dtype if dtype and "router.bias" not in tensor.leaves[0] else leaves[tensor.leaves[0]].dtype)
        for name, tensor in table.items()
    }
    described = hf_config(config) | {"torch_dtype": dtypes["model.embed_tokens.weight"].name}
    copied = None
    if tokenizer is not None:
        copied = Folder(tokenizer)
        tokenizer_files(copied)  # now rather than after all weights are written
        if "config.json" in copied.files():
            described |= {key: value for key, value in copied.json("config.json").items() if key in CONFIG_KEYS}

    target = Folder(Path(path).expanduser().resolve() if Folder(path).local else path)
    target.require_empty()
    if target.local and Path(target.root).is_mount():
        raise UserError(f"{path} is a mount point, which cannot appear as a whole; name a folder in it.")
    draft = Folder(f"{target.root}.{uuid.uuid4().hex[:8]}") if target.local else target
    sizes = {name: int(np.prod(tensor.shape)) * dtypes[name].itemsize for name, tensor in table.items()}
    files = split_into_files(sizes, file_bytes)
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
        weight_map = {name: file for file, inside in zip(names, files, strict=True) for name in inside}
        _write_json(draft, INDEX, {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map})
        if copied is not None:
            copy_tokenizer(copied, draft)
        _write_json(draft, "config.json", described)
        if target.local:
            if target.fs.exists(target.root):
                Path(target.root).rmdir()
            Path(draft.root).rename(target.root)
    except OSError as error:
        left = "nothing was left there" if target.local else "delete what was written before trying again"
        raise UserError(f"cannot write {path}: {error.strerror or error}; {left}.") from error
    finally:
        if target.local:
            shutil.rmtree(draft.root, ignore_errors=True)


def tokenizer_files(folder: Folder) -> list[str]:
    """Names of the tokenizer's files in a folder. Raises a UserError if there are none."""
    files = [file for file in folder.files() if file.startswith(TOKENIZER_FILES)]
    if not files:
        raise UserError(f"{folder.name} has no tokenizer files.")
    return files


def copy_tokenizer(source: Folder, target: Folder) -> None:
    """Copies the tokenizer's files from one folder to another. Raises a UserError if there are none."""
    target.fs.makedirs(target.root, exist_ok=True)
    for file in tokenizer_files(source):
        with target.fs.open(target.path(file), "wb") as opened:
            opened.write(source.fs.cat_file(source.path(file)))


def _write_json(folder: Folder, file: str, value: dict) -> None:
    with folder.fs.open(folder.path(file), "wb") as opened:
        opened.write((json.dumps(value, indent=2) + "\n").encode())
