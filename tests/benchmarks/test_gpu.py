"""What benchmarks.gpu prints, from its parts' tiny forms, and what it does without a card."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from benchmarks import gpu
from benchmarks.gpu_parts import (
    attention,
    compare_training,
    decode,
    grouped,
    moe,
    rl,
    train,
    training_speed,
    worker,
)
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
        assert of_forms.pop("form", "plain") == "plain"
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


def test_training_steps_have_a_rate_beside_a_products():
    figures = moe.measure(True)
    assert figures["tokens_per_s"] > 0 and figures["first_step_s"] > 0
    assert figures["attention_form"] == "plain"
    fraction = figures["model_tflops"] / figures["product_tflops"]
    assert 0 < figures["fraction_of_product"] == pytest.approx(fraction, rel=0.01)


def test_too_little_memory_recomputes_layers(monkeypatch):
    def measure(config, rows, length, *, small):
        if not config.remat:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
        return {"recomputes_layers": config.remat}

    monkeypatch.setattr(training_speed, "_measure", measure)
    assert train.measure(True) == {"recomputes_layers": True}


def test_a_decode_step_stands_beside_reading_once(monkeypatch):
    monkeypatch.setattr(decode, "decode_seconds", lambda config, conversations: 2.0)
    monkeypatch.setattr(decode, "seconds", lambda *_, **__: {"copy": 2.0**21 / 1e9})
    (figures,) = decode.measure(True).values()
    assert figures["copy_gb_per_s"] == 1 and figures["tokens_per_s"] == 2
    assert figures["fraction_of_limit"] == pytest.approx(figures["reading_once_ms"] / 2000, rel=0.01)


def test_reading_once_is_weights_and_the_cache_of_every_context():
    config, conversations = dataclasses.replace(train_shape(False)[0], param_dtype="bfloat16"), 64
    # Keys and values of three heads of 64 numbers in 30 layers, bfloat16; the cache also holds each token.
    cache = conversations * decode.LENGTH * (30 * 2 * 3 * 64 * 2 + 4)
    weights = 2 * ModelDef(config).parameter_count()
    assert decode.read_bytes(config, conversations) == pytest.approx(weights + cache, rel=1e-3)


def test_rl_leaves_out_the_steps_that_compile(monkeypatch):
    row = {"step_s": 2.0, "rollout_s": 1.5, "train_s": 0.5}
    slow = {name: 9 * seconds for name, seconds in row.items()}
    monkeypatch.setattr(rl, "run", lambda steps, folder: [slow] * 3 + [row] * (steps - 3))
    expected = {"completions_per_s": 32.0, "rollout_s": 1.5, "train_s": 0.5, "first_step_s": 18.0}
    assert rl.measure(True) == expected


def test_the_command_ends_with_a_key_per_part():
    command = [sys.executable, "-m", "benchmarks.gpu", "--small", "grouped"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    (of_forms,) = json.loads(done.stdout.splitlines()[-1])["grouped"].values()
    assert of_forms["ours"]["forward"] > 0 and of_forms["tokamax"].keys() == {"forward", "with_gradients"}
