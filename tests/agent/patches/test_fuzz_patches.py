"""Random patches and edits have the results of git and of a reference: the short form of benchmarks/fuzz_patches.py."""

import asyncio

import pytest

from benchmarks.fuzz_patches import PatchWriter, fuzz
from composer_jax.agent.patches import apply, replace
from composer_jax.agent.tools import apply_patch
from composer_jax.tasks.patches import PatchError


def test_no_file_is_changed_in_part_and_results_are_equal():
    result = asyncio.run(fuzz(700, 3))
    assert result["wrong_cases"] == []
    kinds = ("unified", "envelope", "edit", "mangled unified")
    assert all(result[f"{kind} {end}"] for kind in kinds for end in ("applied", "refused"))
    assert result["git"]["applied here, applied by git"] > 30


def skip_misfits(draft, patch, apply_one=apply_patch._Draft.apply):
    try:
        return apply_one(draft, patch)
    except PatchError:
        return "skipped"


@pytest.mark.parametrize(
    ("place", "name", "fault"),
    [
        (apply, "fit_lines", lambda old, new, *rest: "".join(new)),
        (replace, "line_numbers", lambda text, old: [1] if old in text else []),
        (apply_patch, "encode_text", lambda path, text, before: text.encode(errors="replace")),
        (apply_patch, "decode_text", lambda path, data: data.decode()),
        (apply_patch._Draft, "apply", skip_misfits),
    ],
)
def test_faults_are_found(place, name, fault, monkeypatch):
    monkeypatch.setattr(place, name, fault)
    assert asyncio.run(fuzz(400, 4))["wrong"]


def test_a_seed_gives_its_cases_again():
    first, second = PatchWriter(1), PatchWriter(1)
    cases = [first.case() for _ in range(50)]
    assert cases == [second.case() for _ in range(50)] and len({repr(case) for case in cases}) > 45
