"""The training step of train.py with transformers on PyTorch: autocast to bfloat16, sdpa, fused AdamW.

A row is one causal sequence of the same tokens, because sdpa's fast kernels take no documents. The same tokens count.
Imports neither JAX nor our package, so that PyTorch may have an environment of its own.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks.gpu_parts.output import Figures, digits, note, print_result


def new_step(shape: dict[str, Any], *, compiled: bool, device: str) -> Callable[[], float]:
    """Returns a function that takes a training step and returns the loss."""
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    options: dict[str, Any] = shape["llama"] | {"use_cache": False, "attn_implementation": "sdpa"}
    torch.manual_seed(0)
    model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**options))
    model.to(device).train()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(
        parameters, lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=device == "cuda"
    )
    tokens = torch.randint(0, shape["llama"]["vocab_size"], (shape["rows"], shape["length"]), device=device)
    forward = torch.compile(model) if compiled else model

    def step() -> float:
        with torch.autocast(device, torch.bfloat16):
            loss = forward(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def measure(shape: dict[str, Any], *, compiled: bool, small: bool) -> Figures:
    """Returns tokens_per_s, first_step_s and peak_gb."""
    import torch  # pyright: ignore[reportMissingImports]

    device = "cuda" if torch.cuda.is_available() else "cpu"
    step = new_step(shape, compiled=compiled, device=device)
    note("  first step ...")
    started = time.perf_counter()
    loss = float(step())
    first_step_s = time.perf_counter() - started
    note(f"  first step {first_step_s:.1f} s, loss {loss:.3f}")
    seconds, steps = [], 1 if small else 4
    for _ in range(2 if small else 5):
        started = time.perf_counter()
        for _ in range(steps):
            loss = step()
        loss = float(loss)  # waits for the card
        seconds.append((time.perf_counter() - started) / steps)
        note(f"  {shape['tokens'] / seconds[-1]:.0f} tokens/s, loss {loss:.3f}")
    return {
        "tokens_per_s": digits(shape["tokens"] / statistics.median(seconds)),
        "first_step_s": digits(first_step_s),
        "peak_gb": digits(torch.cuda.max_memory_allocated() / 1e9) if device == "cuda" else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=json.loads, required=True, help="of compare_training.py")
    parser.add_argument("--compiled", action="store_true", help="with torch.compile")
    parser.add_argument("--small", action="store_true", help="the tiny form, on a CPU, too")
    o = parser.parse_args()
    try:
        import torch  # pyright: ignore[reportMissingImports]
        import transformers  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise SystemExit(f"transformers cannot be measured: {error}") from None
    if not o.small and not torch.cuda.is_available():
        raise SystemExit(f"transformers cannot be measured: PyTorch {torch.__version__} finds no GPU")
    print_result(lambda: measure(o.shape, compiled=o.compiled, small=o.small))


if __name__ == "__main__":
    main()
