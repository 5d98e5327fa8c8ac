"""Memory breakdowns, the compiler's messages, slices, and wrong requests."""

import dataclasses
import sys

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from composer_jax.errors import UserError
from composer_jax.parallel.mesh import make_mesh
from composer_jax.scale.efficiency import Efficiency
from composer_jax.scale.network import Network, Span
from composer_jax.scale.plan import Memory, OutOfMemory, memory_breakdown, parse_out_of_memory, plan_stage
from composer_jax.scale.programs import Program
from composer_jax.scale.topology import Slice, tpu_slice
from composer_jax.train.learner import HOST_MEMORY
from tests.scale.configuration import small_config

REPLICATED = NamedSharding(make_mesh(data=8), PartitionSpec())


def array(n):
    return jax.ShapeDtypeStruct((n,), np.int8, sharding=REPLICATED)


PROGRAM = Program(
    None,
    (array(10), array(3)),
    {},
    resident={"params": array(10), "batch": array(3), "optimizer": array(20)},
    outputs={"gradient": array(10)},
)


def test_memory_is_resident_arrays_outputs_and_temporaries():
    assert memory_breakdown(PROGRAM, Memory(arguments=16.0, outputs=11.0, temporary=100.0), 1000.0) == {
        "params": 10,
        "batch": 3,
        "optimizer": 20,
        "gradient": 10,
        "temporary": 100,
        "other": 3 + 1,
        "total": 147,
        "limit": 1000,
    }


def test_arrays_in_the_hosts_memory_take_none_of_the_device():
    in_host = jax.ShapeDtypeStruct((20,), np.int8, sharding=REPLICATED.with_memory_kind(HOST_MEMORY))
    program = dataclasses.replace(
        PROGRAM, arguments=(*PROGRAM.arguments, in_host), resident={**PROGRAM.resident, "optimizer": in_host}
    )
    memory = memory_breakdown(program, Memory(arguments=16.0, outputs=11.0, temporary=100.0), 1000.0)
    assert (memory["optimizer"], memory["other"], memory["total"]) == (0, 3 + 1, 127)


def test_out_of_memory_has_the_compilers_numbers():
    memory = memory_breakdown(PROGRAM, OutOfMemory(2000.0, 1000.0, "too large"), 1000.0)
    assert (memory["temporary"], memory["total"], memory["refused"]) == (2000 - 23, 2020, "too large")
    without_numbers = memory_breakdown(PROGRAM, OutOfMemory(None, None, "too large"), 1000.0)
    assert (without_numbers["temporary"], without_numbers["total"]) == (0, 43)


@pytest.mark.parametrize(
    ("message", "needed", "available"),
    [
        (
            "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO "
            "temporaries (298.02G) exceeds available HBM (95.73G). HLO module: jit_f.\nSee elsewhere",
            298.02 * 2**30,
            95.73 * 2**30,
        ),
        ("RESOURCE_EXHAUSTED: Ran out. Used 1.5T of 95.74G hbm. Exceeded", 1.5 * 2**40, 95.74 * 2**30),
        ("RESOURCE_EXHAUSTED: of something else", None, None),
    ],
)
def test_out_of_memory_messages_are_parsed(message, needed, available):
    error = parse_out_of_memory(message)
    assert (error.needed, error.available) == (needed, available) and "\n" not in error.message


def test_an_axis_of_minus_one_takes_the_remaining_devices():
    eight = Slice("v5e:2x4", None, (2, 4), tuple(jax.devices()))
    sizes = {"replica": 1, "data": -1, "expert": 2, "context": 1, "tensor": 1}
    assert eight.mesh(sizes).shape["data"] == 4
    for changes, words in (
        ({"expert": 3}, "leaves none"),
        ({"expert": -1}, "only one axis"),
        ({"data": 3}, "6 devices"),
    ):
        with pytest.raises(UserError, match=words):
            eight.mesh(sizes | changes)


@pytest.mark.parametrize("name", ["v9:2x2", "v5p", "v5e:2", "v5p:2xx2"])
def test_malformed_topologies_are_refused(name):
    with pytest.raises(UserError, match=f"--topology={name} is unknown; it is a chip"):
        tpu_slice(name)


def test_dimensions_of_other_chips():
    with pytest.raises(UserError, match="v5p slices have 3 dimensions, not 2"):
        tpu_slice("v5p:4x4")


def test_an_unknown_stage_is_told_before_libtpu_is_needed(monkeypatch):
    monkeypatch.setitem(sys.modules, "libtpu", None)
    with pytest.raises(UserError, match="--stage=decode is unknown; the stages are pretrain"):
        plan_stage(small_config(), "v5e:2x2", "decode")


def test_without_libtpu_the_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "libtpu", None)
    with pytest.raises(UserError, match=r'pip install "composer_jax\[tpu\]"'):
        tpu_slice("v5e:2x2")


@pytest.mark.usefixtures("libtpu")
@pytest.mark.parametrize("name", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
def test_the_devices_of_a_slice_are_called_as_those_of_its_chip(name):
    tpus = tpu_slice(name)
    assert {device.device_kind for device in tpus.devices} == {tpus.chip.kind}


@pytest.mark.usefixtures("libtpu")
def test_axes_share_a_dimension_of_the_torus_where_there_is_no_other_way():
    tpus = tpu_slice("v5p:4x4x8")

    def axes(**sizes):
        mesh = tpus.mesh(dict.fromkeys(("replica", "data", "expert", "context", "tensor"), 1) | sizes)
        return Network(mesh, tpus.chip, tpus.torus, Efficiency())

    whole = axes(data=16, expert=8)
    assert whole.spans(("data",)) == [Span(4, 2.0), Span(4, 2.0)] and whole.spans(("expert",)) == [Span(8, 2.0)]
    shared = axes(data=32, context=2, tensor=2)
    assert [span.chips for span in shared.spans(("tensor",))] == [2]
    assert shared.bandwidth(("tensor",)) < whole.bandwidth(("expert",))
    assert shared.spans(("data", "context", "tensor")) == [Span(4, 2.0), Span(4, 2.0), Span(8, 2.0)]
