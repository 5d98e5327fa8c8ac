"""Searches the layout of a training step on a slice of TPUs: mesh, chunks, and what is kept for the backward pass.

    python -m launch.search_layout --config=kimi_k2_5:32k --topology=v5p:8x8x16 --record=k2.jsonl

Estimates every layout that the network and the batch allow, traces the --traces best, and compiles the best of these
until one fits into a device's memory, --compiles at most. It ranks by predicted seconds per token under the assumption
--overlap (docs/scale.md); libtpu is needed (pip install -e ".[tpu]"), no TPU. --record continues a search that was
stopped. A table of the best and the flags that select the best one go to stderr; the last line of stdout is one JSON
object.
"""

import functools
import sys
from pathlib import Path

from absl import flags as absl_flags

from launch import flags, hosts
from launch.json_result import print_json


def define(values):
    string = functools.partial(absl_flags.DEFINE_string, flag_values=values)
    integer = functools.partial(absl_flags.DEFINE_integer, lower_bound=0, flag_values=values)
    several = functools.partial(absl_flags.DEFINE_list, flag_values=values)
    string("topology", None, help="The slice: a chip and the chips in each dimension, such as v5p:8x8x16.")
    string("stage", "pretrain", help="pretrain or sft.")
    integer("traces", 12, "Layouts that are traced; each takes a minute or so for a large network.")
    integer("compiles", 2, "Layouts that are compiled at most, until one fits; 0 trusts the estimate of memory.")
    integer("rows", 10, "Rows of the table.")
    several("batch_sizes", [], "Rows of a step to try beside the config's own.")
    several(
        "dispatch",
        ["ring"],
        "Kinds of expert dispatch to try beside the config's own. Others than ring and dense may drop tokens.",
    )
    string(
        "overlap",
        "weight_gathers_overlap",
        help="What overlaps with computation: no_overlap, weight_gathers_overlap (as launch.compile predicts) or "
        "full_overlap.",
    )
    string("record", None, help="A .jsonl file of what was traced and compiled, from which a search continues.")
    string("out", None, help="A .json file that the result is also written to.")
    return ("config", "topology")


def main(values):
    from composer_jax.errors import UserError
    from composer_jax.scale.search import search_layouts
    from composer_jax.scale.table import format_search

    def log(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    try:
        batch_sizes = [int(size) for size in values.batch_sizes]
    except ValueError as error:
        raise UserError(
            f"--batch_sizes={','.join(values.batch_sizes)} are not whole numbers; use some such as 512,1024."
        ) from error
    result = search_layouts(
        values.config.to_dict(),
        values.topology,
        values.stage,
        traces=values.traces,
        compiles=values.compiles,
        batch_sizes=batch_sizes,
        dispatches=values.dispatch,
        overlap=values.overlap,
        record=Path(values.record) if values.record else None,
        log=log,
    )
    log(format_search(result, values.rows))
    print_json(result, values.out)


if __name__ == "__main__":
    from composer_jax.scale.topology import disable_tpu_hardware

    disable_tpu_hardware()
    flags.run(main, define=define, processes=hosts.NO_DEVICES)
