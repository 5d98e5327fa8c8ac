"""RL over several JAX processes: process 0 decides, and all of them learn.

The learner is one program over the devices of all processes. Process 0 alone has groups, rows and advantages. Before
each device call of a step it sends every other process what that one's devices hold of the batch (train/batch_parts.py)
and the name of the call, through the channel of its sampler, between two device calls, or of its fleet of engines,
which no other process knows. The other processes make the same calls. Then all of them install the new weights in the
sampler, or publish them.

The frames of a batch are sent to one process after another, and a process that is behind holds the sender up, so no
queue grows beyond the bytes that the channel lets wait.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from composer_jax.data.host_batch import HostField
from composer_jax.parallel.processes import process_count
from composer_jax.rl.batch import Group
from composer_jax.rl.policy_update import PolicyUpdate, UpdateResult
from composer_jax.sampler.several_processes import OnCall, WeightsOfVersion
from composer_jax.train.batch_parts import BatchPartReader, part_frames
from composer_jax.train.learner import TrainState


class Leading(Protocol):
    """The end of process 0 of a channel to the other processes: a Sampler that serves, or a FleetPolicy."""

    def call_followers(
        self, header: Mapping[str, Any], arrays: Sequence[np.ndarray] = (), *, process: int | None = None
    ) -> None:
        """See Sampler.call_followers."""
        ...


class Following(Protocol):
    """The end of every other process: its Sampler, or a LearnerFollower."""

    def follow(self, weights: WeightsOfVersion | None = None, on_call: OnCall | None = None) -> None:
        """See Sampler.follow."""
        ...


class LeadingUpdate:
    """The PolicyUpdate of process 0: every other process takes part in its device calls (`follow_update`)."""

    def __init__(self, update: PolicyUpdate, channel: Leading):
        """channel: a sampler serves and is paused whenever `step` or `score` is called."""
        self._update, self._channel = update, channel
        update.on_device_call = self._send

    def step(
        self, state: TrainState, groups: Sequence[Group], episodes: int, step: int
    ) -> tuple[TrainState, UpdateResult]:
        """As PolicyUpdate.step."""
        return self._update.step(state, groups, episodes, step)

    def score(self, state: TrainState, tokens: Sequence[int], routing: np.ndarray | None) -> np.ndarray:
        """As PolicyUpdate.score."""
        return self._update.score(state, tokens, routing)

    def _send(self, call: str, batch: Mapping[str, HostField], normalisers: Sequence[float | None]) -> None:
        if batch:
            for process in range(1, process_count()):
                for header, arrays in part_frames(batch, self._update.learner.mesh, process):
                    self._channel.call_followers({"part": header}, arrays, process=process)
        self._channel.call_followers({"device_call": call, "normalisers": list(normalisers)})


def follow_update(
    update: PolicyUpdate,
    channel: Following,
    state: TrainState,
    on_call: Callable[[TrainState, Mapping[str, Any]], None],
) -> TrainState:
    """Takes part in everything until process 0, which runs the orchestrator, leaves the serving of its sampler.

    Returns the weights after the last step. Raises FrameError for a part of a batch that is not this process's.

    on_call: called with the state and the header of every other call of process 0, such as to save.
    """
    parts = BatchPartReader(update.learner.mesh)

    def call(header: dict[str, Any], arrays: list[np.ndarray]) -> None:
        nonlocal state
        if "part" in header:
            parts.add(header["part"], arrays)
        elif "device_call" in header:
            state = update.follow_device_call(state, header["device_call"], parts.take(), header["normalisers"])
        else:
            on_call(state, header)

    channel.follow(lambda _: (state.params, state.router_bias), call)
    return state
