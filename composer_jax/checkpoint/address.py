"""Where weights lie, as people write it on a command line: DIR for a checkpoint of ours, hf:DIR for Hugging Face's.

DIR is a folder or a URL. Of ours it is what holds the steps, such as runs/demo/checkpoints/sft. The prefix hf: may be
left out where the folder shows what it is.
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
    """The address that people wrote; `huggingface` is what it means without the prefix."""
    folder = Folder(text.removeprefix(PREFIX))
    return Address(folder.root if folder.local else folder.name, text.startswith(PREFIX) or huggingface)


def find_weights(text: str) -> Address:
    """The address of weights that are there. Raises a UserError if they are not."""
    address = parse(text)
    files = Folder(address.path).files()
    address = address._replace(huggingface=address.huggingface or "config.json" in files)
    if not address.huggingface and not any(file.isdigit() for file in files):
        raise UserError(
            f"{address.path} holds neither steps of a checkpoint of ours (RUN/checkpoints/STAGE) nor the config.json "
            "of one of Hugging Face."
        )
    return address


def load_model_config(address: Address) -> ModelConfig:
    """The network whose weights are there; none of them is read."""
    if address.huggingface:
        return model_config(Folder(address.path).json("config.json"))
    with CheckpointStore(address.path) as store:
        return read_model_config(store)


def load_weights(address: Address, mesh: Mesh | None = None, dtype: str | None = None, *, mtp: bool = True) -> Loaded:
    """The network at an address on a mesh; dtype and mtp as in `load_hf`.

    Of a checkpoint of ours, everything is read whatever `mtp` says, and a dtype of None keeps what it has.
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
    """The folder whose tokenizer belongs to the weights: theirs, or the data folder of their run."""
    folders = [Folder(address.path)]
    if folders[0].local and not address.huggingface:
        folders.append(Folder(Path(address.path).parent.parent / "data"))
    for folder in folders:
        if folder.fs.isdir(folder.root) and any(file.startswith(TOKENIZER_FILES) for file in folder.files()):
            return folder
    return None


def convert(source: str, target: str, dtype: str | None = None, *, mtp: bool = True) -> Address:
    """Weights from one form to the other; with hf: on both sides to Hugging Face's again, which undoes quantisation.

    All weights are in the memory of one device in between. The tokenizer goes along where there is one.

    Raises:
      UserError: whatever `load_hf` and `save_hf` refuse; the target has something in it.
    """
    there = find_weights(source)
    to = parse(target, huggingface=not there.huggingface)
    folder = Folder(to.path)
    folder.require_empty()  # now rather than after all weights are read
    if to.huggingface:
        hf_config(load_model_config(there))  # refuses before anything is read
    definition, params, bias = load_weights(there, dtype=dtype, mtp=mtp)
    tokenizer = find_tokenizer_folder(there)
    if to.huggingface:
        save_hf(to.path, definition, params, bias, tokenizer=tokenizer.name if tokenizer else None)
        return to
    with CheckpointStore(to.path, notes=model_notes(definition)) as store:
        store.save(0, arrays={"params": params, "router_bias": bias})
    if tokenizer is not None:
        copy_tokenizer(tokenizer, folder)
    return to
