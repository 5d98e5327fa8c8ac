"""Writes a file of conversations for SFT: from experts, from the recorded episodes of a run, or by sampling.

    python -m launch.traces --config=tiny:smoke --workdir=runs/tiny --out=traces.jsonl
    python -m launch.traces --workdir=runs/tiny --episodes=rl,after --min_reward=1 --out=traces.jsonl
    python -m launch.traces --workdir=runs/mine --policy=runs/mine --tasks=bugs:200 --attempts=8 --min_reward=1 \\
        --out=sampled.jsonl

Each line is a conversation in OpenAI's form, which config.sft.data reads back:

    python -m launch.sft --config.base=hf:DIR --config.sft.data=traces.jsonl ...

Without --episodes the experts of config.sft.sources are played in sandboxes. Read back with the same tokenizer, their
conversations have the same token ids and the same mask. Recorded episodes (DIR/episodes/NAME.jsonl) are text, which is
encoded anew; those with a malformed call are left out and counted. With --policy, weights of the run's network attempt
tasks, each --attempts times, and their episodes are written with the ids that were sampled: SFT on those with
--min_reward=1 is rejection-sampling fine-tuning.
"""

from absl import flags as absl_flags

from composer_jax.errors import UserError
from launch import flags, hosts


def define(values):
    string = lambda name, meaning: absl_flags.DEFINE_string(name, None, meaning, flag_values=values)  # noqa: E731
    string("workdir", "The run folder: its recorded episodes, or the place of the tokenizer that the experts use.")
    string("out", "The file to write, a path or URL that ends in .jsonl.")
    absl_flags.DEFINE_list(
        "episodes", [], "Names of recorded episodes in DIR/episodes, such as before,after,rl.", flag_values=values
    )
    string(
        "policy", "Address of the weights to sample with: hf:DIR, gguf:FILE, a run folder, or RUN/checkpoints/STAGE."
    )
    absl_flags.DEFINE_list(
        "tasks", [], "With --policy: paths of tasks, or FAMILY:COUNT for generated ones.", flag_values=values
    )
    absl_flags.DEFINE_integer("attempts", 1, "With --policy: episodes of each task.", flag_values=values)
    absl_flags.DEFINE_float("min_reward", None, "Leaves out episodes with less reward.", flag_values=values)
    return ("config", "workdir", "out")


def main(values):
    if values.policy and (values.episodes or not values.tasks):
        raise UserError("--policy samples episodes of --tasks, so it needs --tasks and goes without --episodes")
    if values.tasks and not values.policy:
        raise UserError("--tasks are attempted by a policy; name its weights, e.g. --policy=hf:DIR")
    from composer_jax.stages.run import Run
    from composer_jax.stages.write_traces import write_expert_traces, write_recorded_traces, write_sampled_traces

    out, least = values.out, values.min_reward
    with Run(values.config, values.workdir) as run:
        if values.policy:
            written = write_sampled_traces(run, values.policy, values.tasks, values.attempts, out, least)
        elif values.episodes:
            written = write_recorded_traces(run, values.episodes, out, least)
        else:
            written = write_expert_traces(run, out, least)
    print(
        f"wrote {written.conversations} conversations of {written.episodes} episodes to {out}; left out "
        f"{written.below_min_reward} below the least reward and {written.malformed} with a malformed call"
    )


if __name__ == "__main__":
    flags.run(main, define=define, processes=hosts.SINGLE_PROCESS)
