"""Assumptions: what a simulation cannot take from the run's config or from the roofline, each with unit and source."""

import dataclasses
from typing import Literal, get_args

from composer_jax.errors import UserError
from composer_jax.scale.message_costs import CALL_S, MESSAGE_RATE, MESSAGE_S
from composer_jax.scale.step_bytes import RECEIVE_RATE, SEND_RATE

Tail = Literal["lognormal", "pareto"]
_BOUNDS = (
    (
        "turns_median turn_tokens observation_tokens sandbox_starts_per_s network_bytes_per_s publish_bytes_per_s "
        "receive_bytes_per_s chips_per_host message_bytes_per_s batch_send_bytes_per_s "
        "batch_receive_bytes_per_s",
        lambda value: value > 0,
        "a number above 0",
    ),
    (
        "tool_s tool_spread command_s grade_s sandbox_start_s install_pause_s prompt_tokens message_s call_s",
        lambda value: value >= 0,
        "0 or more",
    ),
    (
        "lost_fraction hung_fraction equal_groups patch_fraction",
        lambda value: 0 <= value < 1,
        "at least 0 and less than 1",
    ),
    ("packing context_fill", lambda value: 0 < value <= 1, "more than 0 and at most 1"),
)
"""(names of fields, whether a value is in range, what the range is)."""


@dataclasses.dataclass(frozen=True)
class Assumptions:
    """Numbers that a simulation assumes about episodes, sandboxes, faults and the transfer of weights.

    "Measured here" refers to docs/performance.md and "published" to the source named; "assumed" has no source.

    Raises:
      UserError: a number out of range; the message names the field.
    """

    turns_median: float = 50.0
    """Median turns of an episode, before the limit agent.limits.max_turns. Published: Composer 2's rollouts have about
    50 (its authors in a podcast)."""
    turns_p99: float = 250.0
    """Turns that 99 % of the episodes stay below, before the limit agent.limits.max_turns. Assumed."""
    turns_tail: Tail = "lognormal"
    """Distribution of turns with that median and 99th percentile: lognormal, or pareto with a longer tail. Assumed."""
    turn_tokens: float = 300.0
    """Tokens that the model samples in a turn, on average. Assumed."""
    observation_tokens: float = 600.0
    """Tokens of the tools' answers in a turn, on average. Assumed."""
    prompt_tokens: float = 4096.0
    """Tokens before the first turn and again after each summary, which is counted with them. Assumed."""
    context_fill: float = 0.5
    """Mean tokens of a running context as a fraction of sampler.max_model_len, at which decoding and prefill are
    predicted. Assumed: contexts grow evenly until a summary empties them."""
    tool_s: float = 2.0
    """Seconds that a turn's tools work, on average. Assumed."""
    tool_spread: float = 0.5
    """Standard deviation over episodes of the logarithm of the mean tool seconds of a turn. Assumed."""
    command_s: float = 0.0016
    """Seconds that the sandbox adds to a turn. Measured here: 1.6 ms for `ls` in a sandbox's shell."""
    grade_s: float = 30.0
    """Seconds of grading an episode, in its sandbox. Assumed."""
    sandbox_start_s: float = 0.0053
    """Seconds until a sandbox is ready. Measured here for a sandbox of this host; a virtual machine takes seconds."""
    sandbox_starts_per_s: float = 500.0
    """Sandboxes that all hosts together start in a second. Published: more than 500 in a cluster (Composer 2)."""
    lost_fraction: float = 0.01
    """Fraction of the attempts whose sandbox dies, at a moment drawn evenly; they are repeated. Assumed."""
    hung_fraction: float = 0.001
    """Fraction of the attempts that hang, until agent.episode_seconds ends them with grade 0. Assumed."""
    equal_groups: float = 0.3
    """Fraction of the groups whose rewards are equal, which cost no training. Assumed."""
    packing: float = 0.95
    """Fraction of the positions in training rows that hold tokens. Assumed."""
    patch_fraction: float = 0.02
    """Bytes of a weight patch as a fraction of the bfloat16 weights. Published: 1.98 % (Fireworks, for Composer 2);
    measured here: 0.6 % at a learning rate of 1e-6, 1.7 % at 3e-6."""
    network_bytes_per_s: float = 12.5e9
    """Bytes per second at which the learner uploads a patch, each replica of the engine downloads it, and a host of the
    learner sends messages or batches. Assumed: 100 Gbit/s."""
    publish_bytes_per_s: float = 1.0e9
    """Bytes of weights that one host of the learner compares and encodes in a second. Measured here on two cores."""
    receive_bytes_per_s: float = 1.1e9
    """Bytes of weights that one host of an engine checks and writes in a second. Measured here on two cores."""
    message_s: float = MESSAGE_S
    """Seconds of the learner's process 0 for a message, beside its bytes. Measured here (python -m benchmarks.fleet
    --parts=router)."""
    message_bytes_per_s: float = MESSAGE_RATE
    """Bytes per second in which process 0 takes in the answers of engines. Measured here (the same)."""
    call_s: float = CALL_S
    """Seconds of an engine's host for a call of sampler.decode_steps tokens, which the devices hide as long as they
    take longer. Engines of one process (rl.engines=local) take turns. Measured here (python -m benchmarks.fleet
    --parts=scheduler)."""
    batch_send_bytes_per_s: float = SEND_RATE
    """Bytes of batches that the learner's process 0 makes and sends in a second. Measured here (python -m
    benchmarks.step_batches)."""
    batch_receive_bytes_per_s: float = RECEIVE_RATE
    """Bytes of batches that another process of the learner receives in a second. Measured here (the same)."""
    chips_per_host: int = 4
    """Chips of one host. Published for v5p and TPU7x."""
    install_pause_s: float = 30.0
    """Seconds without decoding while new weights are installed. Published: about 30 (Composer 2's authors in a
    podcast); 3 to 4 for SWE-1.7."""

    def __post_init__(self) -> None:
        for names, is_in_range, advice in _BOUNDS:
            for name in names.split():
                if not is_in_range(getattr(self, name)):
                    raise UserError(f"--{name}={getattr(self, name)} is out of range; use {advice}.")
        if self.turns_p99 < self.turns_median:
            raise UserError(
                f"--turns_p99={self.turns_p99} is below --turns_median={self.turns_median}; use the median or more."
            )
        if self.turns_tail not in get_args(Tail):
            raise UserError(f"--turns_tail={self.turns_tail!r} is unknown; use {' or '.join(get_args(Tail))}.")
        if self.lost_fraction + self.hung_fraction >= 1:
            raise UserError(
                f"--lost_fraction={self.lost_fraction} and --hung_fraction={self.hung_fraction} leave no attempt that "
                "ends; use smaller ones."
            )
