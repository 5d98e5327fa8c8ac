"""The memory of a stage's steps against that of described devices."""

import dataclasses
import re
import types
from pathlib import Path

import jax
import numpy as np
import pytest

from composer_jax.errors import UserError
from composer_jax.models.model_def import ModelDef
from composer_jax.observe.compilations import count_compilations
from composer_jax.parallel.mesh import MeshConfig, make_mesh
from composer_jax.sampler.sampler import Sampler
from composer_jax.schema.run_config import run_config
from composer_jax.stages import memory_check as module
from composer_jax.stages.memory_check import StepsInMemory, memory_check, memory_limit
from composer_jax.stages.run_model import RunModel
from composer_jax.train.step_memory import StepMemory
from configs.tiny import get_config

CONFIG = run_config(get_config("smoke"))
NO_MEMORY = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes."


def memory_of(rows: int, parts: int) -> StepMemory:
    """A row takes 2 bytes; the gradient takes 4, and so does the sum of several."""
    return StepMemory(10.0, 4.0 * (parts > 1), 4.0, 1.0 * rows / parts, 2.0 * rows / parts, 0.0)


def advice(limit: float, rows: int = 48, parts: int = 1) -> str:
    with_rows, with_parts = (lambda number, name=name: f"{name}={number}" for name in ("rows", "parts"))
    return StepsInMemory("", rows, 4, parts, limit, memory_of, with_rows, with_parts, "less").advice()


@pytest.mark.parametrize(
    ("limit", "parts", "fits"),
    [
        (94.0, 1, "rows=40, or with parts=2, which computes this batch in parts"),
        (50.0, 1, "rows=16, or with parts=3, which computes this batch in parts"),
        (50.0, 3, "rows=24, or with parts=4, which computes this batch in parts"),  # 48 fits: half of it
        (38.0, 1, "rows=12, or with parts=6, which computes this batch in parts"),  # five fit and do not divide it
        (22.0, 1, "rows=4"),
        (26.0, 1, "rows=4, or with parts=12, which computes this batch in parts"),
    ],
)
def test_the_largest_batch_and_the_fewest_parts_that_fit(limit, parts, fits):
    assert advice(limit, parts=parts) == f"by the estimate it fits with {fits}."
    named = dict(re.findall(r"(rows|parts)=(\d+)", fits))
    assert memory_of(int(named["rows"]), parts).estimate <= limit
    if "parts" in named:
        assert memory_of(48, int(named["parts"])).estimate <= limit < memory_of(48, 1).estimate


def test_where_no_batch_fits_the_advice_is_what_takes_less():
    assert advice(21.0) == "by the estimate no smaller batch fits: use less."


def test_a_batch_that_fits_by_the_estimate_and_cannot_be_smaller_has_the_other_advice():
    assert advice(100.0, rows=4) == "use less."


def test_what_takes_less_memory_is_what_the_config_does_not_have_yet():
    def ways(**changes):
        config = dataclasses.replace(CONFIG, model=dataclasses.replace(CONFIG.model, **changes))
        return module._less_memory(types.SimpleNamespace(config=config), "sft")

    offload = "more devices along mesh.data, shorter rows or --config.sft.optimizer.offload=True"
    assert ways(head_chunk=512, remat=True) == offload
    more = offload.replace(" or", ",") + ", --config.model.head_chunk=2048 or --config.model.remat=True"
    assert ways(head_chunk=None, remat=False) == more


def run_on_two_devices(config):
    mesh = make_mesh(jax.devices()[:2], data=2)
    model = RunModel(config, Path(), lambda stage: mesh, data=None, workdir=None)
    return types.SimpleNamespace(config=config, model=model, stage_mesh=lambda stage: mesh)


@pytest.fixture
def check(monkeypatch):
    """(stage, bytes of a device as a function of a step's memory, error of the block, changes of the section)."""
    find_steps, known = module._steps, {}

    def enter(stage, limit, error=None, **changes):
        config = dataclasses.replace(CONFIG, **{stage: dataclasses.replace(getattr(CONFIG, stage), **changes)})
        before = count_compilations()
        if (key := (stage, repr(changes))) not in known:
            known[key] = find_steps(run_on_two_devices(config), stage, 0.0)
        steps = known[key]
        assert count_compilations() <= before + 1, "nothing is compiled but the conversion of a number"
        bytes_limit = limit(steps.memory(steps.rows, steps.parts))
        monkeypatch.setattr(module, "memory_limit", lambda mesh: bytes_limit)
        monkeypatch.setattr(module, "_steps", lambda *_, **__: dataclasses.replace(steps, limit=bytes_limit))
        with memory_check(run_on_two_devices(config), stage):
            if error is not None:
                raise error

    return enter


def refusal(check, *arguments, **changes) -> str:
    with pytest.raises(UserError) as refused:
        check(*arguments, **changes)
    return str(refused.value)


def test_a_step_above_the_memory_by_the_lower_bound_is_refused(check):
    sentence = refusal(check, "pretrain", lambda memory: memory.least - 1, batch_size=8192, seq_len=256)
    assert re.match(
        r"pretrain\.batch_size=8192 of 256 tokens a row takes at least 2\.0 GiB \(weights, optimizer state and "
        r"gradients: 0\.0\) of the 2\.0 GiB of cpu; by the estimate it fits with --config\.pretrain\.batch_size=\d+, "
        r"or with --config\.pretrain\.accumulate=\d+, which computes this batch in parts\.$",
        sentence,
    ), sentence


