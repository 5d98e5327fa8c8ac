"""RL over several JAX processes: process 0 decides, and all of them learn.

The learner is one program over the devices of all processes. Process 0 sends the groups of a step to the others through
the channel of its sampler, between two device calls, or of its fleet of engines, which no other process knows. Each
process makes the same batches from them and takes the same step, so that nothing but groups has to be sent. Then all of
them install the new weights in the sampler, or publish them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from composer_jax.rl.batch import Group
from composer_jax.rl.played_group import decode_group, encode_group
from composer_jax.rl.policy_update import PolicyUpdate, UpdateResult
from composer_jax.sampler.several_processes import OnCall, WeightsOfVersion
from composer_jax.train.learner import TrainState


class Leading(Protocol):
    """The end of process 0 of a channel to the other processes: a Sampler that serves, or a FleetPolicy."""

    def call_followers(self, header: Mapping[str, Any], arrays: Sequence[np.ndarray] = ()) -> None:
        """See Sampler.call_followers."""
        ...


class Following(Protocol):
    """The end of every other process: its Sampler, or a LearnerFollower."""

    def follow(self, weights: WeightsOfVersion | None = None, on_call: OnCall | None = None) -> None:
        """See Sampler.follow."""
        ...


class LeadingUpdate:
    """The PolicyUpdate of process 0: every other process takes the step, too (`follow_update`)."""

    def __init__(self, update: PolicyUpdate, channel: Leading):
        """channel: a sampler serves and is paused whenever `step` is called."""
        self._update, self._channel = update, channel

    def step(
        self, state: TrainState, groups: Sequence[Group], episodes: int, step: int
    ) -> tuple[TrainState, UpdateResult]:
        """As PolicyUpdate.step."""
        encoded = [np.frombuffer(encode_group(group), np.uint8) for group in groups]
        self._channel.call_followers({"learn": [episodes, step]}, encoded)
        return self._update.step(state, groups, episodes, step)

    def score(self, state: TrainState, tokens: Sequence[int], routing: np.ndarray | None) -> np.ndarray:
        """As PolicyUpdate.score."""
        self._channel.call_followers({"score": list(tokens)}, [] if routing is None else [routing])
        return self._update.score(state, tokens, routing)


def follow_update(
    update: PolicyUpdate,
    channel: Following,
    state: TrainState,
    on_call: Callable[[TrainState, Mapping[str, Any]], None],
) -> TrainState:
    """Takes part in everything until process 0, which runs the orchestrator, leaves the serving of its sampler.

    Returns the weights after the last step. on_call: called with the state and the header of every other call of
    process 0, such as to save.
    """

    def call(header: dict[str, Any], arrays: list[np.ndarray]) -> None:
        nonlocal state
        if "learn" in header:
            episodes, step = header["learn"]
            groups = [decode_group(Group, array.data) for array in arrays]
            state, _ = update.step(state, groups, episodes, step)
        elif "score" in header:
            update.score(state, header["score"], arrays[0] if arrays else None)
        else:
            on_call(state, header)

    channel.follow(lambda _: (state.params, state.router_bias), call)
    return state
