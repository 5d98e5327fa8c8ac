"""The rl.fleet section: how a learner deals with engines in processes of their own."""

from dataclasses import dataclass

from composer_jax.errors import UserError
from composer_jax.host_port import split_host_port
from composer_jax.rl.workers.channel import SILENCE_S


@dataclass(frozen=True)
class FleetConfig:
    """How a learner deals with engines that are not local (rl.engines). Raises UserError for a number out of range."""

    patience_s: float = 600.0
    """Seconds that the run waits while no engine can be used, before it ends with a sentence."""
    silence_s: float = SILENCE_S
    """Seconds without a sign of life after which an engine is lost, and its sessions open elsewhere."""
    stall_s: float = 300.0
    """Seconds in which an engine that owes a message computes no token, after which it is lost as well."""
    cpu_nodes: int = 0
    """Of rl.engines="ray": nodes of the cluster without accelerators that get an engine, too, which computes on the
    CPU."""

    def __post_init__(self) -> None:
        for name in ("patience_s", "silence_s", "stall_s"):
            if not (value := getattr(self, name)) > 0:
                raise UserError(f"rl.fleet.{name}={value:g} is not positive; use seconds above 0.")
        if self.cpu_nodes < 0:
            raise UserError(f"rl.fleet.cpu_nodes={self.cpu_nodes} is negative; 0 has engines on accelerators only.")


def engine_addresses(engines: str | tuple[str, ...]) -> tuple[str, ...]:
    """Returns the addresses HOST:PORT that rl.engines lists; none for "local" and "ray".

    Raises UserError for a text that is not such an address, and for an address that stands twice.
    """
    if engines in ("local", "ray"):
        return ()
    addresses = tuple(engines.split(",")) if isinstance(engines, str) else engines
    if not addresses:
        raise UserError("rl.engines is an empty list; name engines as HOST:PORT, or use 'local'.")
    for address in addresses:
        if address.startswith(("http://", "https://")):
            raise UserError(
                f"rl.engines names {address}, a server of OpenAI's API, which tells neither versions nor routes of "
                "its tokens; use the --engine_port of a launch.serve, as HOST:PORT."
            )
        host, port = split_host_port(address) or ("", 0)
        if not host or not port:
            raise UserError(f"rl.engines names {address!r}; use 'local', or the HOST:PORT of engines (docs/fleet.md).")
    if len(set(addresses)) < len(addresses):
        raise UserError(f"rl.engines={','.join(addresses)} names an engine twice; each of them once is enough.")
    return addresses
