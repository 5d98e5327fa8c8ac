"""Roles: how fast the simulated learner, engines and sandboxes are, and how that follows from what was bought."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from composer_jax.errors import UserError
from composer_jax.scale.message_costs import engine_call_seconds, message_seconds, reply_bytes, request_bytes
from composer_jax.scale.simulation.assumptions import Assumptions
from composer_jax.scale.step_bytes import batch_seconds


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
class TokenBytes:
    """Bytes of a token of a config between hosts (study.py: token_bytes_of)."""

    route: int
    """Of its routes in a message; 0 where none are replayed."""
    batch: int
    """In a training batch."""
    batch_tokens: int
    """Places in the largest training batch."""
    call_tokens: int
    """Tokens that a decode call samples of each conversation."""


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
    message_s_per_token: float = 0.0
    """Seconds of the learner's process 0 for messages, one after another, per sampled token."""

    @property
    def sessions(self) -> int:
        """Episodes that the engines hold at once."""
        return len(self.rates) - 1

    @property
    def peak_tokens_per_s(self) -> float:
        """The most tokens that the engines sample in a second."""
        return max(n * rate for n, rate in enumerate(self.rates))


def turn_bytes(sizes: TokenBytes, assumed: Assumptions) -> float:
    """Returns the bytes of the message of a turn, both ways: the engine lacks the tools' answers."""
    routes = sizes.route * (assumed.turn_tokens + assumed.observation_tokens)
    return request_bytes(assumed.observation_tokens) + reply_bytes(assumed.turn_tokens, routes)


def turn_seconds(sizes: TokenBytes, assumed: Assumptions) -> float:
    """Returns the seconds of the learner's process 0 for the message of a turn, or of its network if that is slower."""
    n_bytes = turn_bytes(sizes, assumed)
    host_s = message_seconds(n_bytes, assumed.message_s, assumed.message_bytes_per_s)
    return max(host_s, n_bytes / assumed.network_bytes_per_s)


def learner_processes(fleet: Fleet, assumed: Assumptions) -> int:
    """Returns the hosts of the learner, each of which has one process."""
    return max(1, math.ceil(fleet.learner_chips / assumed.chips_per_host))


def send_batch_seconds(sizes: TokenBytes, fleet: Fleet, assumed: Assumptions, tokens: float) -> float:
    """Returns the seconds in which all processes of the learner get their parts of `tokens` places in batches."""
    send_rate = min(assumed.batch_send_bytes_per_s, assumed.network_bytes_per_s)
    processes = learner_processes(fleet, assumed)
    return batch_seconds(
        tokens, sizes.batch, processes, send_rate=send_rate, receive_rate=assumed.batch_receive_bytes_per_s
    )


def publish_seconds(fleet: Fleet, speeds: Speeds, assumed: Assumptions) -> float:
    """Returns the seconds in which a version is encoded by the learner, sent, and decoded by each engine."""
    learner_hosts = fleet.learner_chips / assumed.chips_per_host
    replica_hosts = speeds.replica_chips / assumed.chips_per_host
    return speeds.weight_bytes * (
        1 / (assumed.publish_bytes_per_s * learner_hosts)
        + 2 * assumed.patch_fraction / assumed.network_bytes_per_s
        + 1 / (assumed.receive_bytes_per_s * replica_hosts)
    )


def make_roles(
    fleet: Fleet,
    speeds: Speeds,
    assumed: Assumptions,
    prefilled_per_sampled: float,
    sessions: int,
    sizes: TokenBytes,
    *,
    one_process: bool = False,
) -> Roles:
    """Returns the roles of a fleet.

    The learner's speed is proportional to its chips; the engine consists of whole replicas, over which conversations
    are spread evenly. Prefill takes its share of an engine's time: while n conversations get a token each, their
    prefill takes n * prefilled_per_sampled * prefill_s. Where more conversations want to sample than a replica has
    slots, they share them evenly. An engine's host works on the next call while the devices compute one. The learner
    computes the gradient of a batch while process 0 sends the next one, so a step takes the longer of both, and the
    time of sending the first batch.

    Args:
      prefilled_per_sampled: tokens that are prefilled for each that is sampled.
      sessions: that the cache of one replica holds, at least as many as it has slots.
      one_process: whether all engines have their schedulers in one Python process, as those of rl.engines=local do.

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
    device_s, sharing = step_s * sizes.call_tokens, replicas if one_process else 1
    step_s = engine_call_seconds(device_s, sharing, assumed.call_s) / sizes.call_tokens
    step_s = step_s * np.maximum(conversations / held[-1], 1)  # of more than there are slots, each has a share
    return Roles(
        rates=[0.0, *(1 / step_s).tolist()],
        sandboxes=fleet.sandboxes,
        learn_s_per_token=max(
            1 / (speeds.trained_tokens_per_s * fleet.learner_chips), send_batch_seconds(sizes, fleet, assumed, 1)
        )
        / assumed.packing,
        learn_s=send_batch_seconds(sizes, fleet, assumed, sizes.batch_tokens),
        publish_s=publish_seconds(fleet, speeds, assumed),
        install_s=assumed.install_pause_s,
        sandbox_start_s=assumed.sandbox_start_s,
        sandbox_starts_per_s=assumed.sandbox_starts_per_s,
        message_s_per_token=turn_seconds(sizes, assumed) / assumed.turn_tokens,
    )
