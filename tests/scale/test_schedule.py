"""What is read from compiled programs: against programs written by hand, and against the traced one."""

from types import SimpleNamespace

import pytest

from composer_jax.scale.costs import CostAssumptions, Operation, estimate_cost
from composer_jax.scale.efficiency import Efficiency
from composer_jax.scale.plan import compile_program, place_steps
from composer_jax.scale.roofline import operation_seconds
from composer_jax.scale.schedule import HloSchedule
from tests.scale.configuration import small_config

ASSUMED = CostAssumptions({"data": 2, "expert": 4}, loop_counts={"rounds": 2.0})
PROGRAM = """HloModule jit_step, is_scheduled=true, entry_computation_layout={(f32[8]{0})->f32[8]{0}}

%product (a: bf16[128,64], b: bf16[64,256]) -> bf16[128,256] {
  %a = bf16[128,64]{1,0:T(8,128)(2,1)} parameter(0)
  %b = bf16[64,256]{1,0:T(8,128)(2,1)} parameter(1)
  ROOT %convolution.1 = bf16[128,256]{1,0:T(8,128)(2,1)} convolution(%a, %b), dim_labels=bf_io->bf
}

%batched (a: bf16[4,128,64], b: bf16[4,64,32]) -> bf16[4,128,32] {
  %a.1 = bf16[4,128,64]{2,1,0} parameter(0)
  %b.1 = bf16[4,64,32]{2,1,0} parameter(1)
  ROOT %convolution.2 = bf16[4,128,32]{2,1,0} convolution(%a.1, %b.1), window={size=4 stride=3}, dim_labels=0bf_0io->0bf
}

%all-reduce-scatter (p: f32[8,4]) -> f32[4,4] {
  %p = f32[8,4]{1,0} parameter(0)
  %all-reduce.9 = f32[8,4]{1,0} all-reduce(%p), channel_id=4, replica_groups={{0,4},{1,5},{2,6},{3,7}}, to_apply=%add
  ROOT %dynamic-slice = f32[4,4]{1,0} dynamic-slice(%all-reduce.9), dynamic_slice_sizes={4,4}
}

%called (p.1: bf16[16,8]) -> bf16[64,8] {
  %p.1 = bf16[16,8]{1,0} parameter(0)
  ROOT %all-gather.8 = bf16[64,8]{1,0} all-gather(%p.1), channel_id=5, replica_groups=[2,4]<=[8], dimensions={0}
}, execution_thread="sparsecore"

%sparse (p.2: bf16[16,8]) -> bf16[64,8] {
  %p.2 = bf16[16,8]{1,0} parameter(0)
  ROOT %custom-call.1 = bf16[64,8]{1,0} custom-call(%p.2), custom_call_target="X", called_computations={%called}
}, execution_thread="sparsecore"

%body (t: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %t = (s32[], f32[8,4]{1,0}) parameter(0)
  %x = f32[8,4]{1,0} get-tuple-element(%t), index=1
  %scattered = f32[4,4]{1,0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter
  %start = ((), (), (s32[8]{0})) async-start(), async_execution_thread="sparsecore", calls=%sparse
  %early = bf16[128,256]{1,0} fusion(%x, %x), kind=kOutput, calls=%product
  %update = ((bf16[16,8]{1,0}), bf16[64,8]{1,0}, (s32[8]{0})) async-update(%start, %x)
  %fused = bf16[128,256]{1,0} fusion(%x, %x), kind=kOutput, calls=%product
  %gathered = bf16[64,8]{1,0} async-done(%update)
  ROOT %r = (s32[], f32[8,4]{1,0}) tuple(%x, %x)
}

%condition (t.1: (s32[], f32[8,4])) -> pred[] {
  %t.1 = (s32[], f32[8,4]{1,0}) parameter(0)
  %limit = s32[]{:T(128)} constant(3)
  ROOT %less = pred[] compare(%t.1, %limit), direction=LT
}

ENTRY %main (w: f32[8]) -> f32[8] {
  %w = f32[8]{0} parameter(0)
  %ag-start = (f32[8]{0}, f32[16]{0}) all-gather-start(%w), replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}
  %many = bf16[4,128,32]{2,1,0} fusion(%w, %w), kind=kOutput, calls=%batched
  %ag-done = f32[16]{0} all-gather-done(%ag-start)
  %pass = (f32[8]{0}, f32[8]{0}, u32[], u32[]) collective-permute-start(%w), source_target_pairs={{0,1},{1,2},{4,5}}
  %passed = f32[8]{0} collective-permute-done(%pass)
  %alone = f32[8]{0} all-reduce(%w), replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}, to_apply=%add
  %loop = (s32[], f32[8,4]{1,0}) while(%w), condition=%condition, body=%body
  ROOT %sum = (f32[8]{0}, bf16[2]{0}) all-reduce(%w, %w), to_apply=%add
}
"""


def collectives(schedule, assumed):
    """(runs in one run of the program, collective) in the order of the computations."""

    def runs(name, times):
        yield name, times
        for instruction in schedule.computations[name]:
            for inner, count in schedule._controlled(instruction, assumed):
                yield from runs(inner, times * count)

    every = runs(schedule.entry, 1.0)
    return [(n, transfer.collective) for name, n in every for transfer in schedule._transfers(name, assumed.sizes)]


def found(schedule):
    return [(times, c.pattern, c.axes, c.bytes) for times, c in collectives(schedule, ASSUMED)]


