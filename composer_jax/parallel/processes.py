"""Several processes as one: every host of a pod runs the same program, and each drives its own devices."""

import jax

from composer_jax.errors import UserError


def join(coordinator: str | None = None, processes: int | None = None, process: int | None = None) -> None:
    """Makes this process one of several that see each other's devices; call it before the first array exists.

    Args:
      coordinator: HOST:PORT of process 0, which listens there. None, for all three, leaves them to what the machine
        says of itself: TPU pods, SLURM and Kubernetes do.
      processes: how many there are.
      process: which this is, from 0.

    CPU devices, which the tests have, then talk through gloo.

    Raises:
      UserError: the numbers do not fit, the machine says nothing of itself, or nobody answers.
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
    try:
        jax.distributed.initialize(coordinator, processes, process)
    except (ValueError, RuntimeError) as error:
        raise UserError(f"cannot join the other processes: {error}") from error
