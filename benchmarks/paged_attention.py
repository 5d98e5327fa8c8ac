"""What XLA says of both forms of attention over pages on TPUs: `python -m benchmarks.paged_attention`.

One layer of 16 rows that attend to 1,024 tokens each with one new token, in bfloat16, compiled by libtpu without a TPU:
by the kernel that reads pages by their numbers (composer_jax/ops/tpu_paged_attention.py), and in blocks of gathered
pages (composer_jax/ops/cached_attention.py), here one block, because XLA's cost analysis counts a loop body once.

Prints one JSON object, {network: {chip: figures}} of one device:
    cache_mb               the pages that the rows attend to
    mb, gathered_mb        memory traffic by XLA's count, which includes values that stay on the chip. A kernel tells
                           XLA its traffic (ops/tpu_paged_attention.py: _full_tables_cost).
    ms, gathered_ms        XLA's estimate of the time
    read_ms                cache_mb over the bandwidth of the device's HBM
"""

import json
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from composer_jax.ops.cached_attention import KeyRange, LayerCache, attend_cache
from composer_jax.ops.entry_parts import EntryParts
from composer_jax.scale.topology import disable_tpu_hardware, tpu_slice

ROWS, PAGES, PAGE = 16, 16, 64
LAYERS = 4
"""Of the cache, of which one is read."""
SLICES = {"v5e": "v5e:1x1", "v5p": "v5p:1x1x1", "tpu7x": "tpu7x:1x1x1"}


class Network(NamedTuple):
    parts: EntryParts
    heads: int
    width: int
    """Numbers of an entry."""


NETWORKS = {
    "qwen3": Network(EntryParts(4, (128,), 128), 32, 1024),
    "kimi": Network(EntryParts(1, (512, 64), 512, value_in_key=True), 64, 576),
    "smollm2": Network(EntryParts(3, (64,), 64), 9, 384),
}


def compile_attention(name: str, topology: str, tokens: int = 1, dtype: str = "bfloat16", *, gathers: bool) -> Any:
    """Returns the compiled program of one device of a slice, inside shard_map with its VMA types.

    tokens: new tokens of a row.
    gathers: asks for blocks of gathered pages, which any function that cuts entries has.
    """
    network = NETWORKS[name]
    parts, width = network.parts, network.width
    mesh = Mesh(tpu_slice(topology).devices[:1], ("data",))
    array: Any = lambda *sizes, dtype=jnp.int32: jax.ShapeDtypeStruct(  # noqa: E731
        sizes, dtype, sharding=NamedSharding(mesh, PartitionSpec())
    )

    def program(q, entries, layer, tables, keys):
        split = (lambda *entry: parts(*entry)) if gathers else parts  # noqa: E731
        return attend_cache(q, LayerCache(entries, None, layer, tables, width), split, keys)

    rows, pages, scalar = PartitionSpec("data"), PartitionSpec(None, "data"), PartitionSpec()
    mapped = jax.shard_map(program, mesh=mesh, in_specs=(rows, pages, scalar, rows, rows), out_specs=rows)
    q = array(ROWS, tokens, network.heads, parts.key_width, dtype=dtype)
    entries = array(LAYERS, ROWS * PAGES, PAGE, width + -width % 128, dtype=dtype)
    keys = KeyRange(array(ROWS, tokens), array(ROWS, tokens))
    return jax.jit(mapped).lower(q, entries, array(), array(ROWS, PAGES), keys).compile()


def attention_figures(name: str, topology: str) -> dict[str, float]:
    """Returns the figures of a network on a slice."""
    width, chip = NETWORKS[name].width, tpu_slice(topology).chip
    cache = ROWS * PAGES * PAGE * (width + -width % 128) * 2
    figures = {"cache_mb": cache / 1e6, "read_ms": cache / (chip.hbm_bandwidth / chip.devices) * 1e3}
    for prefix, gathers in (("", False), ("gathered_", True)):
        costs = compile_attention(name, topology, gathers=gathers).cost_analysis()
        figures |= {f"{prefix}mb": costs["bytes accessed"] / 1e6, f"{prefix}ms": costs["optimal_seconds"] * 1e3}
    return {key: round(value, 4) for key, value in figures.items()}


def main() -> None:
    figures = {
        name: {chip: attention_figures(name, topology) for chip, topology in SLICES.items()} for name in NETWORKS
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    disable_tpu_hardware()
    main()
