"""Another process makes the device calls of process 0, with what its devices hold of the batches, through frames."""

import dataclasses

import jax
import numpy as np
import pytest

from composer_jax.frames import FrameError, encode_frame
from composer_jax.models.model_def import ModelDef
from composer_jax.parallel.mesh import make_mesh
from composer_jax.rl import multi_host
from composer_jax.rl.batch import Group
from composer_jax.rl.config import AlgorithmConfig, RLConfig
from composer_jax.rl.multi_host import LeadingUpdate, follow_update
from composer_jax.rl.policy_update import PolicyUpdate
from composer_jax.rl.reference import ReferenceKLConfig
from tests.models.small import small
from tests.rl.made_up import conversation, episode
from tests.rl.small_learner import small_learner
from tests.test_frames import read

CONFIG = RLConfig(
    group_size=2,
    tokens_per_episode=64.0,
    batches=((24, 2), (48, 2)),
    router_replay="off",
    algorithm=AlgorithmConfig(kl=ReferenceKLConfig(coefficient=0.1, form="sequence")),
)
MODEL = dataclasses.replace(small(), vocab_size=256)


class Wire:
    """The sampler of both ends, and what travels between them."""

    def __init__(self):
        self.frames, self.targets = [], []

    def call_followers(self, header, arrays=(), *, process=None):
        self.frames.append(encode_frame(header, arrays))
        self.targets.append(process)

    def follow(self, weights, on_call):
        for frame in self.frames:
            on_call(*read(frame))


def new_update() -> PolicyUpdate:
    mesh = make_mesh(jax.devices()[:2], data=2)
    update = PolicyUpdate(CONFIG, small_learner(MODEL, mesh=mesh))
    update.learner_checksums = lambda params: ()
    params, bias = ModelDef(MODEL).init(1)
    update.set_reference(*jax.device_put((params, bias), ModelDef(MODEL).shardings(mesh)))
    return update


def new_state(update):
    return update.learner.init_state(*ModelDef(MODEL).init(0))


@pytest.fixture
def two_processes(monkeypatch):
    """The other process has the same devices, so that both can be one."""
    monkeypatch.setattr(multi_host, "process_count", lambda: 2)
    parts = multi_host.part_frames
    monkeypatch.setattr(multi_host, "part_frames", lambda batch, mesh, process: parts(batch, mesh, 0))


def test_both_processes_get_the_same_weights(two_processes):
    groups = [
        Group([episode(1.0, conversation(start, summaries=1), summaries=1), episode(0.0)], [1.0, 0.0])
        for start in (100, 150)
    ]
    wire, leads, follows = Wire(), new_update(), new_update()
    leader = LeadingUpdate(leads, wire)
    state = new_state(leads)
    for step in range(2):
        state, result = leader.step(state, groups, 4, step)
        assert result.is_updated
    scores = leader.score(state, [1, 2, 3, 4], None)
    assert np.isfinite(scores).all()
    assert {process for process, frame in zip(wire.targets, wire.frames, strict=True) if b'"part"' in frame} == {1}
    followed = follow_update(follows, wire, new_state(follows), lambda state, header: None)
    assert int(followed.step) == 2
    for ours, theirs in zip(jax.tree.leaves(state.params), jax.tree.leaves(followed.params), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_batch_with_a_row_missing_and_an_unknown_call_are_refused(two_processes):
    group = Group([episode(1.0), episode(0.0)], [1.0, 0.0])
    wire, update = Wire(), new_update()
    LeadingUpdate(update, wire).step(new_state(update), [group], 2, 0)
    for frames, error, sentence in (
        (wire.frames[:1] + wire.frames[2:], FrameError, "without all rows of tokens"),
        (wire.frames[1:], FrameError, "cannot be read"),
        (wire.frames[:2] + wire.frames[1:], FrameError, "lacks nothing of"),
        ([encode_frame({"device_call": "dance", "normalisers": []})], ValueError, "'dance'"),
    ):
        broken = Wire()
        broken.frames = frames
        follows = new_update()
        with pytest.raises(error, match=sentence):
            follow_update(follows, broken, new_state(follows), lambda state, header: None)
