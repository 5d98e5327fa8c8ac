"""Evaluation of published versions: what the gate of a release compares."""

import json
from pathlib import Path

from composer_jax.atomic_write import write_atomically
from composer_jax.checkpoint.address import PATCHES_PREFIX
from composer_jax.checkpoint.checkpoint import PublishedCheckpoint, open_checkpoint
from composer_jax.checkpoint.pinned_versions import weights_hash
from composer_jax.errors import UserError
from composer_jax.models.model_def import Params
from composer_jax.parallel.processes import require_one_process
from composer_jax.stages.evaluate import play_suites, suites
from composer_jax.stages.run import Run

FOLDER = "evaluations"


def evaluate_version(run: Run, version: int) -> Path:
    """Plays the suites of evaluate.suites with a version of rl.publish; returns WORKDIR/evaluations/VERSION.json.

    The weights are those that servers have, in bfloat16. A file that has the hash of these weights is returned as it
    is. Its form is that of launch.evaluate, which `release.gate.read_evaluation` reads.

    Raises:
      UserError: the chain lacks the version, evaluate.suites is empty, or all episodes of a suite were lost.
    """
    require_one_process("an evaluation for the gate")
    file, sha256 = run.path / FOLDER / f"{version}.json", weights_hash(run.config.rl.publish, version)
    if file.exists() and json.loads(file.read_bytes())["weights"] == sha256:
        return file
    run.services.prepare_updates()
    if not (chosen := suites(run, "after")):
        raise UserError("evaluate.suites is empty, so no gate can compare two versions; name suites in the config.")
    sampler = run.services.sampler_with(*load_version(run, version), version=version)
    title = f"evaluate version {version}"
    result, _ = play_suites(run, chosen, sampler, run.config.evaluate.temperature, title)
    sampler.release()
    file.parent.mkdir(exist_ok=True)
    write_atomically(file, (json.dumps({"version": version, "weights": sha256, **result}, indent=1) + "\n").encode())
    return file


def load_version(run: Run, version: int) -> tuple[Params, Params]:
    """Returns (params, router_bias) of a version of rl.publish on the run's mesh, in the dtype of its network."""
    checkpoint = open_checkpoint(f"{PATCHES_PREFIX}{run.config.rl.publish}")
    assert isinstance(checkpoint, PublishedCheckpoint), "the prefix says so"
    checkpoint.version = version
    loaded = checkpoint.load(run.mesh, run.model.definition.config.param_dtype)
    return loaded.params, loaded.router_bias
