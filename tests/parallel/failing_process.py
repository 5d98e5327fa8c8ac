"""One of two processes: joins the other, prints the results of collectives, and fails if FAILING is its index.

python -m tests.parallel.failing_process ADDRESS PROCESS FAILING
"""

import json
import sys

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from composer_jax.parallel import failure, processes


def main(address: str, process: int, failing: str) -> None:
    jax.config.update("jax_num_cpu_devices", 1)
    failure.GRACE_S = 0.5
    processes.join_processes(address, 2, process)
    finish = failure.watch_for_failures("prog")
    rows = NamedSharding(Mesh(np.array(jax.devices()), ("rows",)), PartitionSpec("rows"))
    array = processes.device_put_global({"a": np.arange(6).reshape(2, 3)}, rows)["a"]
    results = {
        "who": [processes.process_index(), processes.process_count(), processes.is_first_process()],
        "broadcast": [
            processes.broadcast_from_process0(lambda: {"by": process}),
            processes.broadcast_from_process0(lambda: [1]),
        ],
        "any": [processes.any_process(False), processes.any_process(process == 1)],
        "min": processes.min_of_mesh(rows.mesh, 3.5 - process),
        "here": [shard.data.tolist() for shard in array.addressable_shards],
        "gathered": processes.gather_to_host(array).tolist(),
    }
    print(json.dumps(results), flush=True)
    if failing == str(process):
        failure.abort_all_processes("mine", "no more", 7)
    if failing != "nobody":
        processes.any_process(True)  # waits for a partner that never calls it
    finish()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
