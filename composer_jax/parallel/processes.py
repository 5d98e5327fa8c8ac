"""Multi-controller JAX: every host of a pod runs the same program, and each process drives its own devices.

Process 0 makes decisions and writes the files of which there is one copy (`broadcast_from_process0`). The other
processes wait at the coordinator instead of inside a device program, because only there can Ctrl-C interrupt them.
`broadcast_from_process0`, `any_process` and `gather_to_host` synchronise: every process calls them in the same order,
from its main thread. So does `min_of_mesh` with the processes of a mesh.
"""

import itertools
import json
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.distributed import global_state  # jax.process_count() would initialise the devices
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from composer_jax.errors import UserError
from composer_jax.host_port import split_host_port
from composer_jax.observe.progress import hide_progress

T = TypeVar("T")

POLL_MS = 2_000
"""Milliseconds of one blocking call to the coordinator; Ctrl-C takes effect between two of them."""
JOIN_TIMEOUT_S = 300
"""Seconds that a process waits for all others to start."""
BARRIER_TIMEOUT_S = 3600
"""Seconds that a process waits at a barrier for the slowest one, which may write many gigabytes before."""
EXIT_NOT_JOINED = 2
"""Exit code of a process whose partners did not start; the same as for other invalid input."""

_broadcasts = itertools.count()


def join_processes(coordinator: str | None = None, processes: int | None = None, process: int | None = None) -> None:
    """Initialises jax.distributed, after which the processes see each other's devices.

    Must be called before the first array exists. Only process 0 shows progress. CPU devices communicate through gloo.

    Args:
      coordinator: HOST:PORT at which process 0 listens. None, for all three arguments, reads them from the cluster
        environment (parallel/cluster_env.py).
      processes: the number of processes.
      process: the index of this process, from 0.

    Raises:
      UserError: the arguments are inconsistent, there is no cluster environment, or the port is taken. If the other
        processes do not start within JOIN_TIMEOUT_S, this process exits with a message, because JAX waits in C++ and
        would abort it.
    """
    if coordinator is not None:
        host, _ = split_host_port(coordinator) or ("", 0)
        if not host:
            raise UserError(f"coordinator={coordinator!r} is not HOST:PORT.")
        if processes is None or processes < 1:
            raise UserError(f"processes={processes} is not a number of processes.")
        if process is None or not 0 <= process < processes:
            raise UserError(f"process={process} is not one of 0 .. {processes - 1}.")
    elif (processes, process) != (None, None):
        raise UserError(f"processes={processes} and process={process} need a coordinator, HOST:PORT.")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # With all arguments given, detection is off: it raises on a Kubernetes pod without access to the Kubernetes API.
    detection = None if coordinator is None else "deactivate"
    timeout = threading.Timer(JOIN_TIMEOUT_S, _exit_not_joined)
    timeout.daemon = True
    timeout.start()
    try:
        jax.distributed.initialize(
            coordinator,
            processes,
            process,
            cluster_detection_method=detection,
            initialization_timeout=JOIN_TIMEOUT_S + 60,
        )
    except (ValueError, RuntimeError) as error:
        raise UserError(f"cannot join the other processes: {error}.") from error
    finally:
        timeout.cancel()
    if not is_first_process():
        hide_progress()


def _exit_not_joined() -> None:
    address = global_state.coordinator_address or "the address of the cluster environment"
    print(
        f"\nnot all processes joined at {address} within {JOIN_TIMEOUT_S} s; start the same command on every host, or "
        "use --processes=1 for a single process.",
        file=sys.stderr,
        flush=True,
    )
    os._exit(EXIT_NOT_JOINED)


def process_count() -> int:
    """Returns the number of processes; 1 if `join_processes` was not called."""
    return global_state.num_processes


def process_index() -> int:
    """Returns the index of this process, from 0."""
    return global_state.process_id


def is_first_process() -> bool:
    """Whether this is process 0, which writes the files of which there is one copy. True in a single process."""
    return process_index() == 0


def require_one_process(what: str) -> None:
    """Raises a NotImplementedError if there are several processes."""
    if process_count() > 1:
        raise NotImplementedError(f"{what} supports one process only for now, and there are {process_count()}.")


def broadcast_from_process0(call: Callable[[], T]) -> T:
    """Calls `call` in process 0 and returns its result, plain JSON, in every process.

    Used for decisions (two hosts can see different states of one shared folder) and for files that all processes read
    after process 0 has written them. `call` must not synchronise with other processes. An exception is raised in
    process 0 only, whose end then ends the others (parallel/failure.py).
    """
    if process_count() == 1:
        return call()
    key = f"composer_jax/broadcast/{next(_broadcasts)}"
    if is_first_process():
        result = call()
        coordinator_client().key_value_set(key, json.dumps(result))
        return result
    return json.loads(wait_for_key(key))


def coordinator_client() -> Any:
    """Returns the client of the coordinator's key-value store. Only for processes that have joined."""
    return global_state.client


def coordinator_address() -> str:
    """Returns HOST:PORT of the coordinator. Only for processes that have joined."""
    return str(global_state.coordinator_address)


def wait_for_key(key: str) -> str:
    """Returns the coordinator's value for `key`; waits, without a timeout, until some process has set it."""
    while True:
        try:
            return coordinator_client().blocking_key_value_get(key, POLL_MS)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise


def wait_at_barrier(name: str) -> None:
    """Returns when every process has called it with this name, which is used once.

    Callable from any thread, because the devices take no part in it. Raises a JaxRuntimeError after BARRIER_TIMEOUT_S.
    """
    if process_count() > 1:
        coordinator_client().wait_at_barrier(f"composer_jax/{name}", 1000 * BARRIER_TIMEOUT_S)


def any_process(flag: bool) -> bool:
    """Whether `flag` is true in any process."""
    if process_count() == 1:
        return flag
    return bool(multihost_utils.process_allgather(np.array(flag)).any())


def min_of_mesh(mesh: Mesh, value: float) -> float:
    """Returns the smallest `value` of the processes that have devices of a mesh, all of which call this; as float32."""
    each = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    values = jax.make_array_from_callback((mesh.size,), each, lambda _: np.full(1, value, np.float32))
    return float(jax.jit(jnp.min, out_shardings=NamedSharding(mesh, PartitionSpec()))(values))


def device_put_global(tree: Any, sharding: Sharding) -> Any:
    """Returns a pytree of global arrays from NumPy arrays that every process holds in full.

    Each process copies only the shards of its own devices.
    """
    if process_count() == 1:
        return jax.device_put(tree, sharding)
    # jax.device_put would send the arrays from process 0 to the others, only to compare them.
    return jax.tree.map(lambda a: jax.make_array_from_callback(a.shape, sharding, lambda index: a[index]), tree)


def gather_to_host(array: jax.Array) -> np.ndarray:
    """Returns the whole of an array in every process, wherever its shards are."""
    return np.asarray(array) if process_count() == 1 else multihost_utils.process_allgather(array, tiled=True)
