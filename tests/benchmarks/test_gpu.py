"""What benchmarks.gpu prints, from its parts' tiny forms, and what it does without a card."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
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
    timing,
    train,
    worker,
)
from benchmarks.gpu_parts.compare_training import compare_training as compare
from benchmarks.gpu_parts.packed_batch import packed_batch, whole_rows
from benchmarks.gpu_parts.train import train_shape
from benchmarks.gpu_parts.worker import PartError
from composer_jax.models import supported_dtype
from composer_jax.models.flops import document_lengths
from composer_jax.models.model_def import ModelDef
from composer_jax.ops.local_gpu import LocalGpu
from composer_jax.ops.packed_attention import AttentionMask, attend_rows

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
    whole = whole_rows(batch)
    assert (whole["segments"] == 1).all() and (whole["positions"] == np.arange(200)).all()
    assert all(whole[name].dtype == array.dtype for name, array in batch.items())  # the same compiled program


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


def test_segments_are_no_constants_of_the_program():
    """XLA computes what follows from constants, such as a table of documents, while it compiles."""
    q = jnp.ones((1, 8, 1, 4))
    jitted = []
    call = attention._call(
        lambda q, k, v, mask: jitted.append(mask.segments_BS) or q, np.ones((1, 8)), (q,) * 3, q, True
    )
    call()
    assert isinstance(jitted[0], jax.core.Tracer)


def test_cudnns_attention_gets_values_as_wide_as_keys(monkeypatch):
    public = jax.nn.dot_product_attention
    monkeypatch.setattr(
        jax.nn, "dot_product_attention", lambda *args, **of: public(*args, **of | {"implementation": "xla"})
    )
    q, k, v = (jax.random.normal(jax.random.key(i), (1, 8, 2, width)) for i, width in enumerate((6, 6, 4)))
    ones = jnp.ones((1, 8), jnp.int32)
    expected = attend_rows(q, k, v, AttentionMask(jnp.arange(8), ones, ones))
    np.testing.assert_allclose(attention._cudnn(q, k, v, None), expected, rtol=1e-4, atol=1e-5)


def test_a_call_of_ours_without_memory_is_left_out_and_another_error_ends_the_part():
    def fail(text):
        raise jax.errors.JaxRuntimeError(text)

    calls = {"ours": lambda: fail("RESOURCE_EXHAUSTED: Out of memory"), "other": lambda: fail(""), "third": lambda: 0}
    rates = timing.teraflops(calls, dict.fromkeys(calls, 1.0), "ours", in_flight=1, small=True)
    assert rates.pop("third") > 0 and rates == {"ours": None, "other": None}
    with pytest.raises(jax.errors.JaxRuntimeError):
        timing.compile_calls({"ours": lambda: fail("INTERNAL: no kernel")}, "ours")


def test_training_is_compared_in_turn_and_a_peer_that_fails_is_left_out():
    order = []

    def ours():
        order.append("ours")
        rate = 100.0 * len(order)
        return {
            "tokens_per_s": rate,
            "tokens_per_s_whole_rows": rate / 2,
            "first_step_s": rate,
            "attention_form": "plain",
        }

    def peer(options):
        if "--compiled" in options:
            raise PartError("no compiler")
        order.append("peer")
        return {"tokens_per_s": 50.0, "first_step_s": 2.0}

    figures = compare(ours, peer, 3, small=True)
    assert order == ["ours", "peer"] * 3
    assert figures["tokens_per_s"] == 300 and figures["first_step_s"] == 100 and figures["rounds"] == 3
    assert figures["vs_transformers"] == 6 and figures["transformers"]["tokens_per_s"] == 50
    assert figures["vs_transformers_whole_rows"] == 3 and figures["vs_torch_compile_whole_rows"] is None
    assert figures["torch_compile"] is None and figures["vs_torch_compile"] is None


@pytest.mark.parametrize("fails", ["ours", "transformers"])
def test_a_side_that_fails_in_a_later_round_keeps_its_earlier_ones(fails):
    calls = {"ours": 0, "transformers": 0, "torch_compile": 0}

    def measure(name):
        calls[name] += 1
        if name == fails and calls[name] == 2:
            raise PartError("lost")
        return {"tokens_per_s": 50.0}

    figures = compare(
        lambda: measure("ours"),
        lambda options: measure("torch_compile" if "--compiled" in options else "transformers"),
        3,
        small=True,
    )
    assert calls == {"ours": 3, "transformers": 3, "torch_compile": 3} | {fails: 2}
    assert figures["vs_transformers"] == figures["vs_torch_compile"] == 1 and figures["torch_compile"]["rounds"] == 3
    assert figures["rounds"] == (1 if fails == "ours" else 3)
    assert figures.get("error") == ("lost" if fails == "ours" else None)


def test_without_our_figures_those_of_the_peers_remain():
    def ours():
        raise PartError("lost")

    figures = compare(ours, lambda options: {"tokens_per_s": 50.0}, 1, small=True)
    assert figures["error"] == "lost" and figures["vs_transformers"] is None
    assert figures["transformers"]["tokens_per_s"] == 50


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
    def run_part(module, options, cache, limit_s, python):
        if module == "moe":
            raise PartError("no kernel")
        if module == "decode":
            raise worker.NoCardError("no GPU")
        return {"options": options}

    monkeypatch.setattr(gpu, "run_part", run_part)
    with pytest.raises(SystemExit) as ended:
        gpu.main(["moe", "grouped", "decode", "--small"])
    assert ended.value.code == 1
    printed = capsys.readouterr()
    figures = {"moe": {"error": "no kernel"}, "grouped": {"options": ["--small"]}, "decode": {"error": "no GPU"}}
    assert json.loads(printed.out) == figures
    of_parts = [json.loads(line) for line in printed.err.splitlines() if line.startswith("{")]
    assert of_parts == [{part: of_part} for part, of_part in figures.items()]
    with pytest.raises(SystemExit) as ended:
        gpu.main(["decode"])
    assert ended.value.code == worker.NO_CARD and not capsys.readouterr().out


def script(folder, text):
    """Returns an executable that stands for a part's Python."""
    file = folder / "python"
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return str(file)


