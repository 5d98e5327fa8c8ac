"""The search for a layout: what it proposes, and that it is no worse than the config's own."""

import dataclasses
import json
import math
import sys

import pytest

from composer_jax.errors import UserError
from composer_jax.parallel.mesh import AXES
from composer_jax.scale import search
from composer_jax.scale.layout import Layout, config_layout, layouts, legal_axes
from composer_jax.scale.layout_estimate import LayoutEstimator
from composer_jax.scale.plan import place_steps, predict_step
from composer_jax.scale.search import LayoutSearch, SearchRecord, search_layouts
from composer_jax.scale.table import format_search
from composer_jax.schema.run_config import run_config
from tests.scale.configuration import small_config

TOPOLOGY = "v5e:2x2"


def small():
    return small_config().to_dict()


def test_axes_multiply_to_the_devices_and_divide_network_and_batch():
    run = run_config(small())
    model, proposed = run.model, set(legal_axes(run.model, 16, 8, 64))
    assert (1, 4, 2, 1, 2) in proposed and (1, 1, 4, 4, 1) in proposed
    for replica, data, expert, context, tensor in proposed:
        assert replica * data * expert * context * tensor == 16
        assert 8 % (replica * data * expert) == 0 and 64 % (2 * context) == 0
        assert model.n_experts % (expert * tensor) == 0 and model.n_heads % tensor == 0
    # 2 heads do not divide over 4 devices, 8 rows not over 16, and 8 experts not over 16.
    assert not {(1, 4, 1, 1, 4), (1, 16, 1, 1, 1), (1, 1, 16, 1, 1)} & proposed
    # Rows of 12 tokens are cut into 6 devices at most, of which none but 2 divides 16.
    assert {axes[3] for axes in legal_axes(model, 16, 8, 12)} == {1, 2}


def test_layouts_of_a_mesh_keep_the_batch_and_offer_chunks_that_divide_a_devices_tokens():
    run = run_config(small())
    own = config_layout(run, "pretrain", 4)
    assert own.axes == (1, 2, 2, 1, 1) and own.batch_size == 8
    offered = list(layouts(own, (1, 4, 1, 1, 1), 64, batch_sizes=(12, 6), dispatches=("ring",)))
    assert len(offered) == len(set(offered))
    assert {layout.batch_size for layout in offered} == {8, 12}  # 6 rows do not divide over 4 devices
    assert {layout.expert_chunk for layout in offered if layout.batch_size == 8} == {own.expert_chunk, None, 64, 32}
    assert {layout.dispatch for layout in offered} == {own.dispatch}  # nothing is exchanged on this mesh


@pytest.mark.parametrize("own", [{"mesh": {"data": 4}}, {"model": {"remat": False}}], ids=["mesh", "model"])
def test_a_stage_with_a_layout_of_its_own_is_not_searched(own, monkeypatch):
    monkeypatch.setitem(sys.modules, "libtpu", None)  # which is not looked for
    config = small()
    config["pretrain"] |= own
    with pytest.raises(UserError, match="config.pretrain has a mesh or model fields of its own"):
        LayoutSearch(config, TOPOLOGY, "pretrain")


def test_a_layout_changes_nothing_but_its_fields():
    config = small()
    layout = Layout((1, 1, 4, 1, 1), 16, "ring", 32, 64, ("latents",))
    changed = layout.apply(config, "pretrain")
    assert changed["mesh"]["expert"] == 4 and changed["pretrain"]["batch_size"] == 16
    assert config["mesh"]["expert"] == 2 and config["pretrain"]["batch_size"] == 8
    assert config_layout(run_config(changed), "pretrain", 4) == layout
    fields = {path.split(".")[0] for path in layout.fields("pretrain")}
    assert {name for name in config if config[name] != changed[name]} <= fields


@pytest.mark.parametrize("stage", ["rl", "evaluate"])
def test_stages_without_a_single_training_shape_are_refused(stage):
    with pytest.raises(UserError, match=f"--stage={stage} has no layout to search; the stages are pretrain, sft"):
        LayoutSearch(small(), TOPOLOGY, stage)


def test_an_unknown_assumption_is_refused():
    with pytest.raises(UserError, match="--overlap=all is unknown; use no_overlap, weight_gathers_overlap, full_"):
        LayoutSearch(small(), TOPOLOGY, "pretrain", overlap="all")


