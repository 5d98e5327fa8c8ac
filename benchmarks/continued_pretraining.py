"""What continued pretraining teaches a published model, and what it forgets.

    python -m benchmarks.continued_pretraining

Trains SmolLM2-135M-Instruct (launch/fetch_smollm2.py) on Python's standard library and measures nats per token, before
and after, of modules that are held out and of prose: the README and the docs of this repository without their code
blocks. Prints progress on stderr and, as the last line of stdout, one JSON object:
    steps, tokens                           of training
    heldout_before, heldout_after           nats per token of held-out modules
    prose_before, prose_after               nats per token of the prose
A run that was stopped continues with the same command.
"""

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from composer_jax.evals.score import score
from composer_jax.stages.model import Model, load_model
from composer_jax.stages.pretrain import pretrain
from composer_jax.stages.run import Run
from configs import smollm2_135m
from launch.fetch_smollm2 import fetch
from launch.huge_pages import restart_with_huge_pages

ROOT = Path(__file__).parents[1]
ROW = 512
PROSE_ROWS = 16
CODE_BLOCK = re.compile(r"^```.*?^```$|^    [^\n]*$", re.MULTILINE | re.DOTALL)


def prose() -> str:
    """Returns the README and the docs as one text, without blocks of code."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return "\n\n".join(re.sub(CODE_BLOCK, "", page.read_text(encoding="utf-8")) for page in pages)


def prose_nll(model: Model) -> float:
    """Returns nats per token of the first PROSE_ROWS rows of ROW tokens of prose."""
    ids = model.tokenizer.encode_document(prose())[: PROSE_ROWS * ROW]
    tokens = np.asarray(ids, np.int32).reshape(PROSE_ROWS, ROW)
    return -float(score(model.definition, model.params, model.router_bias, tokens, mesh=model.mesh).logprobs.mean())


def get_config(base: str, steps: int, rows: int) -> Any:
    """Returns the config of the run: everything is trained, as gently as a stage after pretraining does."""
    config: Any = smollm2_135m.get_config("smoke")
    config.base, config.stages = base, ("pretrain",)
    config.data.max_heldout_bytes = 40_000
    config.pretrain.update({"steps": steps, "batch_size": rows, "seq_len": ROW, "router_bias_update_rate": 0.0})
    config.pretrain.update({"save_every": 50, "evaluate_every": 50})
    config.pretrain.optimizer.update({"peak": 2e-5, "warmup": max(1, steps // 10), "final": 0.1})
    return config


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default="runs/models", help="folder of the model file (default: runs/models)")
    parser.add_argument("--workdir", default="runs/continued_pretraining", help="folder of the run")
    parser.add_argument("--steps", type=int, default=200, help="training steps (default: 200)")
    parser.add_argument("--rows", type=int, default=2, help=f"rows of {ROW} tokens in a batch (default: 2)")
    o = parser.parse_args(argv)

    base = f"gguf:{fetch(Path(o.folder)).absolute()}"
    with Run(get_config(base, o.steps, o.rows), o.workdir) as run:
        pretrain(run)
        result = run.workdir.stage_result("pretrain")
    nll = {"before": prose_nll(load_model(base, dtype="float32"))}
    nll["after"] = prose_nll(load_model(str(Path(o.workdir) / "checkpoints" / "pretrain"), dtype="float32"))
    figures = {
        "steps": o.steps,
        "tokens": result["tokens"],
        "heldout_before": result["heldout_nll_first"],
        "heldout_after": result["heldout_nll_last"],
        "prose_before": nll["before"],
        "prose_after": nll["after"],
    }
    print(json.dumps({name: round(value, 4) for name, value in figures.items()}))


if __name__ == "__main__":
    restart_with_huge_pages()  # as every entry point does
    main()
