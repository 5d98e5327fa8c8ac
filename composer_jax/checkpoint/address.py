"""Addresses of weights on a command line: DIR for a native checkpoint, hf:DIR for Hugging Face, gguf:FILE for GGUF.

DIR is a folder or a URL. The folder of a native checkpoint holds the steps, such as runs/demo/checkpoints/sft; the
folder of a run (runs/demo) stands for the weights of its last finished stage. The prefix hf: is optional for folders
that exist, and gguf: for files that end in .gguf.
"""

import dataclasses
from typing import Literal, NamedTuple

import jax
from jax.sharding import Mesh

from composer_jax.checkpoint.dtypes import require_float_dtype
from composer_jax.checkpoint.gguf import open_gguf
from composer_jax.checkpoint.gguf.load import load_gguf
from composer_jax.checkpoint.huggingface import Loaded, hf_config, load_hf, model_config, save_hf
from composer_jax.checkpoint.huggingface.folder import Folder
from composer_jax.checkpoint.huggingface.save import TOKENIZER_FILES, read_tokenizer_files, write_tokenizer_files
from composer_jax.checkpoint.native import model_notes, read_model_config, restore_weights
from composer_jax.checkpoint.store import CheckpointStore
from composer_jax.data.chat.text_processor import FilesInMemory, TextProcessor
from composer_jax.errors import UserError
from composer_jax.models.config import ModelConfig
from composer_jax.models.model_def import ModelDef

STAGES = ("pretrain", "sft", "rl")
"""Stages of a run that leave weights, in their order. A config may have further phases between the first two."""
PREFIX, GGUF_PREFIX = "hf:", "gguf:"
PREFIXES = {PREFIX: "hf", GGUF_PREFIX: "gguf"}


class Address(NamedTuple):
    path: str
    """Of a folder, or of a GGUF file."""
    format: Literal["native", "hf", "gguf"]

    @property
    def huggingface(self) -> bool:
        """Whether it is the folder of a Hugging Face model."""
        return self.format == "hf"

    def __str__(self) -> str:
        return next((prefix for prefix, name in PREFIXES.items() if name == self.format), "") + self.path


def parse(text: str, *, huggingface: bool = False) -> Address:
    """Parses an address; `huggingface` is the meaning of an address without a prefix."""
    prefix = next((prefix for prefix in PREFIXES if text.startswith(prefix)), "")
    folder = Folder(text.removeprefix(prefix))
    path = folder.root if folder.local else folder.name
    if prefix == GGUF_PREFIX or (not prefix and path.endswith(".gguf") and folder.fs.isfile(folder.root)):
        return Address(path, "gguf")
    return Address(path, "hf" if prefix or huggingface else "native")


def find_weights(text: str) -> Address:
    """Returns the address of existing weights. Raises a UserError if there are none."""
    address = parse(text)
    if address.format == "gguf":
        open_gguf(address.path)
        return address
    folder = Folder(address.path)
    files = folder.files()
    if address.format == "native" and "checkpoints" in files:
        address = address._replace(path=_last_stage(folder))
        files = Folder(address.path).files()
    elif "config.json" in files:
        address = address._replace(format="hf")
    if not address.huggingface and not any(file.isdigit() for file in files):
        raise UserError(
            f"{address.path} holds neither the steps of a native checkpoint (RUN/checkpoints/STAGE) nor the "
            "config.json of a Hugging Face checkpoint."
        )
    return address


def _last_stage(run: Folder) -> str:
    """Returns the folder of the checkpoints that a run's last finished stage left. Raises a UserError without one."""
    has_config = run.fs.exists(run.path("config.json"))
    stages = run.json("config.json").get("config", {}).get("stages", STAGES) if has_config else STAGES
    done = [stage for stage in reversed(stages) if run.fs.exists(run.path(f"stages/{stage}.json"))]
    if not done:
        raise UserError(f"{run.name} is a run in which no stage of {', '.join(stages)} is done; run one first.")
    return f"{run.root if run.local else run.name}/checkpoints/{done[0]}"


