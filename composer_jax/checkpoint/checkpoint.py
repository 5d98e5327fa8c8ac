"""Checkpoint: weights at an address, with the network, tokenizer, chat format and generation defaults beside them.

`open_checkpoint` finds them. Each file is read when it is first needed, and once: config.json and the tokenizer's files
of a folder, the header of a GGUF file, the notes of a native checkpoint. `Checkpoint.load` reads the weights.
"""

import abc
import dataclasses
import functools
import json
from typing import Any

import jax
from jax.sharding import Mesh

from composer_jax.checkpoint.address import STAGES, Address, parse
from composer_jax.checkpoint.dtypes import require_float_dtype
from composer_jax.checkpoint.folder import Folder, ReadOnceFolder
from composer_jax.checkpoint.gguf import open_gguf
from composer_jax.checkpoint.huggingface import Loaded, load_hf, model_config
from composer_jax.checkpoint.huggingface.load import load_tensors
from composer_jax.checkpoint.huggingface.save import TOKENIZER_FILES, read_tokenizer_files, write_tokenizer_files
from composer_jax.checkpoint.native import model_notes, network_of_notes, read_model_config, restore_weights
from composer_jax.checkpoint.store import CheckpointStore
from composer_jax.checkpoint.weight_chain import ChainFiles, WeightReceiver
from composer_jax.checkpoint.weight_shards import parts_here, placed_tree
from composer_jax.data.chat.text_processor import FilesInMemory, TextProcessor
from composer_jax.data.text_files import TextFiles
from composer_jax.errors import UserError
from composer_jax.models.config import ModelConfig
from composer_jax.models.model_def import ModelDef
from composer_jax.models.supported_dtype import supported_network

NETWORK = "network.json"
"""Beside the versions of a trainer: the ModelConfig of their network."""


class Checkpoint(abc.ABC):
    """Weights that exist at an address, and the files that belong to them. Made by `open_checkpoint`."""

    def __init__(self, address: Address) -> None:
        self.address = address

    @property
    def name(self) -> str:
        """The last part of the address."""
        return self.address.path.rstrip("/").rpartition("/")[2]

    @functools.cached_property
    def config(self) -> ModelConfig:
        """The network of the weights. Raises UserError if it is not described, or cannot be read."""
        return self._read_config()

    @functools.cached_property
    def text(self) -> TextProcessor:
        """Tokenizer, chat format, generation defaults and end tokens, each loaded on first use."""
        files = self._text_files() or FilesInMemory({}, self.address.path)
        return TextProcessor(files, self.config, self.address.path)

    @abc.abstractmethod
    def tokenizer_files(self) -> dict[str, bytes] | None:
        """Returns all files of the tokenizer and config.json, name -> content, or None without a tokenizer.

        Raises:
          UserError: a file that cannot be read, or a tokenizer of a GGUF file that is not supported.
        """

    def load(self, mesh: Mesh | None = None, dtype: str | None = None, *, mtp: bool = True) -> Loaded:
        """Loads the weights onto a mesh; the arguments and errors are those of `load_hf`.

        A native checkpoint is read with all its modules whatever `mtp` is, and dtype=None keeps its dtypes; from a GGUF
        file dtype=None is float32. The network computes as this process's GPU can (models/supported_dtype.py).
        """
        loaded = self.load_as_stored(mesh, dtype, mtp=mtp)
        network = supported_network(loaded.definition.config)
        return loaded._replace(definition=dataclasses.replace(loaded.definition, config=network))

    def load_as_stored(self, mesh: Mesh | None = None, dtype: str | None = None, *, mtp: bool = True) -> Loaded:
        """Loads the weights as `load` does, with the checkpoint's own compute dtype, whatever this process's GPU can.

        The network is then the same on every machine, for weights that are stored again.
        """
        require_float_dtype(dtype)
        return self._load(mesh, dtype, mtp)

    @abc.abstractmethod
    def _read_config(self) -> ModelConfig: ...

    @abc.abstractmethod
    def _text_files(self) -> TextFiles | None:
        """Returns where the tokenizer's files are, or None if there are none."""

    @abc.abstractmethod
    def _load(self, mesh: Mesh | None, dtype: str | None, mtp: bool) -> Loaded: ...


def open_checkpoint(text: str) -> Checkpoint:
    """Opens the weights at an address (address.py); of a run's folder, those of its last finished stage.

    Raises:
      UserError: there are none, or a GGUF file that cannot be read.
    """
    address = parse(text)
    if address.format == "gguf":
        return _GGUFCheckpoint(address)
    folder = ReadOnceFolder(address.path)
    if address.format == "patches":
        return PublishedCheckpoint(address, folder)
    files = folder.files()
    if address.format == "native" and "checkpoints" in files:
        address = address._replace(path=_last_stage(folder))
        folder = ReadOnceFolder(address.path)
    elif address.format == "hf" or "config.json" in files:
        return _HuggingFaceCheckpoint(address._replace(format="hf"), folder)
    if not any(file.isdigit() for file in folder.files()):
        raise UserError(
            f"{address.path} holds neither the steps of a native checkpoint (RUN/checkpoints/STAGE) nor the "
            "config.json of a Hugging Face checkpoint."
        )
    return _NativeCheckpoint(address, folder)


def _last_stage(run: Folder) -> str:
    """Returns the folder of the checkpoints that a run's last finished stage left. Raises a UserError without one."""
    has_config = run.fs.exists(run.path("config.json"))
    stages = run.json("config.json").get("config", {}).get("stages", STAGES) if has_config else STAGES
    done = [stage for stage in reversed(stages) if run.fs.exists(run.path(f"stages/{stage}.json"))]
    if not done:
        raise UserError(f"{run.name} is a run in which no stage of {', '.join(stages)} is done; run one first.")
    return f"{run.root if run.local else run.name}/checkpoints/{done[0]}"


