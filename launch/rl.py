"""Runs reinforcement learning (GRPO) with tools and self-summarization. Needs launch.sft in the same workdir."""

from launch import flags, hosts


def main(config, workdir):
    from composer_jax.stages.reinforce import reinforce
    from composer_jax.stages.run import Run

    with Run(config, workdir) as run:
        reinforce(run)


if __name__ == "__main__":
    flags.run(main, processes=hosts.SINGLE_PROCESS)
