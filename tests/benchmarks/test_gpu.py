"""What benchmarks.gpu prints, from its parts' tiny forms, and what it does without a card."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import gpu
from benchmarks.gpu_parts import attention, compare_training, grouped, worker
from benchmarks.gpu_parts.compare_training import compare_training as compare
from benchmarks.gpu_parts.packed_batch import packed_batch
from benchmarks.gpu_parts.train import train_shape
from benchmarks.gpu_parts.worker import PartError
from composer_jax.models.flops import document_lengths
from composer_jax.models.model_def import ModelDef

ROOT = Path(__file__).parents[2]


def test_rows_have_eight_unequal_documents_and_a_tenth_of_padding():
    batch = packed_batch(3, 200, 50)
    assert all(len(document_lengths(row[None])) == 8 for row in batch["segments"])
    assert len(set(document_lengths(batch["segments"]))) > 8
    assert (batch["weights"].sum(1) == 180).all() and (batch["weights"] == (batch["segments"] > 0)).all()
    for segments, positions in zip(batch["segments"], batch["positions"], strict=True):
        for document in range(1, 9):
            inside = positions[segments == document]
            np.testing.assert_array_equal(inside, np.arange(len(inside)))


@pytest.mark.parametrize("module", [attention, grouped])
def test_forms_have_rates_forward_and_with_gradients(module, monkeypatch):
    shapes = "SMALL_HEADS" if module is attention else "SMALL_SHAPES"
    monkeypatch.setattr(module, shapes, dict(list(getattr(module, shapes).items())[-1:]))
    for of_forms in module.measure(True).values():
        assert "ours" in of_forms
        for form, rates in of_forms.items():
            assert rates.keys() == {"forward", "with_gradients"}
            assert form in ("tokamax", "cudnn_unpacked") or all(rate > 0 for rate in rates.values())


def test_training_is_compared_in_turn_and_a_peer_that_fails_is_left_out():
    order = []

    def ours():
        order.append("ours")
        return {"tokens_per_s": 100.0 * len(order), "first_step_s": float(len(order)), "recomputes_layers": False}

    def peer(options):
        if "--compiled" in options:
            raise PartError("no compiler")
        order.append("peer")
        return {"tokens_per_s": 50.0, "first_step_s": 2.0}

    figures = compare(ours, peer, 3, small=True)
    assert order == ["ours", "peer"] * 3
    assert figures["tokens_per_s"] == 300 and figures["first_step_s"] == 1
    assert figures["vs_transformers"] == 6 and figures["transformers"]["tokens_per_s"] == 50
    assert figures["torch_compile"] is None and figures["vs_torch_compile"] is None


def test_transformers_gets_our_shape():
    shape, (config, rows, length) = compare_training.shape_for_torch(False), train_shape(False)
    assert (shape["rows"], shape["length"]) == (rows, length) == (16, 2048)
    assert shape["tokens"] == rows * (length - 205)
    llama = SimpleNamespace(**shape["llama"])
    d, f, heads, keys, width = (
        *(llama.hidden_size, llama.intermediate_size),
        *(llama.num_attention_heads, llama.num_key_value_heads, llama.head_dim),
    )
    layer = d * width * (2 * heads + 2 * keys) + 3 * d * f + 2 * d

    assert ModelDef(config).parameter_count() == llama.vocab_size * d + llama.num_hidden_layers * layer + d


def test_a_part_that_fails_leaves_the_others_and_the_status_is_1(monkeypatch, capsys):
    def run_part(module, options, cache):
        if module == "moe":
            raise PartError("out of memory")
        return {"options": options}

    monkeypatch.setattr(gpu, "run_part", run_part)
    with pytest.raises(SystemExit) as ended:
        gpu.main(["moe", "grouped", "--small"])
    assert ended.value.code == 1
    printed = json.loads(capsys.readouterr().out)
    assert printed == {"moe": {"error": "out of memory"}, "grouped": {"options": ["--small"]}}


def test_without_a_card_one_sentence_says_so(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["moe"])
    with pytest.raises(SystemExit) as ended:
        worker.print_figures(lambda small: {})
    assert ended.value.code == worker.NO_CARD
    assert capsys.readouterr().err.count("\n") == 1


def test_an_unknown_part_is_named(capsys):
    with pytest.raises(SystemExit):
        gpu.main(["trian"])
    assert "there is no part trian; use train, moe" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parity
def test_transformers_takes_training_steps(tmp_path):
    shape = compare_training.shape_for_torch(True)
    figures = worker.run_part("train_torch", [f"--shape={json.dumps(shape)}", "--small"], tmp_path)
    assert figures["tokens_per_s"] > 0 and figures["first_step_s"] > 0


@pytest.mark.slow
def test_the_command_ends_with_a_key_per_part():
    command = [sys.executable, "-m", "benchmarks.gpu", "--small", "--rounds=1", "--torch-python=false"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, stdout=subprocess.PIPE, text=True, check=True)
    figures = json.loads(done.stdout)
    assert list(figures) == list(gpu.PARTS)
    assert figures["train"]["tokens_per_s"] > 0 and figures["train"]["vs_transformers"] is None
    assert (
        0
        < figures["moe"]["fraction_of_product"]
        == pytest.approx(figures["moe"]["model_tflops"] / figures["moe"]["product_tflops"], rel=0.01)
    )
    for of_step in figures["decode"].values():
        assert of_step["fraction_of_limit"] == pytest.approx(of_step["reading_once_ms"] / of_step["step_ms"], rel=0.01)
    assert all(value > 0 for value in figures["rl"].values())
