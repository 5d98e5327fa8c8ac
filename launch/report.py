"""Writes results.json, plots and report.html from the stages of a workdir that are done."""

from launch import flags, hosts


def main(config, workdir):
    from composer_jax.stages.report import report
    from composer_jax.stages.run import Run

    with Run(config, workdir) as run:
        print(report(run))


if __name__ == "__main__":
    flags.run(main, processes=hosts.NO_DEVICES)
