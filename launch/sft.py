"""Runs supervised fine-tuning on the conversations of the config.

It starts from the weights of the stage before it in config.stages, which must be done in the same workdir, or from
config.base where there is none.
"""

from launch import flags


def main(config, workdir):
    from composer_jax.stages.run import Run
    from composer_jax.stages.sft import sft

    with Run(config, workdir) as run:
        sft(run)


if __name__ == "__main__":
    flags.run(main)
