"""Where weights lie, as people write it on a command line: DIR for a checkpoint of ours, hf:DIR for Hugging Face's.

DIR is a folder or a URL. Of ours it is what holds the steps, such as runs/demo/checkpoints/sft. The prefix hf: may be
left out where the folder shows what it is.
"""

import dataclasses
from pathlib import Path
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from composer_jax.checkpoint.huggingface import Loaded, load_hf, save_hf
from composer_jax.checkpoint.huggingface.files import Folder
from composer_jax.checkpoint.huggingface.save import copy_tokenizer
from composer_jax.checkpoint.own import described_model, model_notes, restore_weights
from composer_jax.checkpoint.store import CheckpointStore
from composer_jax.errors import UserError
from composer_jax.models.definition import Definition

PREFIX = "hf:"


class Address(NamedTuple):
    path: str
    huggingface: bool

    def __str__(self) -> str:
        return PREFIX * self.huggingface + self.path


def find_weights(text: str) -> Address:
    """The address of weights that are there. Raises a UserError if they are not."""
    path = text.removeprefix(PREFIX).rstrip("/")
    files = Folder(path).files()
    address = Address(path, text.startswith(PREFIX) or "config.json" in files)
    if not address.huggingface and not any(file.isdigit() for file in files):
        raise UserError(
            f"{path} holds neither steps of a checkpoint of ours (RUN/checkpoints/STAGE) nor the config.json of one of "
            "Hugging Face."
        )
    return address


def load_weights(address: Address, mesh: Mesh | None = None, dtype: str | None = None) -> Loaded:
    """The network at an address on a mesh; dtype as in `load_hf`, and None keeps what a checkpoint of ours has."""
    if address.huggingface:
        return load_hf(address.path, mesh, dtype)
    with CheckpointStore(address.path) as store:
        config = described_model(store)
        params, bias = restore_weights(store, Definition(config), mesh)
    if dtype is not None:
        config = dataclasses.replace(config, param_dtype=dtype, compute_dtype=dtype)
        params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
    return Loaded(Definition(config), params, bias)


def tokenizer_folder(address: Address) -> str | None:
    """The folder whose tokenizer belongs to the weights: theirs, or the data folder of their run."""
    run = f"{Path(address.path).parent.parent}/data"
    for folder in (address.path, *(() if "://" in address.path else (run,))):
        if Folder(folder).fs.exists(Folder(folder).path("tokenizer.json")):
            return folder
    return None


def convert(source: str, target: str, dtype: str | None = None) -> Address:
    """Weights from one form to the other; with hf: on both sides to Hugging Face's again, which undoes quantisation.

    Raises:
      UserError: whatever `load_hf` and `save_hf` refuse; the target has something in it.
    """
    there = find_weights(source)
    to = Address(target.removeprefix(PREFIX).rstrip("/"), target.startswith(PREFIX) or not there.huggingface)
    folder = Folder(to.path)
    if folder.fs.exists(folder.root) and folder.files():
        raise UserError(f"{to.path} is there already and not empty; choose another folder, or delete it.")
    definition, params, bias = load_weights(there, dtype=dtype)
    tokenizer = tokenizer_folder(there)
    if to.huggingface:
        save_hf(to.path, definition, params, bias, tokenizer=tokenizer)
        return to
    with CheckpointStore(to.path, notes=model_notes(definition)) as store:
        store.save(0, arrays={"params": params, "router_bias": bias})
    if tokenizer is not None:
        copy_tokenizer(Folder(tokenizer), folder)
    return to
