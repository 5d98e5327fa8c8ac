"""Runs supervised fine-tuning on the conversations of the config. Needs launch.pretrain in the same workdir."""

from launch import flags


def main(config, workdir):
    from composer_jax.stages.run import Run
    from composer_jax.stages.sft import sft

    with Run(config, workdir) as run:
        sft(run)


if __name__ == "__main__":
    flags.run(main)
