"""The sandbox section of a run's config."""

from dataclasses import dataclass

from composer_jax.errors import UserError

NETWORKS = ("none", "host")


@dataclass(frozen=True)
class SandboxConfig:
    """What the sandboxes of a run may reach."""

    network: str = "none"
    """The network of tasks that ask for one, such as Harbor's without allow_internet = false: "none" refuses these
    tasks before anything starts; "host" gives their sandboxes the network of the machine, local services included
    (docs/sandbox.md), and the others none."""

    def __post_init__(self) -> None:
        if self.network not in NETWORKS:
            raise UserError(f"sandbox.network={self.network!r}; it is one of {', '.join(NETWORKS)}.")
