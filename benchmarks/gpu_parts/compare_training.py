"""Our training step beside transformers' in turn, each round of each in a process of its own with the whole card."""

import json
import statistics
from collections.abc import Callable
from typing import Any

from benchmarks.gpu_parts.packed_batch import packed_segments
from benchmarks.gpu_parts.timing import digits, note
from benchmarks.gpu_parts.train import train_shape
from benchmarks.gpu_parts.worker import Figures, PartError

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
    """Returns our figures, medians of `rounds` processes, and beside them those of each peer and our tokens/s over its.

    The first step is that of the first process, which finds no compiled program. A peer that cannot be measured is
    None.

    Args:
      ours: measures train.py.
      peer: measures train_torch.py with these options.
    """
    shape = json.dumps(shape_for_torch(small))
    of_ours: list[Figures] = []
    of_peers: dict[str, list[Figures] | None] = {name: [] for name in PEERS}
    for number in range(1, rounds + 1):
        note(f"train, round {number} of {rounds}: ours")
        of_ours.append(ours())
        for name, options in PEERS.items():
            measured = of_peers[name]
            if measured is None:
                continue
            note(f"train, round {number} of {rounds}: {name}")
            try:
                measured.append(peer([f"--shape={shape}", *options]))
            except PartError as error:
                note(f"  {name} is left out: {error}")
                of_peers[name] = None
    figures = _medians(of_ours)
    for name, measured in of_peers.items():
        figures[name] = of_peer = _medians(measured) if measured else None
        rate = of_peer and of_peer["tokens_per_s"]
        figures[f"vs_{name}"] = digits(figures["tokens_per_s"] / rate) if rate else None
    return figures


def _medians(rounds: list[Figures]) -> Figures:
    """Returns the medians of several processes' figures; the first step is that of the first."""
    out = dict(rounds[0])
    for name, value in rounds[0].items():
        if isinstance(value, float) and name != "first_step_s":
            out[name] = statistics.median(figures[name] for figures in rounds)
    return out
