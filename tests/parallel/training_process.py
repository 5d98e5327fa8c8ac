"""One of two processes of four devices each: takes a training step, whose results process 0 writes to a file.

python -m tests.parallel.training_process ADDRESS PROCESS OUT
"""

import sys

import jax
import numpy as np


def main(address: str, process: int, out: str) -> None:
    jax.config.update("jax_num_cpu_devices", 4)
    from composer_jax.parallel.processes import join_processes

    join_processes(address, 2, process)
    from jax.experimental.multihost_utils import process_allgather

    from tests.parallel.test_processes import step

    metrics, *trees = step()
    results = jax.tree.leaves((metrics, *process_allgather(trees, tiled=True)))
    if process == 0:
        np.savez(out, *map(np.asarray, results))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
