"""Evaluates the policies of a workdir on the suites of the config: the SFT policy, and the RL policy if RL is done."""

from launch import flags, hosts


def main(config, workdir):
    from composer_jax.stages.evaluate import POLICIES, evaluate
    from composer_jax.stages.run import Run

    with Run(config, workdir) as run:
        run.workdir.stage_result("sft")
        for which, stage in POLICIES.items():
            if run.workdir.stage_done(stage):
                evaluate(run, which)


if __name__ == "__main__":
    flags.run(main, processes=hosts.SINGLE_PROCESS)
