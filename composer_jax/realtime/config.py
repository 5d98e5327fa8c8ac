"""The traffic section of a run's config: how its weights learn from production traffic."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from composer_jax.errors import UserError
from composer_jax.realtime.batches.rules import BatchRules
from composer_jax.realtime.release.canary import CanaryRules
from composer_jax.realtime.release.gate import GateRules


@dataclass(frozen=True)
class TrafficConfig:
    """Updates from traffic, one for each release. What they learn with is the learner of rl."""

    batch: BatchRules = field(default_factory=BatchRules)
    """Which sessions a batch takes, and what they are worth."""
    simulated_fraction: float = 0.5
    """Fraction of an update's episodes that are played anew on the training tasks of rl.groups, against forgetting."""
    minibatch_sessions: int = 64
    """Groups of the batch in a minibatch, each a session or the answers to one prompt; one optimizer step each."""
    learning_rate: float | None = None
    """Of all steps of an update. None: that of rl.optimizer at the learner's step, which after RL stays at the end of
    its decay, peak * final."""
    kl_limit: float = 0.02
    """Nats per token by which sampler_kl of a minibatch may exceed that of the first; the epoch ends there. Ours: the
    targets of PPO are .01 to .02."""
    gate: GateRules = field(default_factory=GateRules)
    """What a candidate has to show before users get it."""
    canary: CanaryRules = field(default_factory=CanaryRules)
    """How users get it."""
    users: str = ""
    """Import path of the simulated users of `launch.traffic simulate` (stages/traffic_users.py: TrafficUsers)."""
    users_options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of their constructor."""

    def __post_init__(self) -> None:
        if not 0 <= self.simulated_fraction < 1:
            raise UserError(
                f"traffic.simulated_fraction={self.simulated_fraction} leaves nothing of the traffic; use 0 to .9."
            )
        if self.minibatch_sessions < 1:
            raise UserError(f"traffic.minibatch_sessions={self.minibatch_sessions}; it must be at least 1.")
        if self.learning_rate is not None and not self.learning_rate > 0:
            raise UserError(f"traffic.learning_rate={self.learning_rate} learns nothing; use a positive number.")
        if not self.kl_limit > 0:
            raise UserError(f"traffic.kl_limit={self.kl_limit} stops every update; use a positive number of nats.")
