"""Converts weights between a native checkpoint, the folder of a Hugging Face model, and (to read) a GGUF file."""

import dataclasses

from composer_jax.checkpoint.address import PREFIX, Address, parse
from composer_jax.checkpoint.checkpoint import open_checkpoint
from composer_jax.checkpoint.folder import Folder
from composer_jax.checkpoint.huggingface import hf_config, save_hf
from composer_jax.checkpoint.huggingface.save import write_tokenizer_files
from composer_jax.checkpoint.native import model_notes
from composer_jax.checkpoint.store import CheckpointStore
from composer_jax.errors import UserError
from composer_jax.models.config import ModelConfig
from composer_jax.models.model_def import ModelDef


def convert(source: str, target: str, dtype: str | None = None, *, mtp: bool = True) -> Address:
    """Converts weights between formats and returns the target; hf: on both sides removes quantisation.

    mtp=False leaves out the multi-token-prediction modules, which few Hugging Face formats can store. All weights pass
    through the memory of one device. The tokenizer is copied if there is one.

    Raises:
      UserError: `open_checkpoint`, `Checkpoint.load_as_stored` or `save_hf` raises it, or the target is not empty or a
        GGUF file.
    """
    origin = open_checkpoint(source)
    to = parse(target, huggingface=origin.address.format == "native")
    if to.format == "gguf":
        raise UserError(f"--target={target} would be a GGUF file, which is not written; use {PREFIX}DIR or DIR.")
    if to.format == "patches":
        raise UserError(
            f"--target={target} would be a version of a trainer, which is not written; use {PREFIX}DIR or DIR."
        )
    folder = Folder(to.path)
    folder.require_empty()  # before all weights are read
    tokenizer = origin.tokenizer_files()
    if to.format == "hf":
        hf_config(origin.config if mtp else _without_modules(origin.config))  # raises before anything is read
    definition, params, bias = origin.load_as_stored(dtype=dtype, mtp=mtp)
    if not mtp:
        definition = ModelDef(_without_modules(definition.config))
        params, bias = ({name: leaf for name, leaf in tree.items() if name != "mtp"} for tree in (params, bias))
    if to.format == "hf":
        save_hf(to.path, definition, params, bias, tokenizer=tokenizer)
        return to
    with CheckpointStore(to.path, notes=model_notes(definition)) as store:
        store.save(0, arrays={"params": params, "router_bias": bias})
    if tokenizer is not None:
        write_tokenizer_files(tokenizer, folder)
    return to


def _without_modules(config: ModelConfig) -> ModelConfig:
    return dataclasses.replace(config, n_mtp_modules=0, cache_mtp=False)
