"""A real pretrained model in numbers: `python -m benchmarks.real_model [--folder=DIR | --model=DIR]`.

Fetches SmolLM2-135M-Instruct (launch/fetch_smollm2.py), loads it in float32 on one device, and compares it with
transformers where that is installed. Prints progress on stderr and, as the last line of stdout, one JSON object:
    nll                             nats per token of the first 2,048 tokens of the standard library's textwrap.py
    max_logprob_difference          largest difference to transformers of a log-probability of those tokens
    greedy_equal                    prompts of PROMPTS with the 64 greedy tokens of transformers
    train_fraction_of_matmul_rate   model FLOPs per second of a training step over FLOP/s of a matrix product
    decode_fraction_of_limit        seconds that the weights' products alone take, over those of a decode step
    load_s, peak_gb                 seconds of loading the weights; largest resident memory of the process
--model=DIR measures the Hugging Face folder of another model instead, such as an agent that was trained from it.
Without transformers, max_logprob_difference and greedy_equal are left out, and stderr says so. textwrap.py differs
between versions of Python; the published comparison is that of Python 3.11.7.
"""

import argparse
import asyncio
import importlib.util
import json
import statistics
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.train_step import matmul_flops_per_s
from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.evals.score import score
from composer_jax.models.flops import forward_flops
from composer_jax.observe.progress import Progress
from composer_jax.parallel.platform import configure_cpu
from composer_jax.sampler.config import SamplerConfig
from composer_jax.sampler.sampler import Sampler
from composer_jax.stages.model import Model, load_model
from composer_jax.stages.usage import peak_rss_gb
from composer_jax.train.learner import Learner
from composer_jax.train.losses import LanguageLoss
from composer_jax.train.optimizer import OptimizerConfig, make_optimizer
from launch.fetch_smollm2 import fetch
from launch.huge_pages import restart_with_huge_pages

SCORED = 2048
GREEDY = 64
PROMPTS = (
    "def fibonacci(n):",
    "import json\n\n\ndef read_config(path):",
    "The capital of France is",
    "class Stack:\n    def __init__(self):",
    "What is wrong with this function? def area(r): return 3.14 * r",
    "for line in open('log.txt'):\n",
    "A binary search tree is",
    "SELECT name FROM users WHERE",
)
CONVERSATIONS = 16
DECODED = 128


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def text_tokens(model: Model) -> np.ndarray:
    """Returns the first SCORED token ids of textwrap.py, int32 [1, SCORED]."""
    source = Path(textwrap.__file__).read_text(encoding="utf-8")
    return np.asarray([model.tokenizer.encode_document(source)[:SCORED]], np.int32)


def compare_with_transformers(model: Model, path: Path, tokens: np.ndarray, logprobs: np.ndarray) -> dict[str, Any]:
    """Returns max_logprob_difference and greedy_equal for a GGUF file or a folder; {} without transformers."""
    if importlib.util.find_spec("transformers") is None or importlib.util.find_spec("torch") is None:
        note("transformers is not installed: max_logprob_difference and greedy_equal are left out")
        return {}
    import torch  # pyright: ignore[reportMissingImports]  # optional
    import transformers  # pyright: ignore[reportMissingImports]  # optional

    folder, options = (path, {}) if path.is_dir() else (path.parent, {"gguf_file": path.name})
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, **options, dtype=torch.float32)
    with torch.no_grad():
        logits = theirs(torch.as_tensor(tokens, dtype=torch.long)).logits[0, :-1]
        expected = torch.log_softmax(logits, -1).gather(1, torch.as_tensor(tokens[0, 1:, None], dtype=torch.long))
    equal = 0
    with Progress(len(PROMPTS), "prompt", "greedy") as progress:
        for prompt in PROMPTS:
            ids = model.tokenizer.encode_document(prompt)
            ours = model.generate(ids, max_tokens=GREEDY, temperature=0.0)
            with torch.no_grad():
                out = theirs.generate(torch.tensor([ids]), max_new_tokens=GREEDY, do_sample=False)[
                    0, len(ids) :
                ].tolist()
            equal += list(ours) == out
            progress.update(1)
    return {
        "max_logprob_difference": float(np.abs(logprobs[0] - expected[:, 0].numpy()).max()),
        "greedy_equal": equal,
    }


