"""Several processes as one: every host of a pod runs the same program, and each drives its own devices.

Process 0 decides and writes what exists once (`from_first`); the others wait for it at the coordinator and not inside a
program of the devices, where none hears Ctrl-C. Everything below `is_first` is a meeting: each process makes the same
calls in the same order, from its main thread.
"""

import itertools
import json
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax._src.distributed import global_state  # known before the devices start, as jax.process_count() is not
from jax.experimental import multihost_utils
from jax.sharding import Sharding

from composer_jax.errors import UserError
from composer_jax.observe.progress import hide_progress

T = TypeVar("T")

ASK_EVERY_MS = 2_000
"""How long one question to the coordinator waits for its answer; between two of them Ctrl-C is heard."""

JOIN_S = 300
"""How long a process waits for the others to be started."""
NOBODY = 2  # the exit code when they are not, as for other input that does not fit

_meetings = itertools.count()


def join(coordinator: str | None = None, processes: int | None = None, process: int | None = None) -> None:
    """Makes this process one of several that see each other's devices; call it before the first array exists.

    Args:
      coordinator: HOST:PORT of process 0, which listens there. None, for all three, leaves them to what the machine
        says of itself: TPU pods, SLURM and Kubernetes do.
      processes: how many there are.
      process: which this is, from 0. Only process 0 shows progress.

    CPU devices, which the tests have, then talk through gloo.

    Raises:
      UserError: the numbers do not fit, the machine says nothing of itself, or the port is taken. If the others do not
        come within JOIN_S the process ends with a sentence: JAX waits in C++, and would then abort it.
    """
    if coordinator is not None:
        host, _, port = coordinator.rpartition(":")
        if not host or not port.isdigit():
            raise UserError(f"coordinator={coordinator!r} is not HOST:PORT.")
        if processes is None or processes < 1:
            raise UserError(f"processes={processes} is not a number of processes.")
        if process is None or not 0 <= process < processes:
            raise UserError(f"process={process} is not one of 0 .. {processes - 1}.")
    elif (processes, process) != (None, None):
        raise UserError(f"processes={processes} and process={process} need a coordinator, HOST:PORT.")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # Where everything is said, the machine is not asked: a pod of Kubernetes that may not answer raises.
    detection = None if coordinator is None else "deactivate"
    alone = threading.Timer(JOIN_S, _give_up)
    alone.daemon = True
    alone.start()
    try:
        jax.distributed.initialize(
            coordinator,
            processes,
            process,
            cluster_detection_method=detection,
            initialization_timeout=JOIN_S + 60,
        )
    except (ValueError, RuntimeError) as error:
        raise UserError(f"cannot join the other processes: {error}.") from error
    finally:
        alone.cancel()
    if not is_first():
        hide_progress()


def _give_up() -> None:
    where = global_state.coordinator_address or "where the machine says"
    print(
        f"\nnot all processes came together at {where} within {JOIN_S} s; start the same command on every host, or use "
        "--processes=1 for one process alone.",
        file=sys.stderr,
        flush=True,
    )
    os._exit(NOBODY)


def process_count() -> int:
    """How many processes there are; 1 if this one joined no others."""
    return global_state.num_processes


def process_index() -> int:
    """Which of them this is, from 0."""
    return global_state.process_id


def is_first() -> bool:
    """Whether this is process 0, which writes what exists once: alone, every process is."""
    return process_index() == 0


def require_one_process(what: str) -> None:
    """Raises a NotImplementedError in one of several."""
    if process_count() > 1:
        raise NotImplementedError(f"{what} works in one process only for now, and here are {process_count()}.")


def from_first(call: Callable[[], T]) -> T:
    """Process 0 makes the call; every process returns its result, which is plain JSON, as soon as it is there.

    For what must be decided once (file systems can show one folder differently to two hosts at a time) and for what
    must be written once and then be there for all. The call may not meet the others in its turn. If it raises, it does
    so in process 0 alone, whose end ends the others (parallel/ending.py).
    """
    if process_count() == 1:
        return call()
    key = f"composer_jax/meeting/{next(_meetings)}"
    if is_first():
        result = call()
        global_state.client.key_value_set(key, json.dumps(result))
        return result
    return json.loads(asked(key))


def asked(key: str) -> str:
    """The value that some process gives to `key` at the coordinator; waits for it as long as it takes."""
    while True:
        try:
            return global_state.client.blocking_key_value_get(key, ASK_EVERY_MS)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise


def in_any(flag: bool) -> bool:
    """Whether it is so in any process."""
    if process_count() == 1:
        return flag
    return bool(multihost_utils.process_allgather(np.array(flag)).any())


def place(tree: Any, sharding: Sharding) -> Any:
    """A pytree of NumPy arrays, which every process has whole, on the devices; each process places what is its own."""
    if process_count() == 1:
        return jax.device_put(tree, sharding)
    # device_put would send all of it from process 0 to the others, only to compare.
    return jax.tree.map(lambda a: jax.make_array_from_callback(a.shape, sharding, lambda part: a[part]), tree)


def fetch(array: jax.Array) -> np.ndarray:
    """The whole of an array whose parts may lie with other processes, in every process."""
    return np.asarray(array) if process_count() == 1 else multihost_utils.process_allgather(array, tiled=True)