def test_a_record_computes_once(tmp_path):
    path = tmp_path / "search.jsonl"
    assert SearchRecord(path).figures("a", lambda: {"seconds": 1.5}) == {"seconds": 1.5}
    assert SearchRecord(path).figures("a", lambda: pytest.fail("was recorded")) == {"seconds": 1.5}


@pytest.mark.slow
@pytest.mark.usefixtures("libtpu")
def test_the_best_layout_is_no_worse_than_the_configs_own(tmp_path, monkeypatch):
    config, record = small(), tmp_path / "search.jsonl"
    result = search_layouts(config, TOPOLOGY, "pretrain", traces=3, compiles=0, record=record)
    rows = result["rows"]
    assert rows[0] == result["best"] and result["own"] in rows and 2 <= len(rows) <= 4
    seconds = [row["seconds_per_token"] for row in rows]
    assert seconds == sorted(seconds)
    for row in rows:
        sizes = [row["layout"][f"mesh.{axis}"] for axis in AXES]
        assert math.prod(sizes) == 4 and row["fits"] is None
    # The figures are those of the same layout without a search.
    best = {section: dict(config[section]) for section in ("mesh", "model", "pretrain")}
    for path, value in result["best"]["layout"].items():
        section, field = path.split(".")
        best[section][field] = value
    alone = predict_step(place_steps(config | best, TOPOLOGY, "pretrain")["train"])
    assert alone["predicted_step_seconds"] == pytest.approx(rows[0]["seconds"])
    assert "* " in format_search(result, 1) and "best: --config.mesh.replica=" in format_search(result, 1)
    json.dumps(result)
    # The record answers every trace but that which the estimates start from.
    monkeypatch.setattr(search, "predict_step", lambda placed: pytest.fail("was recorded"))
    assert search_layouts(config, TOPOLOGY, "pretrain", traces=3, compiles=0, record=record)["rows"] == rows


@pytest.mark.slow
@pytest.mark.usefixtures("libtpu")
def test_the_assumption_about_overlap_ranks_the_layouts(tmp_path):
    results = {
        overlap: search_layouts(
            small(), TOPOLOGY, "pretrain", traces=2, compiles=0, record=tmp_path / "search.jsonl", overlap=overlap
        )
        for overlap in ("no_overlap", "full_overlap")
    }
    for overlap, result in results.items():
        assert all(row["seconds"] == row["step_seconds"][overlap] for row in result["rows"])
    slow, fast = (result["own"] for result in results.values())
    assert slow["seconds"] > fast["seconds"]
    assert slow["mfu"] * slow["seconds"] == pytest.approx(fast["mfu"] * fast["seconds"])


@pytest.mark.slow
@pytest.mark.usefixtures("libtpu")
def test_layouts_that_do_not_fit_are_not_proposed():
    found = LayoutSearch(small(), TOPOLOGY, "pretrain")
    placed = found.place(found.own)
    estimator = LayoutEstimator(placed, found.trace(found.own, placed), found.own, found.tokens)
    counts = found.estimate(estimator, (), ("ring",))
    assert counts["too_large"] == 0 and len(found.estimates) == counts["layouts"]
    every = found.estimates
    # What is kept for the backward pass takes memory, and a replica needs all weights on fewer devices.
    more = dataclasses.replace(found.own, remat_saves=("latents", "attention"))
    assert every[more].bytes > every[dataclasses.replace(found.own, remat_saves=())].bytes
    replicas = {layout.sizes["replica"]: [] for layout in every}
    for layout, estimate in every.items():
        replicas[layout.sizes["replica"]].append(estimate.bytes)
    assert min(replicas[4]) > min(replicas[1])

    limit = sorted(estimate.bytes for estimate in every.values())[len(every) // 2]
    found.tpus = dataclasses.replace(found.tpus, chip=dataclasses.replace(found.tpus.chip, hbm_usable=limit))
    found.estimates = {}
    found.estimate(estimator, (), ("ring",))
    assert found.estimates == {layout: e for layout, e in every.items() if e.bytes <= limit} != every
    assert all(layout in found.estimates for layout in found.promising(10))
