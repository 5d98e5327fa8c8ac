"""The buffer of groups: no group is lost or trained twice, and none is trained later than its bound."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_jax.rl.group_buffer import GroupBuffer


def fill(buffer: GroupBuffer) -> list[int]:
    admitted = []
    while buffer.can_admit:
        admitted.append(buffer.admit())
    return admitted


def resolve(buffer: GroupBuffer, *numbers: int) -> None:
    for number in numbers:
        buffer.resolve(number)


def test_a_batch_leaves_room_for_all_later_deadlines():
    """With one group per step, groups 0 and 1 of step 0 cannot both be trained at step 2."""
    buffer = GroupBuffer(1, steps=9, max_staleness=2)
    assert fill(buffer) == [0, 1, 2]
    resolve(buffer, 2)
    buffer.pop_batch(buffer.next_batch())
    assert fill(buffer) == [3]
    resolve(buffer, 3)
    assert buffer.next_batch() is None
    with pytest.raises(ValueError, match="not resolved"):
        buffer.pop_batch([0])


def test_a_restored_group_keeps_its_deadline():
    buffer = GroupBuffer(1, steps=9, max_staleness=1, step=4)
    buffer.admit(7, admitted_at=3)
    buffer.admit()
    assert sorted(buffer.outstanding) == [7, 8]
    resolve(buffer, 8)
    assert buffer.next_batch() is None


class Uncountable(dict):
    """A dict over which nothing loops."""

    def __iter__(self):
        raise AssertionError("a call takes time in the number of outstanding groups")

    items = keys = values = __iter__


def test_a_call_does_not_loop_over_the_outstanding_groups():
    buffer = GroupBuffer(1000, steps=99, max_staleness=4)
    fill(buffer)
    resolve(buffer, *range(4000, 5000))
    buffer.outstanding = Uncountable(buffer.outstanding)
    assert buffer.next_batch() == list(range(4000, 5000))
    buffer.pop_batch(range(4000, 5000))
    assert len(fill(buffer)) == 1000 and buffer.playing == 5000 and buffer.next_batch() is None


def plain_next_batch(buffer: GroupBuffer) -> list[int] | None:
    """The oldest resolved groups, if the others then fit into the batches up to their deadlines."""
    groups = sorted(buffer.outstanding, key=lambda number: (buffer.outstanding[number], number))
    batch = [number for number in groups if buffer._is_resolved(number)][: buffer.groups_per_step]
    if len(batch) < buffer.groups_per_step:
        return None
    if buffer.late_groups == "wait":
        others = [number for number in groups if number not in batch]
        for count, number in enumerate(others, start=1):
            if count > (buffer.outstanding[number] + buffer.max_staleness - buffer.step) * buffer.groups_per_step:
                return None
    return sorted(batch)


@settings(max_examples=100, deadline=None)
@given(
    groups=st.integers(1, 4),
    staleness=st.integers(0, 4),
    late=st.sampled_from(["wait", "drop"]),
    in_order=st.booleans(),
    order=st.randoms(use_true_random=False),
)
def test_whatever_the_order_every_group_is_trained_once_within_its_bound(groups, staleness, late, in_order, order):
    steps = 12
    late = "wait" if in_order else late
    buffer = GroupBuffer(groups, steps, staleness, late_groups=late, in_order=in_order)
    admitted, trained, dropped, playing = {}, [], [], []
    while buffer.step < steps:
        while buffer.can_admit:
            number = buffer.admit()
            admitted[number] = buffer.step
            playing.append(number)
        batch = buffer.next_batch()
        assert in_order or batch == plain_next_batch(buffer)
        assert buffer.playing == sum(not buffer._is_resolved(number) for number in buffer.outstanding) == len(playing)
        assert buffer.queued == len(buffer.outstanding) - len(playing)
        if batch is not None and (not playing or order.random() < 0.5):
            assert all(buffer.step - admitted[number] <= staleness for number in batch)
            trained += batch
            late_now = buffer.pop_batch(batch)
            past = {number for number in admitted if admitted[number] + staleness < buffer.step}
            assert set(late_now) == (past - {*trained, *dropped} if late == "drop" else set())
            dropped += late_now
            playing = [number for number in playing if number not in late_now]
            continue
        assert playing, "nothing plays and no batch is ready: the run would hang"
        buffer.resolve(playing.pop(order.randrange(len(playing))))
    assert len(trained) == len(set(trained)) == steps * groups
    assert not in_order or trained == list(range(steps * groups))
    assert not set(trained) & set(dropped)
    assert late == "drop" or not dropped
    assert set(trained) | set(dropped) | set(buffer.outstanding) == set(admitted) == set(range(len(admitted)))
    assert late == "drop" or len(admitted) == steps * groups
