"""Which programs benchmarks.compiled_costs compiles, and how it prints two commits."""

import types

import jax.extend.core
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks import compiled_costs
from benchmarks.compiled_costs import CASES, case_figures, known_seconds, main, pair_figures, place_case
from composer_jax.scale.programs import Program
from composer_jax.scale.topology import tpu_slice


def test_an_older_commit_stands_before_each_of_xlas_figures():
    before = {"tiny-v5e": {"update": {"gigaflops": 3.0, "milliseconds": 2.0}}}
    now = {"tiny-v5e": {"update": {"gigaflops": 1.0, "milliseconds": 2.5, "our_gigaflops": 1.1}}}
    assert pair_figures(before, now) == {
        "tiny-v5e": {"update": {"gigaflops": [3.0, 1.0], "milliseconds": [2.0, 2.5], "our_gigaflops": 1.1}}
    }


def test_an_unknown_case_is_named(capsys):
    with pytest.raises(SystemExit):
        main(["tiny-v4"])
    assert "there is no case tiny-v4; use moonlight-v6e, tiny-v5e" in capsys.readouterr().err


def scan_lengths(jaxpr) -> set[int]:
    """Returns the lengths of scans, without those of kernels, which stand in the branches of a choice by platform."""
    lengths = set()
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan":
            lengths.add(equation.params["length"])
        if equation.primitive.name == "cond":
            continue
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            lengths |= scan_lengths(inner)
    return lengths


@pytest.mark.usefixtures("libtpu")
@pytest.mark.parametrize("name", ["qwen3-v5e", "kimi-v5e"])
def test_every_loop_of_a_case_runs_once(name):
    program = place_case(CASES[name]).step.programs["gradient"]
    assert scan_lengths(program.function.trace(*program.arguments).jaxpr.jaxpr) == {1}


def test_operations_of_unknown_time_are_left_out():
    assert known_seconds(0.25) == 0.25 and known_seconds(-10.75) == 0.25


@pytest.mark.usefixtures("libtpu")
def test_a_product_is_counted(monkeypatch):
    sharding = NamedSharding(tpu_slice("v5e:1x1").mesh({}), PartitionSpec())
    x = jax.ShapeDtypeStruct((1024, 1024), jnp.float32, sharding=sharding)
    programs = {"product": Program(jax.jit(jnp.matmul), (x, x), {}, {}, {}, is_update=True)}
    placed = types.SimpleNamespace(step=types.SimpleNamespace(programs=programs))
    monkeypatch.setattr(compiled_costs, "place_case", lambda case: placed)
    (figures,) = case_figures("tiny-v5e").values()
    assert figures["gigaflops"] == 2.15
    assert figures["gigabytes"] >= 0.012, "two operands and the result"
    assert 0 < figures["milliseconds"] < 1
