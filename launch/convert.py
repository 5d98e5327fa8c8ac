"""Converts weights between a native checkpoint and the folder of a Hugging Face model, and reads GGUF files.

    python -m launch.convert --source=hf:DIR --target=DIR       from Hugging Face to native
    python -m launch.convert --source=DIR --target=hf:DIR       from native to Hugging Face
    python -m launch.convert --source=hf:DIR --target=hf:DIR --dtype=bfloat16    removes quantisation
    python -m launch.convert --source=gguf:FILE --target=hf:DIR  from GGUF, dequantised to float32, to Hugging Face

A native folder holds the steps of a checkpoint, such as runs/mine/checkpoints/sft. Folders may be URLs (gs://...); a
GGUF file is local and needs `pip install "composer_jax[gguf]"`. The prefix of the source is optional, and a target
without prefix has the other format: native, or Hugging Face's if the source is native. Tokenizer, chat template and
generation_config.json are copied, those of a GGUF file rebuilt from its metadata. Runs on the CPU and
needs host memory for all weights. Networks with our own extensions (the embedding taps of configs/tiny.py) cannot be
stored in the Hugging Face format and are refused.
"""

import os

from absl import flags as absl_flags

from launch import flags, hosts


def define(values):
    for name, meaning in (
        ("source", "Folder of existing weights, or a GGUF file."),
        ("target", "Folder that does not exist or is empty."),
    ):
        absl_flags.DEFINE_string(name, None, meaning, flag_values=values)
    absl_flags.DEFINE_string(
        "dtype", None, "float32, bfloat16 or float16; the default is that of the source.", flag_values=values
    )
    absl_flags.DEFINE_bool("mtp", True, "Keep the multi-token-prediction modules.", flag_values=values)
    return ("source", "target")


def main(values):
    os.environ["JAX_PLATFORMS"] = "cpu"  # only host memory holds a whole network, and a conversion computes nothing
    from composer_jax.checkpoint.convert import convert

    print(f"wrote {convert(values.source, values.target, values.dtype, mtp=values.mtp)}")


if __name__ == "__main__":
    flags.run(main, define=define, processes=hosts.NO_DEVICES)
