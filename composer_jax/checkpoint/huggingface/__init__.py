"""Hugging Face checkpoints: read directly into sharded arrays (`load_hf`), written from them (`save_hf`).

families           the architectures of transformers that the Decoder implements
config_json        config.json <-> ModelConfig
tensor_layout      name and layout of every tensor, and the leaves of our Params that it holds
folder             files in a folder, local or at a URL
safetensors_files  folders of safetensors files
quantized          DeepSeek's fp8, Kimi K2.5's int4 and gpt-oss's mxfp4, read as floats
weights            the tensors that there must be, and the leaves that they hold
load, save         folders <-> Params
"""

from composer_jax.checkpoint.huggingface.config_json import hf_config, model_config
from composer_jax.checkpoint.huggingface.load import Loaded, load_hf
from composer_jax.checkpoint.huggingface.save import save_hf

__all__ = ["Loaded", "hf_config", "load_hf", "model_config", "save_hf"]
