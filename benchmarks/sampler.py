"""The rollout engine against its limits and its peers: `python -m benchmarks.sampler [--model=demo|wide|smollm2]`.

Prints progress on stderr and, as the last line of stdout, one JSON object:
    tokens_per_s      sampled tokens per second of 8 groups of 8 conversations of 4 turns (benchmarks/conversations.py)
    slot_use          tokens_per_s * seconds of a decode step / slots: 1 where every slot samples in every step and
                      nothing else takes time. The step is that of `limits`, with contexts of 512 tokens
    slot_use_before   the same of the engine of --before, with the same step
    vs_naive          over a loop: one conversation after the other, the whole context prefilled each turn
    vs_before         over the engine of --before, an older commit (the rounds' median); left out without one
    vs_tunix          over google-tunix's sampler on a dense network of equal cost, with --model=demo or wide
    cache_overhead    room in the pages that conversations hold, over their tokens
    compilations      of the warm-up; a further one during the conversations is an error
    decode_fraction_of_limit    {rows: seconds of a step's products and reads alone, over those of a step}
    prefill_fraction_of_matmul_rate    operations of prefill per second, over those of a large matrix product
    speculative       {drafts, acceptance by place in the draft, speedup by conversations} where the trained model of
                      --checkpoint writes a file again, with drafts of --draft_tokens by its MTP module, or from the
                      prompt if it has none; left out without a checkpoint
    smollm2           {tokens_per_s, vs_transformers, vs_llama_cpp} of 8 groups of 4 conversations with SmolLM2-135M, on
                      the weights of --checkpoint if it is that model, and on random ones otherwise

--parts selects among conversations, limits (decode and prefill), and speculative.

Conversations are played --rounds times, ours, the older engine and the peers in turn; figures are medians. Useful
tokens count: sampled ones that a conversation takes. A peer (--peers, all of them unless the option says otherwise) is
installed into ~/.cache/composer_jax/peers on first use, which takes minutes and needs a package index; one that cannot
be installed is named on stderr, and its key is left out. benchmarks/peers says how each of them plays.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import conversations
from benchmarks.older_commit import median_ratio, unpack
from benchmarks.peers.arguments import write_talks
from benchmarks.peers.environments import PEERS, cache_folder
from benchmarks.peers.equal_cost import cost_of, cost_of_llama, llama_of_equal_cost
from benchmarks.peers.rates import PeerRates
from composer_jax.checkpoint.checkpoint import open_checkpoint
from composer_jax.checkpoint.huggingface import save_hf
from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.models.config import ModelConfig
from composer_jax.models.flops import forward_flops
from composer_jax.models.model_def import ModelDef
from composer_jax.observe.compilations import count_compilations
from composer_jax.parallel.mesh import make_mesh
from composer_jax.parallel.platform import configure_cpu
from composer_jax.sampler.config import SamplerConfig
from composer_jax.sampler.request import Request
from composer_jax.sampler.runner import RowRequest
from composer_jax.sampler.sampler import Sampler
from composer_jax.sampler.sequence import SequenceState, token_array
from launch.huge_pages import restart_with_huge_pages

PARTS = ("conversations", "limits", "speculative")
ROWS = (8, 32, 64)
LENGTH = 512
"""Tokens of each context where a step of decoding is measured."""


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def median_seconds(run: Callable[[], Any], times: int = 9) -> float:
    """Returns the median of the seconds of some calls, after one that compiles."""
    jax.block_until_ready(run())
    seconds = []
    for _ in range(times):
        started = time.perf_counter()
        jax.block_until_ready(run())
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


# -- decoding and prefill ------------------------------------------------------------------------------------------


def new_sampler(model: ModelConfig, rows: int, **changes: Any) -> Sampler:
    """Returns a sampler whose calls have one number of rows."""
    definition, mesh = ModelDef(model), make_mesh(jax.devices()[:1])
    sizes: dict[str, Any] = dict(
        slots=rows, max_model_len=1024, decode_steps=8, decode_rows=(rows,), prefill_shapes=((min(rows, 8), 256),)
    )
    sampler = Sampler(definition, mesh, SamplerConfig(**(sizes | changes)), end_tokens=())
    sampler.update(*definition.init(0, mesh), version=0, copy=False)
    return sampler


def decode_seconds(model: ModelConfig, rows: int) -> float:
    """Returns the seconds of a decode step, the host's work included; every row has a context of LENGTH tokens."""
    sampler = new_sampler(model, rows)
    per_row = -(-1024 // sampler.limits.page_size)
    requests = []
    for i in range(rows):
        row = SequenceState(token_array([1] * LENGTH), sampler.limits.decode_steps)
        row.shard, row.computed, row.pages = 0, LENGTH - 1, list(range(i * per_row, (i + 1) * per_row))
        requests.append(RowRequest(row, i, SamplingParams(sampler.limits.decode_steps)))
    runner = sampler.engines[0].runner  # without the scheduler, which would not start all rows at once
    return median_seconds(lambda: [new.tokens for new in runner.start_decode(requests)()]) / sampler.limits.decode_steps


def products_seconds(model: ModelConfig, rows: int) -> float:
    """Returns the seconds of a decode step's products and reads alone: each weight matrix once, and attention over
    contexts of LENGTH tokens that lie in order."""
    params, _ = ModelDef(model).init(0)
    kinds = [name for name in params if name.endswith("_layers")]
    plain, experts = [], []
    for name in kinds:
        for path, leaf in jax.tree_util.tree_leaves_with_path(params[name]):
            for layer in leaf:
                if layer.ndim < 2:
                    continue
                is_expert = name == "moe_layers" and layer.ndim == 3 and layer.shape[0] == model.n_experts
                keys = jax.tree_util.keystr(path)
                is_expert = is_expert and "attention" not in keys
                (experts if is_expert else plain).append(layer if is_expert else layer.reshape(layer.shape[0], -1))
    table = params["embedding"]["table"]
    routed = max(1, -(-rows * model.experts_per_token // max(1, model.n_experts)))
    heads, width = (1, (model.kv_lora_rank or 0) + model.qk_rope_dim)
    if model.kv_lora_rank is None:
        assert model.n_kv_heads is not None
        heads, width = model.n_kv_heads, model.qk_nope_dim + model.qk_rope_dim
    shape = (model.n_layers, rows, heads, LENGTH, width)
    keys_and_values = [jnp.ones(shape, jnp.float32) for _ in range(1 if model.kv_lora_rank else 2)]

    @jax.jit
    def run(plain: list[jax.Array], experts: list[jax.Array], table: jax.Array, cache: list[jax.Array]) -> jax.Array:
        total = jnp.float32(0)
        for weight in plain:
            total += (jnp.full((rows, weight.shape[0]), total + 1) @ weight).max() * 1e-9
        for weight in experts:
            x = jnp.full((weight.shape[0], routed, weight.shape[1]), total + 1)
            total += jnp.matmul(x, weight).max() * 1e-9
        for layer in range(model.n_layers):
            keys, values = cache[0][layer], cache[-1][layer]
            q = jnp.full((rows, heads, model.n_heads // heads, width), total + 1)
            scores = jnp.einsum("bnqx,bntx->bnqt", q, keys)
            total += jnp.einsum("bnqt,bntx->bnqx", jnp.exp(scores - scores.max()), values).max() * 1e-9
        return total + (jnp.full((rows, table.shape[1]), total + 1) @ table.T).max()

    return median_seconds(lambda: run(plain, experts, table, keys_and_values))


def prefill_fraction(model: ModelConfig) -> float:
    """Returns the rate of prefill over the rate of a product of 2048 x 2048 matrices, measured in turn."""
    rows, length = 8, 256
    sampler = new_sampler(model, 64, prefill_shapes=((rows, length),))
    sampler.warm_up()
    rng = np.random.default_rng(0)
    a = jnp.asarray(rng.standard_normal((2048, 2048)), jnp.float32)
    product = jax.jit(jnp.matmul)
    fractions = []

    async def main() -> float:
        async with sampler.serving():
            before = sampler.busy_seconds
            prompts = [rng.integers(1, model.vocab_size, length + 1).tolist() for _ in range(4 * rows)]
            await asyncio.gather(*(sampler.submit(Request(p, SamplingParams(1), 0)).future for p in prompts))
            return sampler.busy_seconds - before

    for _ in range(4):
        seconds = asyncio.run(main())
        flops = 4 * rows * forward_flops(model, length)
        rate = 2 * 2048**3 / median_seconds(lambda: product(a, a), 3)
        fractions.append(flops / seconds / rate)
    return statistics.median(fractions[1:])


# -- drafts --------------------------------------------------------------------------------------------------------


def speculative(address: str, draft_tokens: int) -> dict[str, Any]:
    """Returns the acceptance and the speedup of drafts where a trained model repeats a file with one change.

    A network with an MTP module drafts with it, another one from the prompt.
    """
    checkpoint = open_checkpoint(address)
    text = checkpoint.text
    mesh = make_mesh(jax.devices()[:1])
    definition, params, router_bias = checkpoint.load(mesh, "float32")
    kind = "mtp" if definition.config.n_mtp_modules else "prompt_lookup"
    code = Path(__file__).read_text(encoding="utf-8")[:1500]
    prompt = text.encode_prompt(f"{code}\n\n# The same file again:\n\n{code[:200]}")
    figures: dict[str, Any] = {"drafts": kind, "acceptance": [], "speedup": {}}
    for rows in (1, 4, 64):
        seconds, n_tokens = {}, 192 if rows < 64 else 64
        for drafts in ("", kind):
            sizes = SamplerConfig(
                slots=rows,
                max_model_len=1024,
                decode_rows=(rows,),
                prefill_shapes=((8, 32), (1, 256)),
                drafts=drafts,
                draft_tokens=draft_tokens,
            )
            sampler = Sampler(definition, mesh, sizes, end_tokens=())
            sampler.update(params, router_bias, version=0, copy=False)
            sampler.warm_up(processed=True)

            async def main(sampler: Sampler = sampler, rows: int = rows, n_tokens: int = n_tokens) -> float:
                async with sampler.serving():
                    one = SamplingParams(1, temperature=0)
                    await sampler.submit(Request(prompt, one)).future  # the prompt is cached from here on
                    before = sampler.busy_seconds
                    requests = [Request(prompt, SamplingParams(n_tokens, temperature=0), seed) for seed in range(rows)]
                    await asyncio.gather(*(sampler.submit(request).future for request in requests))
                    return sampler.busy_seconds - before

            asyncio.run(main())  # times both ways
            seconds[drafts] = statistics.median(asyncio.run(main()) for _ in range(3))
            stats = sampler.stats
            if stats.drafted and stats.drafted[0]:
                pairs = zip(stats.accepted, stats.drafted, strict=True)
                figures["acceptance"] = [round(accepted / max(1, drafted), 3) for accepted, drafted in pairs]
        figures["speedup"][rows] = round(seconds[""] / seconds[kind], 3)
        note(
            f"drafts, {rows} conversations: {figures['speedup'][rows]} times as fast, {figures['acceptance']} accepted"
        )
    return figures


# -- conversations -------------------------------------------------------------------------------------------------


def play(options: Sequence[str], checkout: Path | None = None) -> dict[str, Any]:
    """Returns the figures of benchmarks/conversations.py in a process of its own, with the code of a checkout."""
    root = Path(__file__).parents[1]
    environment = os.environ | {"PYTHONPATH": str(checkout or root)}
    script = str(root / "benchmarks" / "conversations.py")
    done = subprocess.run(
        [sys.executable, script, *options], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{script} failed: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def write_smollm2(address: str, folder: Path) -> None:
    """Writes SmolLM2-135M in float32 as a Hugging Face folder: the weights at an address if they are that model's, and
    random ones otherwise."""
    model = conversations.model_config("smollm2")
    definition = ModelDef(model)
    if address:
        checkpoint = open_checkpoint(address)
        config = checkpoint.config
        if (config.n_layers, config.d_model, config.vocab_size) == (model.n_layers, model.d_model, model.vocab_size):
            definition, params, router_bias = checkpoint.load(dtype="float32")
            return save_hf(folder, definition, params, router_bias)
    note("SmolLM2 has random weights")
    save_hf(folder, definition, *definition.init(0))


def peer_rates(name: str, peers: Sequence[str], talks: Sequence[conversations.Talk], folder: Path) -> PeerRates:
    """Returns the rates to be of those of `peers` that play the conversations of a network.

    Args:
      folder: where the conversations are written, and what the peers load; of SmolLM2 it holds the weights in `hf`.
    """
    write_talks(folder / "talks.json", talks)
    if name == "smollm2":
        names, path = ("transformers", "llama_cpp"), folder / "hf"
    else:
        model = conversations.model_config(name)
        names, path, llama = ("tunix",), folder / "llama.json", llama_of_equal_cost(model)
        path.write_text(json.dumps(llama), encoding="utf-8")
        note(f"operations: ours {cost_of(model)}, those of google-tunix's network {cost_of_llama(llama)}")
    arguments = [f"--talks={folder / 'talks.json'}", f"--model={path}"]
    return PeerRates([PEERS[peer] for peer in names if peer in peers], arguments, cache_folder())


def compare_conversations(
    name: str, *, before: str = "", rounds: int, peers: Sequence[str], checkpoint: str = "", naive: bool = True
) -> dict[str, Any]:
    """Returns the figures of conversations with a network, over the naive loop, an older commit and the peers."""
    samples = 4 if name == "smollm2" else 8
    options = [f"--model={name}", f"--samples={samples}"]
    talks = conversations.make_talks(8, samples, 4, conversations.model_config(name).vocab_size)
    ours, older = [], []
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        if name == "smollm2":
            write_smollm2(checkpoint, folder / "hf")
        weights = [f"--checkpoint=hf:{folder / 'hf'}"] if name == "smollm2" else []
        others = peer_rates(name, peers, talks, folder)
        (folder / "before").mkdir()
        checkout = unpack(before, folder / "before") if before else None
        for number in range(rounds):
            ours.append(play([*options, *weights, *(["--naive=4"] if naive and number == 0 else [])]))
            note(f"conversations: {ours[-1]}")
            if checkout is not None:
                older.append(play([*options, *weights], checkout))
                note(f"conversations of {before}: {older[-1]}")
            others.play_round()
    rate = statistics.median(figures["tokens_per_s"] for figures in ours)
    assert not any(figures["compilations"] for figures in ours), "something compiled after the warm-up"
    result = {"tokens_per_s": rate, "cache_overhead": ours[0]["cache_overhead"]} | others.ratios(rate)
    if naive:
        result["vs_naive"] = rate / ours[0]["naive_tokens_per_s"]
    step = decode_seconds(conversations.model_config(name), len(talks))
    note(f"decode, {len(talks)} rows: {step * 1e3:.1f} ms a step")
    result["slot_use"] = rate * step / len(talks)
    if older:
        result["vs_before"] = median_ratio(ours, older)
        result["slot_use_before"] = statistics.median(figures["tokens_per_s"] for figures in older) * step / len(talks)
    return result


def limit_figures(model: ModelConfig) -> dict[str, Any]:
    """Returns the figures of the engine's limits: compilations, decode and prefill."""
    before = count_compilations()
    conversations.make_sampler(model, 64)
    figures: dict[str, Any] = {"compilations": count_compilations() - before}
    fractions = {}
    for rows in ROWS:
        limit, step = products_seconds(model, rows), decode_seconds(model, rows)
        fractions[rows] = round(limit / step, 3)
        note(f"decode, {rows} rows: {step * 1e3:.1f} ms a step; its products alone {limit * 1e3:.1f} ms")
    figures["decode_fraction_of_limit"] = fractions
    figures["prefill_fraction_of_matmul_rate"] = prefill_fraction(model)
    note(f"prefill: {figures['prefill_fraction_of_matmul_rate']:.2f} of the rate of a product")
    return figures


def round_figures(figures: dict[str, Any]) -> dict[str, Any]:
    """Returns the figures with four digits after the point."""
    rounded = {}
    for key, value in figures.items():
        if isinstance(value, dict):
            value = round_figures(value)
        rounded[key] = round(value, 4) if isinstance(value, float) else value
    return rounded


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("demo", "wide", "smollm2"), default="demo", help="network (default: demo)")
    parser.add_argument("--before", default="", help="an older commit to compare with")
    parser.add_argument("--checkpoint", default="", help="hf:DIR of a published model for drafts and SmolLM2's weights")
    parser.add_argument("--draft_tokens", type=int, default=7, help="tokens of a draft, 1 to 7 (default: 7)")
    parser.add_argument("--parts", default=",".join(PARTS), help="what is measured (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="times that conversations are played (default: 3)")
    parser.add_argument("--peers", default=",".join(PEERS), help="peers to compare with (default: %(default)s)")
    o = parser.parse_args(argv)
    peers = [name for name in o.peers.split(",") if name]
    if unknown := set(peers) - set(PEERS):
        parser.error(f"--peers has {', '.join(sorted(unknown))}; the peers are {', '.join(PEERS)}")

    parts = o.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts has {', '.join(sorted(unknown))}; the parts are {', '.join(PARTS)}")

    configure_cpu(1)
    model = conversations.model_config(o.model)
    figures: dict[str, Any] = {}
    if "conversations" in parts:
        figures = compare_conversations(o.model, before=o.before, rounds=o.rounds, peers=peers, checkpoint=o.checkpoint)
        smollm2 = figures if o.model == "smollm2" else {}
        if o.model != "smollm2" and {"transformers", "llama_cpp"} & set(peers):
            smollm2 = compare_conversations(
                "smollm2", rounds=o.rounds, peers=peers, checkpoint=o.checkpoint, naive=False
            )
        keys = ("tokens_per_s", "vs_transformers", "vs_llama_cpp")
        if smollm2:
            figures = figures | {"smollm2": {key: smollm2[key] for key in keys if key in smollm2}}
    if "limits" in parts:
        figures |= limit_figures(model)
    if "speculative" in parts and o.checkpoint:
        figures["speculative"] = speculative(o.checkpoint, o.draft_tokens)
    print(json.dumps(round_figures(figures)))


if __name__ == "__main__":
    restart_with_huge_pages()  # as every entry point does
    main()
