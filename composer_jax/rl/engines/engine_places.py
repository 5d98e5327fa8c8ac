"""Where the engines of a fleet are: the addresses that rl.engines lists, or the nodes of a Ray cluster."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol


class EngineRefused(Exception):
    """An engine that cannot be used as it is; the text says why, as the rest of a sentence."""


class EnginePlace(Protocol):
    """One place at which an engine runs, or will."""

    @property
    def name(self) -> str:
        """What messages call the engine while nobody knows its address."""
        ...

    async def locate(self) -> str:
        """Returns the HOST:PORT of the engine there, another one if it was started again; waits while there is none.

        Raises EngineRefused if no engine can be there, and OSError if it was started and has ended.
        """
        ...


class EnginePlaces(Protocol):
    """The places of a fleet."""

    @property
    def advice(self) -> str:
        """One or more sentences: how there comes to be an engine that can be used."""
        ...

    def looks(self) -> AsyncIterator[Sequence[EnginePlace]]:
        """Yields the places that there are, again whenever they may have changed; the last ones stay."""
        ...


@dataclass(frozen=True)
class ListedEngine:
    """An address of rl.engines."""

    name: str

    async def locate(self) -> str:
        """See EnginePlace.locate: the address itself."""
        return self.name


@dataclass(frozen=True)
class ListedEngines:
    """The addresses of rl.engines."""

    addresses: tuple[str, ...]
    advice: str = (
        "Start engines with python -m launch.serve --checkpoint=patches:FOLDER --engine_port=PORT --token_file=FILE."
    )

    async def looks(self) -> AsyncIterator[Sequence[EnginePlace]]:
        """See EnginePlaces.looks."""
        yield [ListedEngine(address) for address in self.addresses]