def test_a_part_that_takes_too_long_is_killed(tmp_path):
    with pytest.raises(PartError, match=r"moe was killed after 0\.3 s; --limit=SECONDS"):
        worker.run_part("moe", [], tmp_path, 0.3, script(tmp_path, "exec sleep 60"))


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('echo \'{"error": "ValueError: wrong"}\'; echo a note >&2; exit 1', "ValueError: wrong"),
        ("echo no libcuda >&2; exit 7", "moe ended with status 7: no libcuda"),
    ],
)
def test_a_failed_part_has_its_error(tmp_path, text, error):
    with pytest.raises(PartError) as raised:
        worker.run_part("moe", [], tmp_path, 60, script(tmp_path, text))
    assert str(raised.value) == error


def test_parts_in_this_environment_find_the_checkout_first(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/theirs")
    python = script(tmp_path, 'echo "\\"$PYTHONPATH\\""')
    assert worker.run_part("moe", [], tmp_path, 60, python) == "/theirs"
    monkeypatch.setattr(sys, "executable", python)
    assert worker.run_part("moe", [], tmp_path, 60, python) == f"{ROOT}:/theirs"


def test_an_error_of_jax_is_printed_without_the_notes_that_jax_adds(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["moe", "--small"])
    with pytest.raises(SystemExit) as ended:
        worker.print_figures(lambda small: jax.jit(jnp.add)(jnp.ones(2), jnp.ones(3)))
    assert ended.value.code == 1
    assert json.loads(capsys.readouterr().out)["error"].startswith("TypeError: add got incompatible shapes")


def test_an_unknown_part_is_named(capsys):
    with pytest.raises(SystemExit):
        gpu.main(["trian"])
    assert "there is no part trian; use train, moe" in capsys.readouterr().err


def test_training_steps_have_a_rate_beside_a_products():
    figures = moe.measure(small=True, recompute=False)
    assert min(figures[key] for key in ("tokens_per_s", "tokens_per_s_whole_rows", "first_step_s")) > 0
    assert figures["attention_form"] == "plain"
    fraction = figures["model_tflops"] / figures["product_tflops"]
    assert 0 < figures["fraction_of_product"] == pytest.approx(fraction, rel=0.01)


def test_too_little_memory_recomputes_layers_in_a_new_process_and_from_then_on():
    runs = []

    def run(part, options):
        runs.append(list(options))
        if not options:
            raise PartError("JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory")
        return {"recomputes_layers": True}

    measure = gpu.recomputing_where_needed("train", run)
    assert measure() == measure() == {"recomputes_layers": True}
    assert runs == [[], ["--recompute"], ["--recompute"]]

    def broken(part, options):
        raise PartError("INTERNAL: no kernel")

    with pytest.raises(PartError, match="no kernel"):
        gpu.recomputing_where_needed("train", broken)()


@pytest.mark.parametrize("part", [train, moe])
def test_a_card_without_bfloat16_trains_in_float32(part, monkeypatch):
    monkeypatch.setattr(supported_dtype, "local_gpu", lambda: LocalGpu("Tesla T4", (7, 5), None))
    monkeypatch.setattr(part, "training_figures", lambda config, *_, recompute, **__: (config.compute_dtype, recompute))
    assert part.measure(small=False, recompute=True) == ("float32", True)


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
