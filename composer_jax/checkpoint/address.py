"""Addresses of weights on a command line: DIR for a native checkpoint, hf:DIR for one of Hugging Face.

DIR is a folder or a URL. The folder of a native checkpoint holds the steps, such as runs/demo/checkpoints/sft. The
prefix hf: is optional for folders that exist.
"""

import dataclasses
from pathlib import Path
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from composer_jax.checkpoint.dtypes import require_float_dtype
from composer_jax.checkpoint.huggingface import Loaded, hf_config, load_hf, model_config, save_hf
from composer_jax.checkpoint.huggingface.folder import Folder
from composer_jax.checkpoint.huggingface.save import TOKENIZER_FILES, copy_tokenizer
from composer_jax.checkpoint.native import model_notes, read_model_config, restore_weights
from composer_jax.checkpoint.store import CheckpointStore
from composer_jax.errors import UserError
from composer_jax.models.config import ModelConfig
from composer_jax.models.model_def import ModelDef

PREFIX = "hf:"


class Address(NamedTuple):
    path: str
    huggingface: bool

    def __str__(self) -> str:
        return PREFIX * self.huggingface + self.path


def parse(text: str, *, huggingface: bool = False) -> Address:
    """Parses an address; `huggingface` is the meaning of an address without the prefix."""
    folder = Folder(text.removeprefix(PREFIX))
    return Address(folder.root if folder.local else folder.name, text.startswith(PREFIX) or huggingface)


def find_weights(text: str) -> Address:
    """Returns the address of existing weights. Raises a UserError if there are none."""
    address = parse(text)
    files = Folder(address.path).files()
    address = address._replace(huggingface=address.huggingface or "config.json" in files)
    if not address.huggingface and not any(file.isdigit() for file in files):
        raise UserError(
            f"{address.path} holds neither the steps of a native checkpoint (RUN/checkpoints/STAGE) nor the "
            "config.json of a Hugging Face checkpoint."
        )
    return address


def load_model_config(address: Address) -> ModelConfig:
    """Returns the ModelConfig of the weights at an address, without reading them."""
    if address.huggingface:
        return model_config(Folder(address.path).json("config.json"))
    with CheckpointStore(address.path) as store:
        return read_model_config(store)


def load_weights(address: Address, mesh: Mesh | None = None, dtype: str | None = None, *, mtp: bool = True) -> Loaded:
    """Loads the weights at an address onto a mesh; dtype and mtp as in `load_hf`.

    From a native checkpoint everything is read whatever `mtp` is, and dtype=None keeps its dtypes.
    """
    require_float_dtype(dtype)
    if address.huggingface:
        return load_hf(address.path, mesh, dtype, mtp=mtp)
    with CheckpointStore(address.path) as store:
        config = read_model_config(store)
        params, bias = restore_weights(store, ModelDef(config), mesh)
    if dtype is not None:
        config = dataclasses.replace(config, param_dtype=dtype, compute_dtype=dtype)
        params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
    return Loaded(ModelDef(config), params, bias)


def find_tokenizer_folder(address: Address) -> Folder | None:
    """Returns the folder with the tokenizer of the weights: their own or the data folder of their run, or None."""
    folders = [Folder(address.path)]
    if folders[0].local and not address.huggingface:
        folders.append(Folder(Path(address.path).parent.parent / "data"))
    for folder in folders:
        if folder.fs.isdir(folder.root) and any(file.startswith(TOKENIZER_FILES) for file in folder.files()):
            return folder
    return None


def convert(source: str, target: str, dtype: str | None = None, *, mtp: bool = True) -> Address:
    """Converts weights between the two formats and returns the target; hf: on both sides removes quantisation.

    All weights pass through the memory of one device. The tokenizer is copied if there is one.

    Raises:
      UserError: `load_hf` or `save_hf` raises it, or the target is not empty.
    """
    origin = find_weights(source)
    to = parse(target, huggingface=not origin.huggingface)
    folder = Folder(to.path)
    folder.require_empty()  # before all weights are read
    if to.huggingface:
        hf_config(load_model_config(origin))  # raises before anything is read
    definition, params, bias = load_weights(origin, dtype=dtype, mtp=mtp)
    tokenizer = find_tokenizer_folder(origin)
    if to.huggingface:
        save_hf(to.path, definition, params, bias, tokenizer=tokenizer.name if tokenizer else None)
        return to
    with CheckpointStore(to.path, notes=model_notes(definition)) as store:
        store.save(0, arrays={"params": params, "router_bias": bias})
    if tokenizer is not None:
        copy_tokenizer(tokenizer, folder)
    return to
