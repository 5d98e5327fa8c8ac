"""State tracking: how well a model rebuilds a file from its first version and its diffs.

    python -m launch.state_tracking --checkpoint=hf:DIR --repository=REPOSITORY --diffs=5 --tasks=50 --out=results.jsonl

Each task is a file of a git repository. The prompt has its version before the newest --diffs changes, and those changes
as unified diffs; the model continues it, greedily, with the last version. No chat format is used, so that base models
and trained ones get the same prompt. Needs `pip install "composer_jax[evals]"`.

The last line printed is JSON. The mean edit distance to the true file, in characters and normalised by the longer text
(from 0, equal, to 1), stands beside that of a control that copies the first version. Files that are too long for the
context, or unreadable in some version, are skipped and counted. --out has a line per task with what was written.
"""

from absl import flags as absl_flags

from launch import flags

AXES = ("data", "expert", "tensor")


def define(values):
    string = lambda name, meaning: absl_flags.DEFINE_string(name, None, meaning, flag_values=values)  # noqa: E731
    integer = lambda name, default, meaning: absl_flags.DEFINE_integer(  # noqa: E731
        name, default, meaning, lower_bound=1, flag_values=values
    )
    string("checkpoint", "Weights: hf:DIR, gguf:FILE, a run folder, or a folder of our checkpoints.")
    string("repository", "A git repository: the folder that holds .git, or a bare one.")
    string("out", "A file of JSON lines to write, one per task.")
    integer("diffs", 5, "Changes of each file.")
    integer("tasks", 50, "Most files.")
    integer("max_context", None, "Most tokens of a prompt with its answer; the default is the model's, at most 32768.")
    integer("slots", 8, "Files that are written at once; each takes the memory of the longest context.")
    string("dtype", "float32, bfloat16 or float16; the default is that of the weights.")
    for axis in AXES:
        integer(axis, 1, f"Devices along mesh axis {axis}.")
    return ("checkpoint", "repository")


def main(values):
    from composer_jax.stages.state_tracking import track_state

    track_state(
        values.checkpoint,
        values.repository,
        diffs=values.diffs,
        tasks=values.tasks,
        max_context=values.max_context,
        slots=values.slots,
        dtype=values.dtype,
        axes={axis: values[axis].value for axis in AXES if values[axis].value != 1},
        out=values.out,
    )


if __name__ == "__main__":
    flags.run(main, define=define)
