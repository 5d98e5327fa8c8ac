"""How small the patches of weights are, and how fast: `python -m benchmarks.weight_patch [--checkpoint=hf:DIR]`.

bfloat16 weights with a float32 master copy are trained by AdamW at RL's learning rates on source code. Every step is
published and received through a folder (checkpoint/weight_chain.py), and the bits of both sides are compared. The
network has 18 million parameters and reads bytes, or is that of --checkpoint and reads the tokens of its tokenizer.
Prints progress on stderr and, as the last line of stdout, one JSON object, whose figures are the means of steps 20 to
--steps, by learning rate:
    unchanged       share of the weights whose bits a step does not change
    ratio           bytes of the weights over those of a patch
    bit_exact       whether every version was received bit by bit
    encode_mb_s, decode_mb_s    weights (not bytes of the patch) per second, files and hashes included
"""

import argparse
import dataclasses
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import train_step
from composer_jax.checkpoint.checkpoint import open_checkpoint
from composer_jax.checkpoint.weight_chain import WeightPublisher, WeightReceiver
from composer_jax.checkpoint.weight_shards import local_shards
from composer_jax.data.chat.load_chat_format import load_tokenizer
from composer_jax.data.text_tokenizer import TextTokenizer
from composer_jax.models.model_def import ModelDef
from composer_jax.observe.progress import Progress
from composer_jax.parallel.mesh import make_mesh
from composer_jax.parallel.platform import configure_cpu
from composer_jax.train.learner import Learner
from composer_jax.train.losses import LanguageLoss
from composer_jax.train.optimizer import OptimizerConfig, make_optimizer
from launch.huge_pages import restart_with_huge_pages

RATES = (1e-6, 3e-6)
FIRST = 20
"""Step whose figures count first: Adam's second moment has settled."""
CONFIG = dataclasses.replace(
    train_step.network(512, "bfloat16"),
    vocab_size=256,
    d_model=256,
    n_layers=5,
    expert_ff_dim=256,
    dense_ff_dim=1024,
    param_dtype="bfloat16",
)


def source_tokens(tokenizer: TextTokenizer | None) -> np.ndarray:
    """Returns this project's source code as int32 tokens; without a tokenizer, a token for each byte."""
    folder = Path(__file__).parents[1] / "composer_jax"
    texts = [path.read_text() for path in sorted(folder.rglob("*.py"))]
    if tokenizer is None:
        return np.frombuffer("".join(texts).encode(), np.uint8).astype(np.int32)
    return np.concatenate([np.array(tokenizer.encode(text), np.int32) for text in texts])


def batches(source: np.ndarray, rows: int, length: int) -> Iterator[dict[str, np.ndarray]]:
    """Yields rows of `length` tokens from random places of `source`."""
    rng = np.random.default_rng(0)
    while True:
        starts = rng.integers(0, len(source) - length, rows)
        yield {
            "tokens": np.stack([source[start : start + length] for start in starts]),
            "positions": np.tile(np.arange(length, dtype=np.int32), (rows, 1)),
            "segments": np.ones((rows, length), np.int32),
            "weights": np.ones((rows, length), np.float32),
        }


def measure(
    definition: ModelDef, weights: Any, source: np.ndarray, rate: float, steps: int, rows: int, length: int
) -> dict[str, Any]:
    """Returns the figures of one learning rate."""
    optimizer = OptimizerConfig(peak=rate, decay="constant", weight_decay=0.0)
    learner = Learner(definition, make_optimizer(optimizer, steps), LanguageLoss(), make_mesh(jax.devices()[:1]))
    state = learner.init_state(*jax.tree.map(jax.numpy.copy, weights))
    figures: dict[str, list[float]] = {"unchanged": [], "ratio": [], "encode_mb_s": [], "decode_mb_s": []}
    exact = True
    with tempfile.TemporaryDirectory() as folder, Progress(steps, "step", f"learning rate {rate}") as progress:
        publisher, receiver = WeightPublisher(folder, anchor_every=steps + 1), WeightReceiver(folder)
        publisher.publish(local_shards(state.params), 0)
        receiver.receive()
        for step, batch in zip(range(1, steps + 1), batches(source, rows, length), strict=False):
            state, _ = learner.step(state, [batch], float(batch["weights"].sum()))
            shards = local_shards(state.params)
            megabytes = sum(array.nbytes for array in shards.values()) / 1e6
            started = time.perf_counter()
            published = publisher.publish(shards, step)
            between = time.perf_counter()
            receiver.receive()
            ended = time.perf_counter()
            exact &= all(receiver.arrays[shard.name].tobytes() == array.tobytes() for shard, array in shards.items())
            if step >= FIRST:
                figures["unchanged"].append(1 - published.changed / published.elements)
                figures["ratio"].append(1e6 * megabytes / published.patch_bytes)
                figures["encode_mb_s"].append(megabytes / (between - started))
                figures["decode_mb_s"].append(megabytes / (ended - between))
            progress.update()
    return {name: round(statistics.mean(values), 4) for name, values in figures.items()} | {"bit_exact": exact}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", default="", help="address of weights to train (default: random ones)")
    parser.add_argument("--steps", type=int, default=100, help=f"optimizer steps, above {FIRST} (default: 100)")
    parser.add_argument("--rows", type=int, default=2, help="rows of a step (default: 2)")
    parser.add_argument("--length", type=int, default=256, help="tokens of a row (default: 256)")
    o = parser.parse_args(argv)
    if o.steps <= FIRST:
        parser.error(f"--steps={o.steps} is not above {FIRST}")

    configure_cpu(1)
    tokenizer = None
    if o.checkpoint:
        checkpoint = open_checkpoint(o.checkpoint)
        tokenizer = load_tokenizer(checkpoint.text.files)
        definition, *weights = checkpoint.load(make_mesh(jax.devices()[:1]), "bfloat16")
    else:
        definition = ModelDef(CONFIG)
        weights = definition.init(0, make_mesh(jax.devices()[:1]))
    source = source_tokens(tokenizer)
    by_rate = {f"{rate:.0e}": measure(definition, weights, source, rate, o.steps, o.rows, o.length) for rate in RATES}
    names = next(iter(by_rate.values()))
    print(json.dumps({name: {rate: figures[name] for rate, figures in by_rate.items()} for name in names}))


if __name__ == "__main__":
    restart_with_huge_pages()  # as every entry point does
    main()
