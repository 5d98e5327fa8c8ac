"""Which tasks need the network, and whether a run gives it to them."""

from collections.abc import Iterable

from composer_jax.errors import UserError
from composer_jax.sandbox.config import SandboxConfig
from composer_jax.tasks.task import Task


def require_network(tasks: Iterable[Task], network: str, setting: str = "--config.sandbox.network=host") -> None:
    """Raises UserError that names all tasks that need the network, unless `network` is "host", or for other values.

    network: as in SandboxConfig. setting: what the user sets to allow it.
    """
    SandboxConfig(network)
    names = sorted(task.id for task in tasks if task.network)
    if names and network != "host":
        need = f"{len(names)} tasks need" if len(names) > 1 else "the task needs"
        raise UserError(
            f"{need} the network, which sandboxes do not have: {', '.join(names)}; {setting} gives sandboxes of such "
            "tasks the network of this machine (docs/sandbox.md says what that opens), or leave these tasks out."
        )
