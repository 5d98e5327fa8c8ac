"""RL over several JAX processes: process 0 decides, and all of them learn.

The learner is one program over the devices of all processes. Process 0 sends the groups of a step to the others through
the channel of its sampler, between two device calls. Each process makes the same batches from them and takes the same
step, so that nothing but groups has to be sent. Then all of them install the new weights in the sampler.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from composer_jax.rl.batch import Group
from composer_jax.rl.played_group import decode_group, encode_group
from composer_jax.rl.policy_update import PolicyUpdate, UpdateResult
from composer_jax.sampler.engine import Sampler
from composer_jax.train.learner import TrainState


class LeadingUpdate:
    """The PolicyUpdate of process 0: every other process takes the step, too (`follow_update`)."""

    def __init__(self, update: PolicyUpdate, sampler: Sampler):
        """sampler: serves and is paused whenever `step` is called."""
        self._update, self._sampler = update, sampler

    def step(
        self, state: TrainState, groups: Sequence[Group], episodes: int, step: int
    ) -> tuple[TrainState, UpdateResult]:
        """As PolicyUpdate.step."""
        encoded = [np.frombuffer(encode_group(group), np.uint8) for group in groups]
        self._sampler.call_followers({"learn": [episodes, step]}, encoded)
        return self._update.step(state, groups, episodes, step)

    def score(self, state: TrainState, tokens: Sequence[int], routing: np.ndarray | None) -> np.ndarray:
        """As PolicyUpdate.score."""
        self._sampler.call_followers({"score": list(tokens)}, [] if routing is None else [routing])
        return self._update.score(state, tokens, routing)


def follow_update(
    update: PolicyUpdate,
    sampler: Sampler,
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

    sampler.follow(lambda _: (state.params, state.router_bias), call)
    return state
