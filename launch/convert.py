"""Converts weights between a native checkpoint and the folder of a Hugging Face model.

    python -m launch.convert --source=hf:DIR --target=DIR       from Hugging Face to native
    python -m launch.convert --source=DIR --target=hf:DIR       from native to Hugging Face
    python -m launch.convert --source=hf:DIR --target=hf:DIR --dtype=bfloat16    removes quantisation

A native folder holds the steps of a checkpoint, such as runs/mine/checkpoints/sft. Folders may be URLs (gs://...). The
prefix is optional: the source's format is detected, and the target then has the other format. Runs on the CPU and
needs host memory for all weights. Networks with our own extensions (the embedding taps of configs/tiny.py) cannot be
stored in the Hugging Face format and are refused.
"""

import os

from absl import flags as absl_flags

from launch import flags, hosts


def define(values):
    for name, meaning in (
        ("source", "Folder of existing weights."),
        ("target", "Folder that does not exist or is empty."),
    ):
        absl_flags.DEFINE_string(name, None, meaning, flag_values=values)
    absl_flags.DEFINE_string(
        "dtype", None, "float32, bfloat16 or float16; the default is that of the source.", flag_values=values
    )
    absl_flags.DEFINE_bool(
        "mtp", True, "Keep the multi-token-prediction modules of a Hugging Face folder.", flag_values=values
    )
    return ("source", "target")


def main(values):
    os.environ["JAX_PLATFORMS"] = "cpu"  # only host memory holds a whole network, and a conversion computes nothing
    from composer_jax.checkpoint.address import convert

    print(f"wrote {convert(values.source, values.target, values.dtype, mtp=values.mtp)}")


if __name__ == "__main__":
    flags.run(main, define=define, processes=hosts.NO_DEVICES)
