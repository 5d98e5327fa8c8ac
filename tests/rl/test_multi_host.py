"""What process 0 learns from arrives at the other processes, through the bytes of a frame."""

from composer_jax.frames import encode_frame
from composer_jax.rl.batch import Group
from composer_jax.rl.multi_host import LeadingUpdate, follow_update
from tests.rl.made_up import conversation, episode
from tests.test_frames import read


class Wire:
    """The sampler of both ends."""

    def call_followers(self, header, arrays=()):
        self.frame = encode_frame(header, arrays)

    def follow(self, weights, on_call):
        on_call(*read(self.frame))


class Update:
    def step(self, state, groups, episodes, step):
        self.arguments = groups, episodes, step
        return state + 1, None


def test_all_processes_learn_from_equal_groups():
    groups = [
        Group([episode(1.0, conversation(start, summaries=1), summaries=1), episode(0.0)], [0.1, 1 / 3])
        for start in (100, 200)
    ]
    wire, leads, follows = Wire(), Update(), Update()
    LeadingUpdate(leads, wire).step(0, groups, 5, 7)
    state = follow_update(follows, wire, 0, lambda state, header: None)
    assert follows.arguments == leads.arguments == (groups, 5, 7)
    assert state == 1
