"""Runs all stages: pretraining, SFT, evaluation, RL, evaluation, report. The same command continues a stopped run."""

from launch import flags, hosts


def main(config, workdir):
    from composer_jax.stages.pipeline import pipeline
    from composer_jax.stages.run import Run

    with Run(config, workdir) as run:
        pipeline(run)


if __name__ == "__main__":
    flags.run(main, processes=hosts.SINGLE_PROCESS)