def train_fraction(model: Model, rows: int, length: int, steps: int) -> float:
    """Returns the model FLOP/s of a training step over the FLOP/s of a matrix product measured in turn."""
    config = model.definition.config
    learner = Learner(model.definition, make_optimizer(OptimizerConfig(peak=1e-6), 100), LanguageLoss(), model.mesh)
    state = learner.init_state(jax.tree.map(jnp.copy, model.params), model.router_bias)
    rng = np.random.default_rng(0)
    batch = {
        "tokens": rng.integers(0, config.vocab_size, (rows, length)).astype(np.int32),
        "positions": np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length)),
        "segments": np.ones((rows, length), np.int32),
        "weights": np.ones((rows, length), np.float32),
    }
    a = jnp.asarray(rng.standard_normal((2048, 2048)), jnp.float32)
    matmul_flops_per_s(a)  # compiles
    fractions = []
    for step in range(steps + 1):
        product, started = matmul_flops_per_s(a), time.perf_counter()
        state, _ = learner.step(state, [batch], float(rows * length))
        seconds = time.perf_counter() - started
        fractions.append(3 * rows * forward_flops(config, length) / seconds / product)
        speed = f"{rows * length / seconds:.0f} tokens/s"
        note(f"train step {step}: {speed}, {fractions[-1]:.2f} of {product / 1e9:.0f} GFLOP/s")
    return statistics.median(fractions[1:])


def decode_fraction(model: Model) -> float:
    """Returns the seconds of the weights' products alone over those of a decode step, CONVERSATIONS at once."""
    config = SamplerConfig(
        slots=CONVERSATIONS, max_model_len=256, decode_steps=16, prefill_shapes=((CONVERSATIONS, 16),)
    )
    sampler = Sampler(model.definition, model.mesh, config, end_tokens=())
    sampler.update(model.params, model.router_bias, version=0)
    sampler.warm_up()
    prompt = model.tokenizer.encode_document(PROMPTS[0])

    async def sample_all() -> None:
        async with sampler.serving():
            sessions = [await sampler.open(seed) for seed in range(CONVERSATIONS)]
            await asyncio.gather(*(s.sample(prompt, SamplingParams(max_tokens=DECODED)) for s in sessions))
            for session in sessions:
                session.close()

    asyncio.run(sample_all())
    before = sampler.busy_seconds
    asyncio.run(sample_all())
    step = (sampler.busy_seconds - before) / DECODED
    limit = products_seconds(model)
    speed = f"{step * 1e3:.1f} ms a step, {CONVERSATIONS / step:.0f} tokens/s"
    note(f"decode: {speed}; the products alone {limit * 1e3:.1f} ms")
    return limit / step


def products_seconds(model: Model) -> float:
    """Returns the seconds that the products of one decode step with every weight matrix take by themselves."""
    layers = next(layers for name, layers in model.params.items() if name.endswith("_layers"))
    attention, feed_forward, d = layers["attention"], layers["feed_forward"], model.definition.config.d_model
    n = attention["q"].shape[0]
    into = [attention[name].reshape(n, d, -1) for name in "qkv"] + [feed_forward["gate"], feed_forward["up"]]
    out = [attention["out"].reshape(n, -1, d), feed_forward["down"]]
    head = model.params["embedding"]["table"]

    def products(x, into, out, head):
        def layer(x, weights):
            q, _, _, gate, _ = (x @ weight for weight in weights[0])
            ones = [jnp.sum(x @ weight) * 1e-9 for weight in weights[0]]
            return x + q @ weights[1][0] * 1e-9 + gate @ weights[1][1] * 1e-9 + sum(ones), None

        x, _ = jax.lax.scan(layer, x, (into, out))
        return x @ head.T

    run = jax.jit(products)
    x = jnp.ones((CONVERSATIONS, d), jnp.float32)
    jax.block_until_ready(run(x, into, out, head))
    times = []
    for _ in range(20):
        started = time.perf_counter()
        jax.block_until_ready(run(x, into, out, head))
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default="runs/models", help="folder of the model file (default: runs/models)")
    parser.add_argument("--model", default="", help="Hugging Face folder of another model")
    parser.add_argument("--steps", type=int, default=3, help="training steps that are timed (default: 3)")
    o = parser.parse_args(argv)

    configure_cpu(1)
    path = Path(o.model) if o.model else fetch(Path(o.folder))
    started = time.perf_counter()
    model = load_model(f"hf:{path}" if o.model else f"gguf:{path}", dtype="float32")
    jax.block_until_ready(model.params)
    figures: dict[str, Any] = {"load_s": time.perf_counter() - started}
    tokens = text_tokens(model)
    logprobs = score(model.definition, model.params, model.router_bias, tokens, mesh=model.mesh).logprobs
    figures["nll"] = -float(np.mean(logprobs))
    note(f"loaded in {figures['load_s']:.1f} s; {figures['nll']:.4f} nats per token")
    figures |= compare_with_transformers(model, path, tokens, logprobs)
    figures["decode_fraction_of_limit"] = decode_fraction(model)
    figures["train_fraction_of_matmul_rate"] = train_fraction(model, 2, 1024, o.steps)
    figures["peak_gb"] = peak_rss_gb()
    order = ("nll", "max_logprob_difference", "greedy_equal", "train_fraction_of_matmul_rate")
    order += ("decode_fraction_of_limit", "load_s", "peak_gb")
    print(json.dumps({key: round(figures[key], 6) for key in order if key in figures}))


if __name__ == "__main__":
    restart_with_huge_pages()  # as every entry point does
    main()
