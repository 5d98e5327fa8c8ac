"""Converts weights between a checkpoint of ours and the folder of a Hugging Face model.

    python -m launch.convert --source=hf:DIR --target=DIR       from Hugging Face to ours
    python -m launch.convert --source=DIR --target=hf:DIR       the other way
    python -m launch.convert --source=hf:DIR --target=hf:DIR --dtype=bfloat16    undoes quantisation

A folder of ours is what holds the steps, such as runs/mine/checkpoints/sft. Folders may be URLs (gs://...). The prefix
may be left out: the source shows what it is, and the target is then of the other kind. Runs on the host and needs
memory for all weights. Networks with parts of our own (the embedding taps of configs/tiny.py) have no place in a folder
of Hugging Face's form and are refused.
"""

import os

from absl import flags as absl_flags

from launch import flags, hosts


def define(values):
    for name, meaning in (
        ("source", "Weights that are there."),
        ("target", "A folder that does not exist yet, or is empty."),
    ):
        absl_flags.DEFINE_string(name, None, meaning, flag_values=values)
    absl_flags.DEFINE_string(
        "dtype", None, "float32, bfloat16 or float16; left out, that of the source.", flag_values=values
    )
    absl_flags.DEFINE_bool(
        "mtp", True, "Keep the multi-token-prediction modules of a Hugging Face folder.", flag_values=values
    )
    return ("source", "target")


def main(values):
    os.environ["JAX_PLATFORMS"] = "cpu"  # host memory is what holds a whole network, and a conversion computes nothing
    from composer_jax.checkpoint.address import convert

    print(f"wrote {convert(values.source, values.target, values.dtype, mtp=values.mtp)}")


if __name__ == "__main__":
    flags.run(main, define=define, processes=hosts.NO_DEVICES)
