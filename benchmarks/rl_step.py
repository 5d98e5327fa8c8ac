"""What a step of RL costs: `python -m benchmarks.rl_step [--before=COMMIT] [--peers=tunix] [--rounds=3]`.

Parts, which take turns in each round, every one in a process of its own:
- RL of the demo (configs/tiny.py: 64 episodes a step in sandboxes, bugs and memory chains) from a policy after a
  short SFT, so that it calls tools. --before plays the same job with the code of an older commit, whose configs/tiny.py
  must have the families of today.
- GRPO on completions without sandboxes, which google-tunix can do as well, with a network of equal cost
  (benchmarks/grpo_completions.py, benchmarks/peers/train_tunix.py).

Prints progress on stderr and, as the last line of stdout, one JSON object:
    phases               rollout, sandbox, train and other: shares of the median step of the demo's RL
    episodes_per_minute  of the median step of the demo's RL
    vs_before            that over the older commit's; null without --before
    vs_tunix             episodes per minute of completions over those of google-tunix; null where it is not compared
    completions          {"ours", "tunix"}: those rates
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import conversations
from benchmarks.older_commit import unpack
from benchmarks.peers.environments import PEERS, PeerError, cache_folder, install
from benchmarks.peers.equal_cost import llama_of_equal_cost
from composer_jax.observe.metrics import read_metrics

ROOT = Path(__file__).parents[1]
UNTIMED = 2
"""Steps at the beginning, which compile."""
FIELDS = {
    "pretrain.steps": 60,
    "sft.steps": 300,
    "sft.sources.conversations.options.traces.bugfix": 400,
    "sft.sources.conversations.options.traces.chain": 200,
    "sft.sources.conversations.options.traces.chain_long": 20,
    "sft.sources.conversations.options.traces.chain_whole": 20,
    "sft.sources.conversations.options.traces.chain_start": 100,
    "sft.sources.exercises.options.count": 1000,
    "rl.steps": 10,
}
"""What the job changes in configs/tiny.py."""
PHASES = {"rollout": "rollout_s", "sandbox": "sandbox_s", "train": "train_s"}


def launch(checkout: Path, entry: str, workdir: Path) -> None:
    """Runs an entry point with the code of a checkout. Raises SystemExit if it fails."""
    flags = [f"--config.{name}={value}" for name, value in FIELDS.items()]
    command = [sys.executable, "-m", f"launch.{entry}", "--config=configs/tiny.py", f"--workdir={workdir}", *flags]
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    done = subprocess.run(command, cwd=checkout, env=environment, stdout=sys.stderr, check=False)
    if done.returncode:
        raise SystemExit(done.returncode)


class DemoJob:
    """The demo's RL with the code of a checkout; SFT is done once."""

    def __init__(self, checkout: Path, folder: Path):
        self._checkout, self._start, self._folder = checkout, folder / "sft", folder
        self.rows: list[Mapping[str, Any]] = []
        for entry in ("pretrain", "sft"):
            launch(checkout, entry, self._start)

    def play(self, number: int) -> None:
        """Runs RL and keeps the rows of the timed steps."""
        workdir = self._folder / f"round{number}"
        shutil.copytree(self._start, workdir)
        launch(self._checkout, "rl", workdir)
        self.rows += read_metrics(workdir / "metrics" / "rl.jsonl")[UNTIMED:]

    def episodes_per_minute(self) -> float:
        """Returns the rate of the median step."""
        return 60 * 64 / statistics.median(row["step_s"] for row in self.rows)

    def phases(self) -> dict[str, float]:
        """Returns the medians of the shares of a step."""
        shares = {
            name: statistics.median(row[column] / row["step_s"] for row in self.rows) for name, column in PHASES.items()
        }
        return {name: round(share, 3) for name, share in (shares | {"other": 1 - sum(shares.values())}).items()}


def completions(python: str | Path, module: str, arguments: Sequence[str], cache: Path | None = None) -> float:
    """Returns the episodes per minute that a script of GRPO on completions prints. Raises PeerError if it fails."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    if cache is not None:
        environment["JAX_COMPILATION_CACHE_DIR"] = str(cache / "xla")
    command = [str(python), "-m", module, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PeerError(f"{module} failed: {done.stderr.strip()[-2000:]}")
    print(f"{module}: {done.stdout.splitlines()[-1]}", file=sys.stderr, flush=True)
    return json.loads(done.stdout.splitlines()[-1])["episodes_per_minute"]


def measure(before: str, peers: Sequence[str], rounds: int, folder: Path) -> dict[str, Any]:
    """Returns the printed object."""
    jobs = [DemoJob(ROOT, folder / "now")]
    if before:
        (folder / "checkout").mkdir()
        jobs.append(DemoJob(unpack(before, folder / "checkout"), folder / "before"))
    network = folder / "llama.json"
    network.write_text(json.dumps(llama_of_equal_cost(conversations.model_config("demo"))), encoding="utf-8")
    rates: dict[str, list[float]] = {"ours": [], "tunix": []}
    tunix = install(PEERS["tunix"], cache_folder()) if "tunix" in peers else None
    for number in range(rounds):
        for job in jobs:
            job.play(number)
        rates["ours"].append(completions(sys.executable, "benchmarks.grpo_completions", ()))
        if tunix is not None:
            arguments = [f"--model={network}"]
            rates["tunix"].append(completions(tunix, "benchmarks.peers.train_tunix", arguments, cache_folder()))
    rate = jobs[0].episodes_per_minute()
    medians = {name: statistics.median(values) for name, values in rates.items() if values}
    return {
        "phases": jobs[0].phases(),
        "episodes_per_minute": round(rate, 1),
        "vs_tunix": round(medians["ours"] / medians["tunix"], 3) if "tunix" in medians else None,
        "vs_before": round(rate / jobs[1].episodes_per_minute(), 3) if before else None,
        "completions": medians,
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", default="", help="an older commit to compare with")
    parser.add_argument("--peers", default="tunix", help="tunix, or empty for none (default: tunix)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of every part (default: 3)")
    o = parser.parse_args(argv)
    if o.peers not in ("", "tunix"):
        parser.error(f"--peers={o.peers} is unknown; use tunix, or nothing for none")
    if o.rounds < 1:
        parser.error(f"--rounds={o.rounds} measures nothing; use at least 1")
    with tempfile.TemporaryDirectory(prefix="composer-rl-step-") as folder:
        print(json.dumps(measure(o.before, [o.peers], o.rounds, Path(folder))))


if __name__ == "__main__":
    main()
