"""Addresses of weights on a command line: DIR for a native checkpoint, hf:DIR for Hugging Face, gguf:FILE for GGUF,
patches:DIR for the newest version that a trainer has published (weight_chain.py).

DIR is a folder or a URL. The folder of a native checkpoint holds the steps, such as runs/demo/checkpoints/sft; the
folder of a run (runs/demo) stands for the weights of its last finished stage. The prefix hf: is optional for folders
that exist, and gguf: for files that end in .gguf.
"""

from typing import Literal, NamedTuple

from composer_jax.checkpoint.folder import Folder

STAGES = ("pretrain", "sft", "rl")
"""Stages of a run that leave weights, in their order. A config may have further phases between the first two."""
PREFIX, GGUF_PREFIX, PATCHES_PREFIX = "hf:", "gguf:", "patches:"
PREFIXES = {PREFIX: "hf", GGUF_PREFIX: "gguf", PATCHES_PREFIX: "patches"}


class Address(NamedTuple):
    path: str
    """Of a folder, or of a GGUF file."""
    format: Literal["native", "hf", "gguf", "patches"]

    def __str__(self) -> str:
        return next((prefix for prefix, name in PREFIXES.items() if name == self.format), "") + self.path


def parse(text: str, *, huggingface: bool = False) -> Address:
    """Parses an address; `huggingface` is the meaning of an address without a prefix."""
    prefix = next((prefix for prefix in PREFIXES if text.startswith(prefix)), "")
    folder = Folder(text.removeprefix(prefix))
    path = folder.root if folder.local else folder.name
    if prefix == GGUF_PREFIX or (not prefix and path.endswith(".gguf") and folder.fs.isfile(folder.root)):
        return Address(path, "gguf")
    if prefix == PATCHES_PREFIX:
        return Address(path, "patches")
    return Address(path, "hf" if prefix or huggingface else "native")
