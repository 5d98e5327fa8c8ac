"""Our training step and transformers' in turn, each round of each in a process of its own with the whole card."""

import functools
import json
import statistics
from collections.abc import Callable
from typing import Any

from benchmarks.gpu_parts.output import Figures, digits, note
from benchmarks.gpu_parts.packed_batch import packed_segments
from benchmarks.gpu_parts.train import train_shape
from benchmarks.gpu_parts.worker import NoCardError, PartError

PEERS = {"transformers": (), "torch_compile": ("--compiled",)}
"""Options of train_torch.py by the name in the figures."""


def shape_for_torch(small: bool) -> dict[str, Any]:
    """Returns the shape of train.py as transformers' LlamaConfig says it, and the tokens that count."""
    config, rows, length = train_shape(small)
    llama = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": config.dense_ff_dim,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.qk_rope_dim,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "max_position_embeddings": config.max_context,
    }
    tokens = int((packed_segments(rows, length) > 0).sum())
    return {"llama": llama, "rows": rows, "length": length, "tokens": tokens}


def compare_training(
    ours: Callable[[], Figures], peer: Callable[[list[str]], Figures], rounds: int, *, small: bool
) -> Figures:
    """Returns our figures and each peer's, medians of several processes, and our tokens/s over each peer's.

    The first step is that of the first process, which finds no compiled program. A side that fails is left out of the
    later rounds; "rounds" counts those that were measured. A peer that was never measured is None. "error" is there if
    ours failed.

    Args:
      ours: measures train.py.
      peer: measures train_torch.py with these options.

    Raises:
      NoCardError: our first process found no card.
    """
    shape = json.dumps(shape_for_torch(small))
    sides = {"ours": ours} | {
        name: functools.partial(peer, [f"--shape={shape}", *options]) for name, options in PEERS.items()
    }
    measured: dict[str, list[Figures]] = {name: [] for name in sides}
    errors: dict[str, PartError] = {}
    for number in range(1, rounds + 1):
        for name in [name for name in sides if name not in errors]:
            note(f"train, round {number} of {rounds}: {name}")
            try:
                measured[name].append(sides[name]())
            except PartError as error:
                if isinstance(error, NoCardError) and not any(measured.values()):
                    raise
                note(f"  {name} is left out from here on: {error}")
                errors[name] = error
    figures = _medians(measured["ours"]) | ({"error": str(errors["ours"])} if "ours" in errors else {})
    for name in PEERS:
        figures[name] = of_peer = _medians(measured[name]) or None
        for suffix in ("", "_whole_rows"):
            rate = figures.get(f"tokens_per_s{suffix}")
            figures[f"vs_{name}{suffix}"] = digits(rate / of_peer["tokens_per_s"]) if rate and of_peer else None
    return figures


def _medians(rounds: list[Figures]) -> Figures:
    """Returns the medians of several processes' figures, and their number; the first step is that of the first."""
    if not rounds:
        return {}
    out = rounds[0] | {"rounds": len(rounds)}
    for name, value in rounds[0].items():
        if isinstance(value, float) and name != "first_step_s":
            out[name] = digits(statistics.median(figures[name] for figures in rounds))
    return out
