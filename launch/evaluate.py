"""Evaluates the policies of a workdir on the suites of the config: the base, the policy before RL, and that after RL.

Policies that are not trained yet are left out: with --config.base=hf:DIR and a new workdir, the base is measured.
"""

from launch import flags, hosts


def main(config, workdir):
    from composer_jax.stages.evaluate import evaluate, evaluations, is_ready
    from composer_jax.stages.run import Run

    with Run(config, workdir) as run:
        ready = [which for which in evaluations(run) if is_ready(run, which)]
        for which in ready or ["before"]:  # whose weights are missing: a sentence says which stage to run
            evaluate(run, which)


if __name__ == "__main__":
    flags.run(main, processes=hosts.MULTI_PROCESS)
