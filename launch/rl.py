"""Runs reinforcement learning (GRPO) with tools and self-summarization.

It starts from the weights of the stage before it in config.stages, which must be done in the same workdir, or from
config.base where there is none. Episodes play in the processes of the run, or on workers of other machines
(docs/workers.md):

    python -m launch.rl --config=CONFIG --workdir=DIR --listen=10.0.0.5:7411 --token_file=token
    python -m launch.rl --config=CONFIG --workdir=DIR --cluster=auto

With --config.rl.engines=ray the nodes of the cluster also have the engines that sample (docs/fleet.md).
"""

import contextlib
import secrets
from pathlib import Path

from absl import flags as absl_flags

from composer_jax.errors import UserError
from launch import flags, hosts
from launch.host_port import parse_host_port


def define_options(values):
    def string(name, meaning):
        absl_flags.DEFINE_string(name, None, meaning, flag_values=values)

    string("listen", "HOST:PORT at which this process listens for workers (launch.worker), which play the episodes.")
    string("token_file", "File with the secret that workers and engines must know; it is made if it is missing.")
    string(
        "cluster",
        "Ray cluster whose nodes play the episodes, and with config.rl.engines=ray sample: auto, or HOST:PORT of its "
        "head node (extra `cluster`).",
    )
    absl_flags.DEFINE_integer(
        "local_episodes", None, "Episodes that this machine plays at once beside the workers.", flag_values=values
    )
    absl_flags.DEFINE_float(
        "worker_patience",
        None,
        "Seconds that episodes wait while there is no worker at all, before the run stops; the default is 300.",
        flag_values=values,
    )


def main(config, workdir, values):
    with contextlib.ExitStack() as stack:
        from composer_jax.parallel.processes import is_first_process

        # Before anything is compiled, so that a cluster that does not answer is noticed within seconds.
        # Only process 0 gives out episodes; the other processes play for it if it has no workers (play_share).
        options = worker_options(config, values, stack) if is_first_process() else None
        from composer_jax.stages.run import Run
        from composer_jax.stages.train_rl import train_rl

        run = stack.enter_context(Run(config, workdir))
        run.services.worker_options = options
        run.services.engine_token = engine_token(config, values) if is_first_process() else ""
        train_rl(run)


def engine_token(config, values):
    """The secret that the engines of config.rl.engines know, or "" where the run samples by itself."""
    if config.rl.engines == "local" or values.token_file is None:
        return ""
    from composer_jax.rl.workers.handshake import make_token

    return make_token(Path(values.token_file))


def worker_options(config, values, stack):
    """The RolloutWorkersOptions that the flags ask for, or None. A connection to a cluster ends with `stack`."""
    if values.listen is None and values.cluster is None:
        about_engines = ("token_file",) if config.rl.engines != "local" else ()
        for name in ("token_file", "local_episodes", "worker_patience"):
            if values[name].value is not None and name not in about_engines:
                raise UserError(f"--{name} is about workers; give --listen or --cluster, too.")
        return None
    from composer_jax.rl.workers.handshake import make_token
    from composer_jax.rl.workers.pool import PoolOptions
    from composer_jax.rl.workers.ray_cluster import RayCluster
    from composer_jax.stages.rollout_workers import RolloutWorkersOptions

    if values.listen is not None and values.token_file is None:
        raise UserError("--listen needs --token_file, the secret that keeps others out.")
    token = make_token(Path(values.token_file)) if values.token_file is not None else secrets.token_hex(32)
    cluster = stack.enter_context(RayCluster(values.cluster)) if values.cluster is not None else None
    host, port = parse_host_port(values.listen, "listen") if values.listen is not None else ("", 0)
    if cluster is not None and values.listen is None:
        host = cluster.host
    given = {"local_episodes": values.local_episodes, "patience_s": values.worker_patience}
    pool = PoolOptions(host, port, **{name: value for name, value in given.items() if value is not None})
    return RolloutWorkersOptions(pool, token, cluster)


if __name__ == "__main__":
    flags.run(main, options=define_options, processes=hosts.MULTI_PROCESS)
