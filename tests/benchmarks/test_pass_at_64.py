"""What benchmarks.pass_at_64 makes of its rows: checked against all ways to split the samples in two halves."""

import itertools
import json

import pytest

from benchmarks import pass_at_64
from benchmarks.pass_at_64 import SUITES


def row(variant, attempts, solved, seed=0):
    """A row in which both suites have these numbers of solved attempts."""
    rates = {f"task-{i}": count / attempts for i, count in enumerate(solved)}
    return {
        "seed": seed,
        "variant": variant,
        "suites": {name: {"attempts": attempts, "solved": rates} for name in SUITES},
    }


@pytest.mark.parametrize("solved", [(0, 1, 4), (2, 0, 0), (3, 1, 2)])
def test_never_solved_and_solved_by_a_second_half_are_means_over_all_halves(solved):
    rows = [row("sft", 4, solved), row("rl", 2, (2, 0, 1))]
    measures = pass_at_64.summarize(rows)["three_bugs"]
    never, second = [], []
    for count in solved:
        samples = [True] * count + [False] * (4 - count)
        halves = list(itertools.combinations(range(4), 2))
        failed = [not any(samples[i] for i in half) for half in halves]
        rest = [any(samples[i] for i in range(4) if i not in half) for half in halves]
        never.append(sum(failed) / len(halves))
        second.append(sum(f and r for f, r in zip(failed, rest, strict=True)) / len(halves))
    by_rl = [never[0] * 1, never[1] * 0, never[2] * 1]  # one of two samples suffices
    assert measures["never_solved"] == pytest.approx(sum(never))
    assert measures["solves"]["sft"] == pytest.approx(sum(second) / sum(never))
    assert measures["solves"]["rl"] == pytest.approx(sum(by_rl) / sum(never))
    gain = measures["gain"]["rl"]
    assert gain["difference"] == pytest.approx((sum(by_rl) - sum(second)) / 3)
    assert gain["low"] <= gain["difference"] <= gain["high"]
    assert measures["pass_at_k"]["rl"]["2"][0] == pytest.approx(2 / 3)
    assert measures["pass_at_k"]["sft"].keys() == {"1", "2"}


def test_only_seeds_that_all_policies_have_are_counted():
    rows = [row("sft", 4, (0, 1, 4)), row("rl", 2, (2, 0, 1)), row("sft", 4, (4, 4, 4), seed=1)]
    assert pass_at_64.summarize(rows)["three_bugs"]["seeds"] == [0]
    assert pass_at_64.summarize(rows[1:]) == {}
    assert pass_at_64.summarize([]) == {}


def test_policies_that_cannot_be_compared_are_refused(capsys):
    for argument, sentence in (
        ("--policies=sft,ppo", "names 'ppo'; use some of sft, rl, rft"),
        ("--policies=rl", "lacks sft, whose samples say"),
    ):
        with pytest.raises(SystemExit):
            pass_at_64.main([argument])
        assert sentence in capsys.readouterr().err


def test_finished_rows_are_not_played_again(tmp_path, capsys):
    file = tmp_path / "rows.json"
    file.write_text(json.dumps([row("sft", 4, (0, 1, 4)), row("rl", 2, (2, 0, 1))]))
    pass_at_64.main(["--seeds=0", "--policies=sft,rl", f"--rows={file}"])
    assert json.loads(capsys.readouterr().out)["three_bugs"]["tasks"] == 3