def test_collectives_have_their_axes_bytes_and_runs():
    assert found(HloSchedule(PROGRAM)) == [
        (1.0, "all_gather", ("data",), 64.0),
        (1.0, "permute", ("expert",), 32.0),
        (1.0, "all_reduce", ("data", "expert"), 36.0),
        (3.0, "reduce_scatter", ("data",), 128.0),
        (3.0, "all_gather", ("expert",), 1024.0),
    ]


@pytest.mark.parametrize(("scope", "runs"), [("rounds/while", 2), ("at_most_5/while", 5), ("rounds/x/while", 3)])
def test_a_loop_runs_as_often_as_its_scope_or_its_condition_says(scope, runs):
    program = PROGRAM.replace("body=%body", f'body=%body, metadata={{op_name="jit(step)/{scope}"}}')
    assert {times for times, *_ in found(HloSchedule(program))} == {1.0, runs}


@pytest.fixture
def network():
    """A chip that multiplies 1,000 times a second; every collective takes as many seconds as it has bytes."""
    chip = SimpleNamespace(peak_flops=1000.0, hbm_bandwidth=1.0, devices=1)
    efficiency = Efficiency(matmul=1.0)
    return SimpleNamespace(chip=chip, efficiency=efficiency, seconds=lambda c: c.bytes)


PRODUCT = 2 * 128 * 64 * 256 / 1000
BATCHED = 4 * 2 * 128 * 64 * 32 / 1000


def test_products_between_start_and_done_hide_a_collective(network):
    waiting = HloSchedule(PROGRAM).wait_seconds(network, ASSUMED)
    assert waiting.sent == {"data": 64.0 + 3 * 128, "expert": 32.0 + 3 * 1024, "data+expert": 36.0}
    # Products of 2,097 and 4,194 s hide 64 and 1,024 s. The one before the update hides nothing.
    assert BATCHED > 64 and PRODUCT > 1024
    assert waiting.exposed == {"data": 3 * 128.0, "expert": 32.0, "data+expert": 36.0}


def test_what_is_left_when_the_products_end_is_waited_for(network):
    network.chip.peak_flops = 1e6
    waiting = HloSchedule(PROGRAM).wait_seconds(network, ASSUMED)
    assert waiting.exposed["data"] == pytest.approx(64 - BATCHED / 1000 + 3 * 128)
    assert waiting.exposed["expert"] == pytest.approx(32 + 3 * (1024 - PRODUCT / 1000))


def test_collectives_over_the_same_axes_follow_each_other(network):
    both = PROGRAM.replace(
        "  %ag-done =",
        "  %second-start = (f32[8]{0}, f32[16]{0}) all-gather-start(%w), replica_groups=[4,2]<=[2,4]T(1,0)\n"
        "  %second-done = f32[16]{0} all-gather-done(%second-start)\n  %ag-done =",
    )
    network.chip.peak_flops = 1e6
    waiting = HloSchedule(both).wait_seconds(network, ASSUMED)
    assert waiting.exposed["data"] == pytest.approx(64 + 64 - BATCHED / 1000 + 3 * 128)


def test_a_kernel_that_reads_pages_by_a_table_hides_a_collective(network):
    is_kernel = 'custom_call_target="tpu_custom_call", metadata={op_name="jit(step)/paged_attention/pallas_call"}'
    kernel = PROGRAM.replace(
        "  %ag-done =",
        "  %table = s32[2,1,3]{2,1,0} broadcast(%w)\n"
        "  %q = bf16[2,1,16,128]{3,2,1,0} broadcast(%w)\n"
        "  %pages = bf16[4,9,64,256]{3,2,1,0} broadcast(%w)\n"
        f"  %kernel.1 = bf16[2,1,16,128]{{3,2,1,0}} custom-call(%w, %table, %q, %pages), {is_kernel}\n"
        "  %ag-done =",
    )
    network.chip.peak_flops, network.chip.hbm_bandwidth = 1e30, 1e4
    waiting = HloSchedule(kernel).wait_seconds(network, ASSUMED)
    n_bytes = 2 * 3 * 64 * 256 * 2 + 2 * 3 * 4 + 2 * (2 * 16 * 128 * 2)
    seconds = operation_seconds(Operation("attention", 0.0, n_bytes), network.chip, network.efficiency)
    assert 10 < seconds < 64 and waiting.exposed["data"] == pytest.approx(64 - seconds + 3 * 128)


@pytest.mark.slow
@pytest.mark.usefixtures("libtpu")
def test_a_compiled_program_sends_what_the_traced_one_does():
    placed = place_steps(small_config(), "v5e:2x2", "sft")["train"]
    program = placed.step.programs["gradient"]
    compiled = compile_program(program.function, program.arguments, dict(program.keywords), {})
    sizes = placed.step.mesh.shape
    traced = estimate_cost(compiled.jaxpr, placed.assumed).bytes_sent(sizes)
    sent = dict.fromkeys(traced, 0.0)
    for times, collective in collectives(compiled.schedule, placed.assumed):
        sent["+".join(collective.axes)] += times * collective.bytes_sent(sizes)
    assert sent["expert"] == pytest.approx(traced["expert"], rel=0.01)
    # The compiler sums some small weights' gradients whole instead of scattering the sum.
    assert 1 <= sent["data"] / traced["data"] < 1.2
    waiting = compiled.schedule.wait_seconds(placed.network, placed.assumed)
    assert 0 < waiting.exposed["data"] < waiting.sent["data"], "a v5e overlaps gathers with products"
