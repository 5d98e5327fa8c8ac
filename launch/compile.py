"""Compiles the programs of a stage for a slice of TPUs without the hardware, and predicts the time of a step.

    python -m launch.compile --config=kimi_k2_5:32k --topology=v5p:8x8x16 --stage=pretrain --out=plan.json

The programs are those that the stage runs: the training step of pretrain, its phases and sft; the training step,
decoding and prefill of rl; decoding and prefill of evaluate. XLA's compiler for TPUs compiles them; it comes with the
extra `tpu` (pip install -e ".[tpu]"). The last line printed is JSON: whether they fit into a device's memory and what
occupies it, the predicted seconds of a step and model FLOP utilisation, what the compiled schedule hides of the
communication, and the bytes sent over each mesh axis; docs/scale.md explains them. Progress and tables go to stderr.
--config.FIELD=VALUE changes fields of the config.
"""

import functools
import sys

from absl import flags as absl_flags

from launch import flags, hosts
from launch.json_result import print_json


def define(values):
    string = functools.partial(absl_flags.DEFINE_string, default=None, flag_values=values)
    string(
        "topology", help="The slice: a chip (v5e, v5p, v6e, tpu7x) and the chips in each dimension, such as v5p:8x8x16."
    )
    string("stage", help="pretrain, sft, rl, evaluate, or a phase of the config.")
    string("out", help="A .json file that the result is also written to.")
    absl_flags.DEFINE_list(
        "compiler_options",
        [],
        "Options of XLA's compiler, such as xla_tpu_enable_sparse_core_collective_offload_all_gather=true, with commas "
        "between them. A run has them as --NAME=VALUE in the environment variable LIBTPU_INIT_ARGS.",
        flag_values=values,
    )
    return ("config", "topology", "stage")


def parse_options(words: list[str]) -> dict[str, str]:
    """Returns the options of --compiler_options by name.

    Raises UserError for a word without a name or a value.
    """
    from composer_jax.errors import UserError

    for word in words:
        name, _, value = word.partition("=")
        if not name or not value:
            raise UserError(f"--compiler_options: {word!r} is not an option; write NAME=VALUE, such as xla_name=true.")
    return dict(word.split("=", 1) for word in words)


def main(values):
    from composer_jax.scale.plan import plan_stage
    from composer_jax.scale.table import format_table

    def log(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    options = parse_options(values.compiler_options)
    result = plan_stage(values.config, values.topology, values.stage, log, options)
    log(format_table(result))
    print_json(result, values.out)


if __name__ == "__main__":
    from composer_jax.scale.topology import disable_tpu_hardware

    disable_tpu_hardware()
    flags.run(main, define=define, processes=hosts.NO_DEVICES)
