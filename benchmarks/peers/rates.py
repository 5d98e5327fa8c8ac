"""Conversations in rounds, ours and those of other engines in turn, and the rates of both."""

import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.peers.environments import Peer, PeerError, play_peer


class PeerRates:
    """The rates of other engines, of one play for each call of `play_round`.

    A peer that cannot be installed, or that fails, is named on stderr with the reason, and plays no further round.
    """

    def __init__(self, peers: Iterable[Peer], arguments: Sequence[str], cache: Path):
        """Takes the peers, the arguments of their scripts, and the folder of their environments."""
        self._peers = list(peers)
        self._arguments, self._cache = arguments, cache
        self._rates: dict[str, list[float]] = {}

    def play_round(self) -> None:
        """Lets each peer play the conversations once."""
        for peer in list(self._peers):
            try:
                figures = play_peer(peer, self._arguments, self._cache)
            except PeerError as error:
                print(f"{error}\n{peer.name} is not compared", file=sys.stderr, flush=True)
                self._peers.remove(peer)
                self._rates.pop(peer.name, None)
                continue
            print(f"conversations of {peer.name}: {figures}", file=sys.stderr, flush=True)
            self._rates.setdefault(peer.name, []).append(figures["tokens_per_s"])

    def ratios(self, rate: float) -> dict[str, float]:
        """Returns {"vs_NAME": our rate over the median of theirs} of the peers that played every round."""
        return {f"vs_{name}": rate / statistics.median(rates) for name, rates in self._rates.items()}
