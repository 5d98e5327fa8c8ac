"""Simulates asynchronous RL with thousands of chips and sandboxes, to see what limits it and what to buy next.

    python -m launch.simulate --config=kimi_k2_5:32k --topology=v5p:8x8x16 --chips=4096 --splits=1:7,1:3,1:1 \\
        --sandboxes=1000,10000,100000 --config.rl.groups.repository=512 --config.rl.max_staleness=4

The run's own rules say which groups play and when a step trains (rl.groups, rl.group_size, rl.max_staleness,
rl.late_groups); learner, rollout engines, sandboxes and the network are simulated. Seconds of training, decoding and
prefill are those that launch.compile predicts for --topology, per chip; libtpu is needed (pip install -e ".[tpu]"), no
TPU. Everything else is a flag below, with the source of its default. docs/scale.md explains the table and its limits.

A Markdown table and the advice go to stderr, and one JSON object is the last line of stdout.
"""

import functools
import sys

from absl import flags as absl_flags

from launch import flags, hosts
from launch.json_result import print_json


def define(values):
    from composer_jax.scale.simulation.assumptions import Assumptions
    from launch.dataclass_flags import define_fields

    string = functools.partial(absl_flags.DEFINE_string, flag_values=values)
    number = functools.partial(absl_flags.DEFINE_float, flag_values=values)
    integer = functools.partial(absl_flags.DEFINE_integer, flag_values=values)
    several = functools.partial(absl_flags.DEFINE_list, flag_values=values)
    string("topology", None, "The slice for which speeds are predicted: a chip and the chips in each dimension.")
    integer("chips", 0, "Chips in all, for learning and for rollout; 0 takes those of --topology.")
    several("splits", ["1:7", "1:3", "1:1", "3:1"], "Splits of the chips, learning : rollout, separated by commas.")
    several("sandboxes", ["1000", "10000", "50000", "200000"], "Numbers of sandboxes, separated by commas.")
    number("hours", 24.0, "Simulated hours that are measured.")
    number("warm_up_hours", 4.0, "Simulated hours before those that are measured.")
    integer("seed", 0, "Seed of the episodes that are drawn.")
    integer("parts", 4, "Alternations of sandbox and engine in an attempt; fewer take less time, more are more exact.")
    string("out", None, "A .json file that the result is also written to.")
    define_fields(values, Assumptions)
    return ("config", "topology")


def main(values):
    from composer_jax.scale.simulation.assumptions import Assumptions
    from composer_jax.scale.simulation.study import simulate_table
    from composer_jax.scale.simulation.table import format_study
    from launch.dataclass_flags import read_fields

    result = simulate_table(
        values.config,
        values.topology,
        read_fields(values, Assumptions),
        chips=values.chips,
        splits=values.splits,
        sandboxes=values.sandboxes,
        hours=values.hours,
        warm_up_hours=values.warm_up_hours,
        seed=values.seed,
        parts=values.parts,
    )
    print(format_study(result), file=sys.stderr, flush=True)
    print_json(result, values.out)


if __name__ == "__main__":
    from composer_jax.scale.topology import disable_tpu_hardware

    disable_tpu_hardware()
    flags.run(main, define=define, processes=hosts.NO_DEVICES)
