"""Plays, scores or trains on the recorded episodes of an RL run, each without the other two.

    python -m launch.replay train --config=CONFIG --config.base=RUN/checkpoints/sft --config.stages="('rl',)" \\
        --config.rl.algorithm.options.leave_one_out=True --records=RUN --workdir=DIR
    python -m launch.replay score --workdir=RUN
    python -m launch.replay rollout --workdir=RUN --policy=RUN/checkpoints/sft --out=DIR

train takes the steps that RUN has recorded, without a rollout, in a run of its own: other algorithms, losses, rewards
and optimizers on the same episodes. RUN needs --config.rl.keep_groups=True. score prints how far the log-probabilities
of the stored episodes under --policy are from those they were sampled with, and their rewards under the prices of this
config. rollout plays the recorded tasks again with the weights of --policy, with the same seeds, and records the
episodes in --out, which train and score read as --records. score and rollout end with a line of JSON on stdout, whose
fields composer_jax/stages/replay_score.py and replay_rollout.py explain.
"""

from pathlib import Path

from absl import flags as absl_flags

from composer_jax.errors import UserError
from launch import flags, hosts
from launch.json_result import print_json

COMMANDS = ("rollout", "score", "train")


def define(values):
    string = lambda name, meaning: absl_flags.DEFINE_string(name, None, meaning, flag_values=values)  # noqa: E731
    string("workdir", "The run folder; for train a new one.")
    string("records", "The folder or URL of the recorded run, or the --out of a rollout; default: --workdir.")
    string(
        "policy",
        "score, rollout: address of the weights: hf:DIR, gguf:FILE, a run folder, or RUN/checkpoints/STAGE; default: "
        "--workdir.",
    )
    string("out", "rollout: the folder of the new records.")
    return ("config", "workdir")


def main(values, words):
    if len(words) != 1 or words[0] not in COMMANDS:
        raise UserError(f"the command is {' '.join(words) or 'missing'}; use one of {', '.join(COMMANDS)}")
    (command,) = words
    if command == "train" and values.records is None:
        raise UserError("train needs --records, the folder of the run whose episodes it learns from")
    if command == "rollout" and values.out is None:
        raise UserError("rollout needs --out, the folder of the new records")
    for name, users in {"policy": ("rollout", "score"), "out": ("rollout",)}.items():
        if values[name].value is not None and command not in users:
            raise UserError(f"--{name} is not a flag of {command}; --help says what the commands take")
    from composer_jax.rl.records import RolloutRecords
    from composer_jax.stages.run import Run
    from composer_jax.storage.local_copy import local_copy

    with Run(values.config, values.workdir) as run:
        folder = local_copy(values.records) if values.records else run.path
        records = RolloutRecords(folder, run.model.tokenizer.fingerprint)
        policy = values.policy or values.workdir
        if command == "train":
            from composer_jax.stages.replay_train import train_on_records

            train_on_records(run, records)
        elif command == "score":
            from composer_jax.stages.replay_score import score_records

            print_json(score_records(run, records, policy), None)
        else:
            from composer_jax.stages.replay_rollout import play_records

            print_json(play_records(run, records, policy, Path(values.out)), None)


if __name__ == "__main__":
    flags.run(main, define=define, arguments="rollout|score|train", processes=hosts.SINGLE_PROCESS)
