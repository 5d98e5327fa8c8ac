"""A decode call for GPUs: it copies no pages where the kernel over pages can run, no loop inside a step has bounds that
the host reads, and page tables come in few lengths."""

import dataclasses
import functools
import re

import jax
import numpy as np
import pytest

from composer_jax.models.cache import abstract_cache
from composer_jax.models.config import ModelConfig
from composer_jax.models.model_def import ModelDef
from composer_jax.models.presets import PRESETS
from composer_jax.ops.local_gpu import LocalGpu
from composer_jax.parallel.mesh import make_mesh
from composer_jax.sampler import runner
from composer_jax.sampler.decode import CarriedRows, DecodeRows
from composer_jax.sampler.programs import decode_program
from composer_jax.sampler.runner import SHORTEST_CONTEXT, decode_tables
from tests.compilations import compiles_nothing
from tests.models.small import GROUPED_QUERY, small
from tests.ops.triton_lowering import pretend_gpu
from tests.sampler.conversations import assert_same, run_all

SIZES = dict(n_mtp_modules=0, n_layers=3, dispatch="ring")
WINDOWED = small(**SIZES | GROUPED_QUERY)
NETWORKS = {
    "latent": small(**SIZES),
    "grouped_query": dataclasses.replace(WINDOWED, sliding_window=None, full_attention_every=1),
    "windowed": WINDOWED,
}
ROWS, PAGE, PAGES = 64, 16, 64 * 16


def lowered(config: ModelConfig, platform: str, pages: int = PAGES, page: int = PAGE) -> str:
    """A decode call of ROWS contexts that fill the cache together."""
    config = dataclasses.replace(config, max_context=page * pages // ROWS)
    mesh, definition = make_mesh(jax.local_devices()[:1]), ModelDef(config)
    rows = DecodeRows(*[jax.ShapeDtypeStruct((ROWS,), t) for t in (np.int32, np.int32, np.int32, np.uint32)], None)
    rows = rows._replace(tables_BJ=jax.ShapeDtypeStruct((ROWS, pages // ROWS), np.int32))
    program = decode_program(definition, mesh, 8, (0,), processed=False)
    cache = abstract_cache(config, mesh, pages, page)
    last = jax.ShapeDtypeStruct((ROWS,), np.int32)
    traced = program.trace(*definition.abstract_weights(mesh), cache, *rows, last, *CarriedRows(last, last, last))
    return traced.lower(lowering_platforms=(platform,)).as_text()


@functools.cache
def loops(network: str, platform: str) -> list[str]:
    """The conditions of all loops of a decode call, lowered."""
    return conditions(lowered(NETWORKS[network], platform))


def conditions(text: str) -> list[str]:
    assert text.count("stablehlo.while(") > 1
    conditions = re.findall(r"cond \{\n(.*?)\n\s*stablehlo\.return", text, re.DOTALL)
    assert len(conditions) == text.count("stablehlo.while(")
    return conditions


def read_by_host(conditions: list[str]) -> list[str]:
    """Those whose bound is not a constant of the program."""
    constant = r"\s*%c\w* = stablehlo\.constant .*\n\s*%\d+ = stablehlo\.compare LT, %iterArg\w*, %c\w*, .*"
    return [text for text in conditions if not re.fullmatch(constant, text)]


@pytest.mark.parametrize("network", ["latent", "grouped_query"])
def test_only_the_loop_over_new_tokens_is_read_by_the_host(network):
    """It ends when all rows have; those over layers and blocks have constant bounds."""
    assert len(read_by_host(loops(network, "cuda"))) == 1
    assert len(read_by_host(loops(network, "tpu"))) > 1


def test_a_gpu_reads_no_blocks_before_a_window():
    """At the price of loops that the host reads: one for each of the two runs of layers."""
    assert WINDOWED.sliding_window is not None
    assert len(read_by_host(loops("windowed", "cuda"))) == 3


@pytest.mark.parametrize("preset", ["smollm2_135m", "qwen3_30b_a3b", "moonlight_16b_a3b"])
def test_the_kernel_reads_the_cache_of_published_networks_where_it_lies(preset, monkeypatch):
    fields = dict(n_layers=4, param_dtype="bfloat16", dispatch="ring")
    config, pages, page = dataclasses.replace(PRESETS[preset], **fields), ROWS * 8, 64
    plain = lowered(config, "cuda", pages, page)
    pretend_gpu(monkeypatch, LocalGpu("NVIDIA H100 80GB HBM3", (9, 0), None))
    for text, reader in (plain, "gather"), (lowered(config, "cuda", pages, page), "custom_call"):
        readers = r"stablehlo\.(custom_call|gather|\w*slice|reshape|transpose|convert)\b"
        assert set(re.findall(rf"{readers}.* : \([^)]*tensor<4x{pages}x{page}x", text)) == {reader}
        assert len(read_by_host(conditions(text))) == 1


@pytest.mark.parametrize(
    ("tokens", "expected"), [(512, [8]), (1024, [16]), (4096, [16, 32, 64]), (4160, [9, 17, 33, 65])]
)
def test_page_tables_are_halves_of_the_longest_on_gpus_only(tokens, expected):
    page = SHORTEST_CONTEXT // 16
    assert decode_tables(1, 2 * SHORTEST_CONTEXT, "gpu", has_window=False) == (1,)
    lengths = decode_tables(tokens // page, page, "gpu", has_window=False)
    assert list(lengths) == expected
    for platform, has_window in (("cpu", False), ("tpu", False), ("gpu", True)):
        assert decode_tables(tokens // page, page, platform, has_window=has_window) == (tokens // page,)


def test_calls_that_only_verify_drafts_have_the_longest_table(new_sampler, monkeypatch):
    """They read as far as the contexts reach, so shorter ones would be programs to compile for nothing."""
    monkeypatch.setattr(runner, "decode_tables", lambda longest, *_, **__: (2, 3, longest))
    calls = new_sampler(drafts="prompt_lookup", draft_tokens=3).engines[0].runner.warm_up_calls(processed=False)
    decoding = [call.args for call in calls if call.func.__name__ == "_call_decode"]
    lengths = lambda verifies: {pages for (_, pages), drafts, _ in decoding if (drafts is not None) == verifies}  # noqa: E731
    assert lengths(False) == {2, 3, 8} and lengths(True) == {8}


def test_conversations_do_not_depend_on_the_lengths_of_page_tables(sampler, new_sampler, monkeypatch):
    seeds, lengths = range(300, 306), set()
    expected = run_all(sampler, seeds)
    monkeypatch.setattr(runner, "decode_tables", lambda longest, *_, **__: (2, 3, longest))
    several = new_sampler()
    call = several.engines[0].runner._start_decode

    def record(requests, shape, *arguments):
        lengths.add(shape[1])
        return call(requests, shape, *arguments)

    monkeypatch.setattr(several.engines[0].runner, "_start_decode", record)
    several.warm_up()
    with compiles_nothing():
        assert_same(run_all(several, seeds), expected)
    assert len(lengths) > 1