def test_a_step_that_is_too_large_by_the_estimate_alone_is_tried_after_a_warning(check, caplog):
    check("sft", lambda memory: memory.estimate)
    assert not caplog.records
    check("sft", lambda memory: memory.least, batch_size=4096)
    (record,) = caplog.records
    sentence = record.getMessage()
    assert sentence.startswith("sft.batch_size=4096 of 512 tokens a row takes about ")
    assert "GiB of cpu and may run out of memory; by the estimate it fits with " in sentence


def test_rl_counts_the_sampler_and_names_the_shape_of_its_rows(check):
    sentence = refusal(check, "rl", lambda memory: memory.least - 1, batches=((64, 8), (512, 8192)))
    start = "(512, 8192) of rl.batches, 8192 rows of 512 tokens, with the sampler, takes at least 4.0 GiB"
    assert sentence.startswith(start) and re.search(r"it fits with \(512, \d+\) in its place\.$", sentence), sentence


def test_the_advice_for_rl_counts_the_sum_of_gradients_and_the_other_shapes():
    def steps(limit, *batches):
        config = dataclasses.replace(CONFIG, rl=dataclasses.replace(CONFIG.rl, batches=batches))
        return module._rl_steps(run_on_two_devices(config), limit, samples=False)

    alone = steps(0.0, (512, 4096)).memory(4096, 1)
    assert alone.summed > 0, "the first step adds an empty batch of the only shape"
    fits, other = (steps(alone.estimate + more, (512, 4096), (1024, 4096)).advice() for more in (0, -1))
    assert re.match(r"by the estimate it fits with \(1024, \d+\) in its place\.$", fits)
    assert other.startswith("by the estimate no smaller batch fits: use fewer rows of all shapes, more devices")


def test_the_sampler_has_weights_and_a_cache():
    run, definition = run_on_two_devices(CONFIG), ModelDef(CONFIG.rl.rollout_network(CONFIG.model))
    mesh = run.stage_mesh("rl")
    zeros = lambda of: jax.device_put(np.zeros(of.shape, of.dtype), of.sharding)  # noqa: E731
    sampler = Sampler(definition, mesh, CONFIG.sampler, end_tokens=())
    sampler.update(*jax.tree.map(zeros, definition.abstract_weights(mesh)), version=0)
    device = mesh.devices.flat[0]
    arrays = jax.tree.leaves((sampler.engines[0].runner._weights, sampler.engines[0].runner._cache))
    held = sum(shard.data.nbytes for array in arrays for shard in array.addressable_shards if shard.device == device)
    assert module._sampler_bytes(run) == held


def test_a_device_that_runs_out_of_memory_is_a_sentence(check):
    out_of_memory = jax.errors.JaxRuntimeError(NO_MEMORY + "\nfurther lines")
    sentence = refusal(check, "sft", lambda memory: memory.estimate, out_of_memory, batch_size=64)
    start = f"sft ran out of a resource, most often a device's memory ({NO_MEMORY}): sft.batch_size=64 of 512 tokens"
    assert sentence.startswith(start) and "was playing" not in sentence
    assert "it fits with --config.sft.batch_size=32, or" in sentence, "the estimate was too low, so half of the batch"
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        check("sft", lambda memory: memory.estimate, jax.errors.JaxRuntimeError("INTERNAL: a bug"))
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        check("sft", lambda memory: None, out_of_memory)


def test_the_sampler_of_suites_between_steps_may_be_what_ran_out_of_memory(monkeypatch):
    def sentence(stage, **evaluate):
        config = dataclasses.replace(CONFIG, evaluate=dataclasses.replace(CONFIG.evaluate, **evaluate))
        return module._uncounted_sampler(types.SimpleNamespace(config=config), stage)

    (suite, *_) = CONFIG.evaluate.suites
    plays = dict(every={suite: 2}, during=("sft", "rl"))
    assert "use a smaller sampler.cache_tokens" in sentence("sft", **plays)
    assert sentence("sft", **plays | {"every": {}}) == sentence("pretrain", **plays) == sentence("rl", **plays) == ""


def test_a_stage_that_the_run_skips_is_a_sentence():
    sft = dataclasses.replace(CONFIG.sft, mesh=MeshConfig(data=2))
    config = dataclasses.replace(CONFIG, stages=("rl",), sft=sft)
    run = run_on_two_devices(config)
    run.stage_mesh = {"rl": run.stage_mesh("rl")}.__getitem__  # Run has no mesh for a stage that it skips
    with pytest.raises(UserError, match=r"config\.stages=\('rl',\) leaves out sft"), memory_check(run, "sft"):
        pass


def test_the_memory_of_a_mesh_is_that_of_its_smallest_device():
    def mesh(*stats):
        return types.SimpleNamespace(
            local_devices=[types.SimpleNamespace(memory_stats=lambda stats=stats: stats) for stats in stats]
        )

    assert memory_limit(mesh({"bytes_limit": 12_000_000_000}, {"bytes_limit": 11_000_000_000})) == 11e9
    assert memory_limit(mesh(None)) is memory_limit(mesh({"bytes_in_use": 5})) is None
    assert memory_limit(make_mesh(jax.devices()[:1])) is None, "a CPU does not tell"