class _FolderCheckpoint(Checkpoint):
    """Weights in a folder."""

    def __init__(self, address: Address, folder: ReadOnceFolder) -> None:
        super().__init__(address)
        self._folder = folder

    def tokenizer_files(self) -> dict[str, bytes] | None:
        folder = self._text_files()
        return None if folder is None else read_tokenizer_files(folder)

    def _text_files(self) -> ReadOnceFolder | None:
        return self._folder if _has_tokenizer(self._folder) else None


def tokenizer_folder(run: str) -> ReadOnceFolder | None:
    """Returns the folder of a run that has its tokenizer: the copy of its base's files, or its data."""
    folders = (ReadOnceFolder(f"{run}/{name}") for name in ("base", "data"))
    return next((folder for folder in folders if folder.fs.isdir(folder.root) and _has_tokenizer(folder)), None)


def describe_versions(folder: str, definition: ModelDef, run: str) -> None:
    """Writes what a server needs beside the versions of a trainer: the network, and the tokenizer of the run."""
    ChainFiles(folder).write(NETWORK, json.dumps(model_notes(definition)).encode())
    if (tokenizer := tokenizer_folder(run)) is not None:
        write_tokenizer_files(read_tokenizer_files(tokenizer), Folder(folder))


def _has_tokenizer(folder: Folder) -> bool:
    return any(file.startswith(TOKENIZER_FILES) for file in folder.files())


class _HuggingFaceCheckpoint(_FolderCheckpoint):
    def _read_config(self) -> ModelConfig:
        return model_config(self._folder.json("config.json"))

    def _load(self, mesh: Mesh | None, dtype: str | None, mtp: bool) -> Loaded:
        return load_hf(self._folder, mesh, dtype, mtp=mtp)


class _NativeCheckpoint(_FolderCheckpoint):
    """The steps of a CheckpointStore. The tokenizer is beside them, or is that of their run's base or data."""

    def _read_config(self) -> ModelConfig:
        with CheckpointStore(self.address.path) as store:
            return read_model_config(store)

    @functools.cached_property
    def _tokenizer_folder(self) -> ReadOnceFolder | None:
        if _has_tokenizer(self._folder):
            return self._folder
        run = self.address.path.rstrip("/").rpartition("/checkpoints/")[0]
        return tokenizer_folder(run) if run else None

    def _text_files(self) -> ReadOnceFolder | None:
        return self._tokenizer_folder

    def _load(self, mesh: Mesh | None, dtype: str | None, mtp: bool) -> Loaded:
        config = self.config
        with CheckpointStore(self.address.path) as store:
            params, bias = restore_weights(store, ModelDef(config), mesh)
        if dtype is not None:
            config = dataclasses.replace(config, param_dtype=dtype, compute_dtype=dtype)
            params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
        return Loaded(ModelDef(config), params, bias)


class PublishedCheckpoint(_FolderCheckpoint):
    """A version of the weights in a folder that a trainer publishes to; what describes them is beside the versions.

    Attributes:
      version: which one `load` reads; None is the newest, whose number stands here afterwards.
      is_followed: `load` keeps what it read with, for `take_receiver`: its arrays are a second copy, on the host.
    """

    def __init__(self, address: Address, folder: ReadOnceFolder) -> None:
        super().__init__(address, folder)
        self.version: int | None = None
        self.is_followed, self._receiver = False, None

    def take_receiver(self) -> WeightReceiver | None:
        """Returns what has read the loaded parts, of this process, and forgets it; None if nothing was kept."""
        receiver, self._receiver = self._receiver, None
        return receiver

    def _read_config(self) -> ModelConfig:
        if NETWORK not in self._folder.files():
            raise UserError(
                f"{self.address.path} has no {NETWORK}, which a trainer with rl.publish writes beside its versions; "
                f"serve the run or base of the trainer with --follow={self.address.path}."
            )
        return network_of_notes(self._folder.json(NETWORK), self.address.path)

    def _load(self, mesh: Mesh | None, dtype: str | None, mtp: bool) -> Loaded:
        config = self.config
        if dtype is not None:
            config = dataclasses.replace(config, param_dtype=dtype, compute_dtype=dtype)
        definition = ModelDef(config)
        shapes = definition.shapes() if mesh is None else definition.abstract_weights(mesh)
        like: dict[str, Any] = dict(zip(("params", "router_bias"), shapes, strict=True))
        receiver = WeightReceiver(self.address.path, parts_here(like))
        self.version = receiver.receive(self.version)
        tree = placed_tree(receiver.parts, like)
        self._receiver = receiver if self.is_followed else None
        return Loaded(definition, tree["params"], tree["router_bias"])


class _GGUFCheckpoint(Checkpoint):
    def __init__(self, address: Address) -> None:
        super().__init__(address)
        self._file = open_gguf(address.path)

    def tokenizer_files(self) -> dict[str, bytes] | None:
        if not self._file.has_tokenizer:
            return None
        return {name: (self._file.text(name) or "").encode() for name in ("config.json", *self._file.texts)}

    def _read_config(self) -> ModelConfig:
        return model_config(self._file.config)

    def _text_files(self) -> TextFiles | None:
        return self._file if self._file.has_tokenizer else None

    def _load(self, mesh: Mesh | None, dtype: str | None, mtp: bool) -> Loaded:
        dtype = dtype or self._file.config["torch_dtype"]
        config = dataclasses.replace(self.config, param_dtype=dtype, compute_dtype=dtype)
        return load_tensors(self._file.tensors, ModelDef(config), mesh, self._file.path)
