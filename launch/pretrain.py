"""Runs continued pretraining on the sources of the config: the stage pretrain and the phases that config.stages names.

It comes first in a run and also trains the tokenizer.
"""

from launch import flags


def main(config, workdir):
    from composer_jax.stages.pretrain import pretrain
    from composer_jax.stages.run import Run

    with Run(config, workdir) as run:
        pretrain(run)


if __name__ == "__main__":
    flags.run(main)
