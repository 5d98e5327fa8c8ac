"""One of two processes, with a device each, that train on prepared shards together (test_fit_processes.py).

python -m tests.train.prepared_process ADDRESS PROCESS FOLDER STEPS AXIS
"""

import sys
from pathlib import Path

import jax


def main(address: str, process: int, folder: Path, steps: int, axis: str) -> None:
    jax.config.update("jax_num_cpu_devices", 1)
    from composer_jax.parallel.failure import watch_for_failures
    from composer_jax.parallel.mesh import make_mesh
    from composer_jax.parallel.processes import join_processes
    from tests.train.test_fit_processes import train

    join_processes(address, 2, process)
    finish = watch_for_failures("prepared_process")
    train(folder, steps, make_mesh(**{axis: 2}))
    finish()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
