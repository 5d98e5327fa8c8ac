"""Plays episodes for a trainer on another machine: python -m launch.worker --connect=10.0.0.5:7411 --token_file=token

The trainer is launch.rl --listen=10.0.0.5:7411 --token_file=token; the worker needs a copy of that file, the same
version of this package, and no accelerator. It waits for the trainer, connects again after a loss, and ends with the
run (docs/workers.md).
"""

import asyncio
from pathlib import Path

from absl import flags as absl_flags
from absl import logging

from launch import flags, hosts
from launch.host_port import parse_host_port


def define(values):
    absl_flags.DEFINE_string("connect", None, "HOST:PORT at which the trainer listens.", flag_values=values)
    absl_flags.DEFINE_string("token_file", None, "A copy of the trainer's file with the secret.", flag_values=values)
    absl_flags.DEFINE_integer(
        "episodes", 0, "Episodes that play at once; 0 takes four per CPU core.", lower_bound=0, flag_values=values
    )
    absl_flags.DEFINE_float(
        "patience", 3600.0, "Seconds without a trainer after which the worker ends.", lower_bound=0, flag_values=values
    )
    return ("connect", "token_file")


def main(values):
    from composer_jax.rl.workers.handshake import read_token
    from composer_jax.rl.workers.worker import WorkerOptions, run_worker

    host, port = parse_host_port(values.connect, "connect")
    token = read_token(Path(values.token_file))
    logging.set_verbosity(logging.INFO)  # says when it has found its trainer
    asyncio.run(run_worker(WorkerOptions(host, port, token, values.episodes, values.patience)))


if __name__ == "__main__":
    flags.run(main, define=define, processes=hosts.NO_DEVICES)
