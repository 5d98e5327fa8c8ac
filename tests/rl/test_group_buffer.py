"""The buffer of groups: no group is lost or trained twice, and none is trained later than its bound."""

import time

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


def test_a_synchronous_run_admits_one_batch_and_waits_for_all_of_it():
    buffer = GroupBuffer(3, steps=2)
    assert fill(buffer) == [0, 1, 2]
    resolve(buffer, 2, 0)
    assert buffer.next_batch() is None
    resolve(buffer, 1)
    assert buffer.next_batch() == [0, 1, 2]
    assert buffer.pop_batch([0, 1, 2]) == []
    assert fill(buffer) == [3, 4, 5]
    resolve(buffer, 3, 4, 5)
    buffer.pop_batch(buffer.next_batch())
    assert not buffer.can_admit


def test_groups_that_end_first_are_trained_first():
    buffer = GroupBuffer(2, steps=9, max_staleness=1)
    assert fill(buffer) == [0, 1, 2, 3]
    resolve(buffer, 3, 1)
    assert buffer.next_batch() == [1, 3]
    buffer.pop_batch([1, 3])
    assert fill(buffer) == [4, 5]


def test_a_batch_waits_for_a_group_at_its_bound():
    buffer = GroupBuffer(2, steps=9, max_staleness=1)
    fill(buffer)
    resolve(buffer, 1, 2)
    buffer.pop_batch(buffer.next_batch())
    fill(buffer)
    resolve(buffer, 4, 5)
    assert buffer.next_batch() is None  # groups 0 and 3 were admitted at step 0 and would be trained at step 2
    resolve(buffer, 0)
    assert buffer.next_batch() is None
    resolve(buffer, 3)
    assert buffer.next_batch() == [0, 3]


def test_a_batch_leaves_room_for_all_later_deadlines():
    """With one group per step, groups 0 and 1 of step 0 cannot both be trained at step 2."""
    buffer = GroupBuffer(1, steps=9, max_staleness=2)
    assert fill(buffer) == [0, 1, 2]
    resolve(buffer, 2)
    buffer.pop_batch(buffer.next_batch())
    assert fill(buffer) == [3]
    resolve(buffer, 3)
    assert buffer.next_batch() is None


def test_late_groups_are_dropped_and_replaced():
    buffer = GroupBuffer(2, steps=9, max_staleness=1, late_groups="drop")
    fill(buffer)
    resolve(buffer, 1, 2)
    assert buffer.pop_batch(buffer.next_batch()) == []
    assert fill(buffer) == [4, 5]
    resolve(buffer, 4, 5)
    assert buffer.pop_batch(buffer.next_batch()) == [0, 3]
    assert fill(buffer) == [6, 7, 8, 9]


def test_batches_in_order_do_not_depend_on_who_ends_first():
    buffer = GroupBuffer(2, steps=9, max_staleness=3, in_order=True)
    fill(buffer)
    resolve(buffer, 6, 5, 1, 3, 2)
    assert buffer.next_batch() is None
    resolve(buffer, 0)
    assert buffer.next_batch() == [0, 1]


def test_a_restored_group_keeps_its_deadline():
    buffer = GroupBuffer(1, steps=9, max_staleness=1, step=4)
    buffer.admit(7, admitted_at=3)
    buffer.admit()
    assert sorted(buffer.outstanding) == [7, 8]
    resolve(buffer, 8)
    assert buffer.next_batch() is None


def test_a_hundred_thousand_outstanding_groups_cost_no_more_a_call_than_few():
    def seconds(groups: int) -> float:
        buffer = GroupBuffer(groups, steps=99, max_staleness=4)
        fill(buffer)
        resolve(buffer, *range(groups, 2 * groups))
        buffer.pop_batch(buffer.next_batch())
        fill(buffer)
        resolve(buffer, *range(5 * groups, 6 * groups))  # the youngest, which may not overtake all others
        best = 1e9
        for _ in range(5):
            began = time.perf_counter()
            for _ in range(100):
                assert buffer.next_batch() is None
                assert buffer.playing and not buffer.can_admit
            best = min(best, time.perf_counter() - began)
        return best

    assert seconds(20_000) < 20 * seconds(20)


def test_what_is_not_resolved_is_not_trained():
    buffer = GroupBuffer(1, steps=3)
    fill(buffer)
    with pytest.raises(ValueError, match="group 0 is not resolved"):
        buffer.pop_batch([0])


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


@settings(max_examples=300, deadline=None)
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
            dropped += late_now
            playing = [number for number in playing if number not in late_now]
            continue
        assert playing, "nothing plays and no batch is ready: the run would hang"
        buffer.resolve(playing.pop(order.randrange(len(playing))))
    assert len(trained) == len(set(trained)) == steps * groups
    assert not set(trained) & set(dropped)
    assert late == "drop" or not dropped
    assert set(trained) | set(dropped) | set(buffer.outstanding) == set(admitted) == set(range(len(admitted)))
    assert late == "drop" or len(admitted) == steps * groups
