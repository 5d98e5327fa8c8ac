"""A GGUF file as the folder of a Hugging Face model."""

import json
from functools import cached_property
from pathlib import Path
from typing import Any

from composer_jax.checkpoint.gguf.architectures import config_json, find_architecture
from composer_jax.checkpoint.gguf.container import GGUFContainer
from composer_jax.checkpoint.gguf.tensors import GGUFTensors
from composer_jax.checkpoint.gguf.tokenizer import has_tokenizer, tokenizer_texts


class GGUFFolder:
    """What a Hugging Face folder of the same model would hold. Made by `open_gguf`.

    path, name: of the file. config: its config.json. tensors: `shapes`, `sizes` (bytes in the file) and `read(name)`
    -> float32, under Hugging Face names. has_tokenizer: whether the file holds a tokenizer. With `name` and `text` it
    is a source of texts for `data.load_chat_format`.
    """

    def __init__(self, file: GGUFContainer):
        self._file = file
        self.path = self.name = file.path
        self.config: dict[str, Any] = config_json(file)
        _, architecture = find_architecture(file)
        self.tensors = GGUFTensors(
            file,
            architecture,
            heads=self.config["num_attention_heads"],
            kv_heads=self.config["num_key_value_heads"],
        )
        self.has_tokenizer = has_tokenizer(file)

    @cached_property
    def texts(self) -> dict[str, str]:
        """The tokenizer's files, name -> content: tokenizer.json, tokenizer_config.json, generation_config.json.

        Raises:
          UserError: the file has no tokenizer, or one that is not read; the weights can still be loaded.
        """
        return tokenizer_texts(self._file)

    def text(self, file: str) -> str | None:
        """Returns the content of config.json or of a file of `texts`, or None; raises UserError as `texts`."""
        return json.dumps(self.config, indent=2) if file == "config.json" else self.texts.get(file)


def open_gguf(path: str | Path) -> GGUFFolder:
    """Opens a GGUF file as a virtual Hugging Face folder; reads its metadata, no tensor but the rotary factors.

    Raises:
      UserError: the library is missing; the file is missing, no GGUF, truncated, or holds something that is not read.
    """
    path = str(path)
    if "://" not in path:
        path = str(Path(path).expanduser().absolute())
    return GGUFFolder(GGUFContainer(path))
