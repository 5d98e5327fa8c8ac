"""Roles: how fast the simulated learner, engines and sandboxes are, and how that follows from what was bought."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from composer_jax.errors import UserError
from composer_jax.scale.simulation.assumptions import Assumptions


@dataclasses.dataclass(frozen=True)
class Fleet:
    """What was bought."""

    learner_chips: int
    rollout_chips: int
    sandboxes: int


@dataclasses.dataclass(frozen=True)
class Speeds:
    """Speeds of a config on a kind of chip (study.py: predict_speeds)."""

    trained_tokens_per_s: float
    """Positions of training rows per second and chip of the learner."""
    replica_chips: int
    """Chips of one replica of the rollout engine."""
    decode_steps: Sequence[tuple[int, float]]
    """(conversations of one replica, seconds in which each gets a token), ascending; the last is the most it holds."""
    prefill_s: float
    """Seconds of one replica per prefilled token."""
    weight_bytes: float
    """Bytes of the weights that are published."""
    mean_context: int
    """Tokens of the contexts for which `decode_steps` and `prefill_s` hold."""


@dataclasses.dataclass(frozen=True)
class Roles:
    """What the simulation needs to know of the roles."""

    rates: Sequence[float]
    """rates[n]: tokens per second of each of n conversations that sample at once, n from 0 to the most sessions. More
    conversations than slots share them."""
    sandboxes: int
    learn_s_per_token: float
    """Seconds of an optimizer step per token of the trained rows."""
    learn_s: float = 0.0
    """Seconds of an optimizer step besides."""
    publish_s: float = 0.0
    """Seconds from the end of an optimizer step until the engines hold its weights, while they go on decoding."""
    install_s: float = 0.0
    """Seconds without decoding while weights are installed."""
    sandbox_start_s: float = 0.0
    sandbox_starts_per_s: float = float("inf")

    @property
    def sessions(self) -> int:
        """Episodes that the engines hold at once."""
        return len(self.rates) - 1

    @property
    def peak_tokens_per_s(self) -> float:
        """The most tokens that the engines sample in a second."""
        return max(n * rate for n, rate in enumerate(self.rates))


def make_roles(
    fleet: Fleet, speeds: Speeds, assumed: Assumptions, prefilled_per_sampled: float, sessions: int
) -> Roles:
    """Returns the roles of a fleet.

    The learner's speed is proportional to its chips; the engine consists of whole replicas, over which conversations
    are spread evenly. Prefill takes its share of an engine's time: while n conversations get a token each, their
    prefill takes n * prefilled_per_sampled * prefill_s. Where more conversations want to sample than a replica has
    slots, they share them evenly.

    Args:
      prefilled_per_sampled: tokens that are prefilled for each that is sampled.
      sessions: that the cache of one replica holds, at least as many as it has slots.

    Raises:
      UserError: no chip for the learner, no whole replica for rollout, or no sandbox.
    """
    replicas = fleet.rollout_chips // speeds.replica_chips
    if fleet.learner_chips < 1 or replicas < 1 or fleet.sandboxes < 1:
        raise UserError(
            f"{fleet.learner_chips} chips for learning, {fleet.rollout_chips} for rollout and {fleet.sandboxes} "
            f"sandboxes are too few; a learner has at least one chip, rollout {speeds.replica_chips}, and one sandbox "
            "plays an episode."
        )
    held, seconds = zip(*speeds.decode_steps, strict=True)
    conversations = np.arange(1, replicas * sessions + 1) / replicas
    decoding = np.clip(conversations, 1, held[-1])
    step_s = np.interp(decoding, held, seconds) + decoding * prefilled_per_sampled * speeds.prefill_s
    step_s = step_s * np.maximum(conversations / held[-1], 1)  # of more than there are slots, each has a share
    learner_hosts = fleet.learner_chips / assumed.chips_per_host
    replica_hosts = speeds.replica_chips / assumed.chips_per_host
    return Roles(
        rates=[0.0, *(1 / step_s).tolist()],
        sandboxes=fleet.sandboxes,
        learn_s_per_token=1 / (assumed.packing * speeds.trained_tokens_per_s * fleet.learner_chips),
        publish_s=speeds.weight_bytes
        * (
            1 / (assumed.publish_bytes_per_s * learner_hosts)
            + 2 * assumed.patch_fraction / assumed.network_bytes_per_s
            + 1 / (assumed.receive_bytes_per_s * replica_hosts)
        ),
        install_s=assumed.install_pause_s,
        sandbox_start_s=assumed.sandbox_start_s,
        sandbox_starts_per_s=assumed.sandbox_starts_per_s,
    )
