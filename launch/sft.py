"""Runs supervised fine-tuning on the conversations of the config.

It starts from the weights of the stage before it in config.stages, which must be done in the same workdir, or from
config.base where there is none. --show_rows=N writes the first N training rows as a page instead, with what is trained
marked, and trains nothing.
"""

from absl import flags as absl_flags

from launch import flags


def options(values):
    absl_flags.DEFINE_integer(
        "show_rows",
        None,
        "Write so many training rows as a page of the workdir, and train nothing.",
        flag_values=values,
    )


def main(config, workdir, values):
    from composer_jax.stages.run import Run
    from composer_jax.stages.sft import sft, show_rows

    with Run(config, workdir) as run:
        if values.show_rows is None:
            sft(run)
        else:
            print(show_rows(run, values.show_rows))


if __name__ == "__main__":
    flags.run(main, options=options)
