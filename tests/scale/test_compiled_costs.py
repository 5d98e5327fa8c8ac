"""Which programs benchmarks.compiled_costs compiles, and how it prints two commits."""

import jax.extend.core
import pytest

from benchmarks.compiled_costs import CASES, case_figures, main, pair_figures, place_case


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


@pytest.mark.slow
@pytest.mark.usefixtures("libtpu")
@pytest.mark.parametrize("name", [name for name in CASES if name.endswith(("-v5e", "-v6e"))])
def test_every_loop_of_a_case_runs_once(name):
    program = place_case(CASES[name]).step.programs["gradient"]
    assert scan_lengths(program.function.trace(*program.arguments).jaxpr.jaxpr) == {1}


@pytest.mark.slow
@pytest.mark.usefixtures("libtpu")
def test_xla_counts_both_programs():
    figures = case_figures("tiny-v5e")
    assert figures.keys() == {"gradient", "update"}
    for of_program in figures.values():
        assert all(of_program[name] > 0 for name in ("gigaflops", "gigabytes", "milliseconds"))
        assert of_program["milliseconds"] < 1000
    assert figures["gradient"]["unknown_kernels"] > 0 == figures["update"]["unknown_kernels"]
