"""Attention over pages in programs for TPUs, compiled without one: no page is copied into another array."""

import dataclasses
import math
import re
from typing import Any

import pytest

from benchmarks.paged_attention import NETWORKS, PAGE, PAGES, ROWS, attention_figures, compile_attention
from composer_jax.models.presets import PRESETS
from composer_jax.parallel.mesh import make_mesh
from composer_jax.scale.programs import stage_steps
from composer_jax.scale.topology import tpu_slice
from composer_jax.schema.run_config import run_config
from configs.qwen3_30b_a3b import get_config

pytestmark = pytest.mark.usefixtures("libtpu")


def arrays_of(compiled: Any) -> dict[str, list[tuple[int, ...]]]:
    """Returns the shapes of a compiled program's results by the name of their operation."""
    shapes: dict[str, list[tuple[int, ...]]] = {}
    for name, sizes in re.findall(r"%?([\w-]+?)[.\d]* = \w+\[([\d,]+)\]", compiled.as_text()):
        shapes.setdefault(name, []).append(tuple(map(int, sizes.split(","))))
    return shapes


def is_gathered(operation: str, shape: tuple[int, ...], width: int) -> bool:
    """Returns whether an operation copies as much as a page of every row."""
    return operation.startswith(("gather", "copy")) and math.prod(shape) >= ROWS * PAGE * width


SLOW = [
    (name, topology, tokens, dtype)
    for name in NETWORKS
    for topology in ("v5p:1x1x1", "tpu7x:1x1x1")
    for tokens, dtype in [(1, "bfloat16"), (8, "bfloat16"), (8, "float32")]
]


@pytest.mark.parametrize(
    ("name", "topology", "tokens", "dtype"),
    [(name, "v5e:1x1", 1, "bfloat16") for name in NETWORKS]
    + [pytest.param(*case, marks=pytest.mark.slow) for case in SLOW],
)
def test_one_kernel_reads_the_pages(name, topology, tokens, dtype):
    shapes = arrays_of(compile_attention(name, topology, tokens, dtype, gathers=False))
    assert len(shapes["paged_attention"]) == 1
    width = NETWORKS[name].width
    assert not any(is_gathered(operation, shape, width) for operation, values in shapes.items() for shape in values)


def test_shapes_that_the_kernel_does_not_support_gather_blocks_of_pages():
    """It holds the queries of 16 tokens. The test above would find what 17 gather."""
    shapes = arrays_of(compile_attention("qwen3", "v5e:1x1", 17, gathers=False))
    assert "paged_attention" not in shapes
    assert any(is_gathered(operation, shape, 1024) for operation, values in shapes.items() for shape in values)


@pytest.mark.slow
def test_xla_counts_little_more_than_the_pages_themselves():
    figures = attention_figures("kimi", "v5e:1x1")
    assert figures["cache_mb"] < figures["mb"] < 1.3 * figures["cache_mb"]
    assert figures["gathered_mb"] > 5 * figures["mb"]


@pytest.mark.slow
@pytest.mark.parametrize(("preset", "layers", "width"), [("qwen3_30b_a3b", 2, 1024), ("kimi_k2_5", 3, 576)])
def test_a_decode_step_copies_no_pages_of_the_cache(preset, layers, width):
    model = dict(n_layers=layers, n_experts=16, vocab_size=2048, param_dtype="bfloat16")
    config = get_config().to_dict() | {"model": dataclasses.asdict(dataclasses.replace(PRESETS[preset], **model))}
    config["sampler"] |= {"slots": ROWS, "max_model_len": PAGES * PAGE, "prefill_shapes": ((4, 128),), "mesh": None}
    config["mesh"] = {}
    mesh = make_mesh(list(tpu_slice("v5e:1x1").devices))
    program = stage_steps(run_config(config), "evaluate", lambda _: mesh)["decode"].programs["decode"]
    shapes = arrays_of(program.function.lower(*program.arguments).compile())
    assert len(shapes["paged_attention"]) == layers - 1  # one per loop over layers of a kind
    n_pages = ROWS * PAGES + 1
    assert any(n_pages in shape for shape in shapes["get-tuple-element"])
    copies = [shape for operation, values in shapes.items() for shape in values if is_gathered(operation, shape, width)]
    assert not any(n_pages in shape or shape[-1] in (width, width + -width % 128) for shape in copies)
