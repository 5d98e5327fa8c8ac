"""GGUF files, presented as the folder of a Hugging Face model: config.json, the tokenizer's files and tensors.

container       metadata and tensors of a file, by the `gguf` library
architectures   metadata -> config.json; the tensor rope_freqs.weight -> Llama 3's rotary scaling
tokenizer       metadata -> tokenizer.json, tokenizer_config.json and generation_config.json
virtual_folder  tensors by their Hugging Face names; open_gguf: all of it as one object

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from composer_jax.checkpoint.gguf.virtual_folder import GGUFFolder, open_gguf

__all__ = ["GGUFFolder", "open_gguf"]
