"""A process of two that meets the other, says what it found, and fails if it is told to.

python -m tests.parallel.one_that_fails ADDRESS PROCESS FAILING
"""

import json
import sys

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from composer_jax.parallel import ending, processes


def main(address: str, process: int, failing: str) -> None:
    jax.config.update("jax_num_cpu_devices", 1)
    ending.GRACE_S = 0.5
    processes.join(address, 2, process)
    finish = ending.listen("prog")
    rows = NamedSharding(Mesh(np.array(jax.devices()), ("rows",)), PartitionSpec("rows"))
    array = processes.place({"a": np.arange(6).reshape(2, 3)}, rows)["a"]
    found = {
        "who": [processes.process_index(), processes.process_count(), processes.is_first()],
        "told": [processes.from_first(lambda: {"by": process}), processes.from_first(lambda: [1])],
        "any": [processes.in_any(False), processes.in_any(process == 1)],
        "here": [shard.data.tolist() for shard in array.addressable_shards],
        "fetched": processes.fetch(array).tolist(),
    }
    print(json.dumps(found), flush=True)
    if failing == str(process):
        ending.end_all("mine", "no more", 7)
    if failing != "nobody":
        processes.in_any(True)  # waits for a partner that does not come
    finish()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