def load_model_config(address: Address) -> ModelConfig:
    """Returns the ModelConfig of the weights at an address, without reading them."""
    if address.format == "gguf":
        return model_config(open_gguf(address.path).config)
    if address.huggingface:
        return model_config(Folder(address.path).json("config.json"))
    with CheckpointStore(address.path) as store:
        return read_model_config(store)


def load_weights(address: Address, mesh: Mesh | None = None, dtype: str | None = None, *, mtp: bool = True) -> Loaded:
    """Loads the weights at an address onto a mesh; dtype and mtp as in `load_hf`.

    From a native checkpoint everything is read whatever `mtp` is, and dtype=None keeps its dtypes; from a GGUF file
    dtype=None is float32.
    """
    require_float_dtype(dtype)
    if address.format == "gguf":
        return load_gguf(address.path, mesh, dtype)
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
    """Returns the folder with the tokenizer of the weights: their own, or that of their run's data or base, or None."""
    if address.format == "gguf":
        return None  # load_tokenizer_files has what is in the file
    folders = [Folder(address.path)]
    if not address.huggingface and (run := address.path.rstrip("/").rpartition("/checkpoints/")[0]):
        folders += [Folder(f"{run}/base"), Folder(f"{run}/data")]
    for folder in folders:
        if folder.fs.isdir(folder.root) and any(file.startswith(TOKENIZER_FILES) for file in folder.files()):
            return folder
    return None


def load_tokenizer_files(address: Address) -> dict[str, bytes] | None:
    """Returns the tokenizer's files of the weights at an address, name -> content, or None if there are none.

    Raises:
      UserError: a GGUF file with a tokenizer that is not read.
    """
    if address.format == "gguf":
        file = open_gguf(address.path)
        if not file.has_tokenizer:
            return None
        return {name: (file.text(name) or "").encode() for name in ("config.json", *file.texts)}
    folder = find_tokenizer_folder(address)
    return None if folder is None else read_tokenizer_files(folder)


def convert(source: str, target: str, dtype: str | None = None, *, mtp: bool = True) -> Address:
    """Converts weights between formats and returns the target; hf: on both sides removes quantisation.

    mtp=False leaves out the multi-token-prediction modules, which few Hugging Face formats can store. All weights pass
    through the memory of one device. The tokenizer is copied if there is one.

    Raises:
      UserError: `load_hf`, `load_gguf` or `save_hf` raises it, or the target is not empty or a GGUF file.
    """
    origin = find_weights(source)
    to = parse(target, huggingface=origin.format == "native")
    if to.format == "gguf":
        raise UserError(f"--target={target} would be a GGUF file, which is not written; use {PREFIX}DIR or DIR.")
    folder = Folder(to.path)
    folder.require_empty()  # before all weights are read
    tokenizer = load_tokenizer_files(origin)
    if to.huggingface:
        described = load_model_config(origin)
        hf_config(described if mtp else _without_modules(described))  # raises before anything is read
    definition, params, bias = load_weights(origin, dtype=dtype, mtp=mtp)
    if not mtp:
        definition = ModelDef(_without_modules(definition.config))
        params, bias = ({name: leaf for name, leaf in tree.items() if name != "mtp"} for tree in (params, bias))
    if to.huggingface:
        save_hf(to.path, definition, params, bias, tokenizer=tokenizer)
        return to
    with CheckpointStore(to.path, notes=model_notes(definition)) as store:
        store.save(0, arrays={"params": params, "router_bias": bias})
    if tokenizer is not None:
        write_tokenizer_files(tokenizer, folder)
    return to


def _without_modules(config: ModelConfig) -> ModelConfig:
    return dataclasses.replace(config, n_mtp_modules=0, cache_mtp=False)


def open_text_processor(address: Address, config: ModelConfig) -> TextProcessor:
    """Returns the text side of the weights at an address; `config` is that of their network."""
    return TextProcessor(FilesInMemory(load_tokenizer_files(address) or {}, address.path), config, address.path)
