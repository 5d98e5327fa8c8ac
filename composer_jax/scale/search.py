"""The search for the layout of a training step with the least predicted seconds per token that fits into memory.

Thousands of layouts are estimated in seconds (layout_estimate.py), a dozen traced, which takes most of the time, and
the best of them compiled, because only the compiler knows what a program needs. The config's own layout is always
traced, so that the result is never worse than it by the prediction.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from composer_jax.errors import UserError
from composer_jax.observe.progress import Progress
from composer_jax.parallel.mesh import AXES
from composer_jax.scale.layout import STAGES, WITHOUT_DROPS, Layout, config_layout, layouts, legal_axes
from composer_jax.scale.layout_estimate import Estimate, LayoutEstimator
from composer_jax.scale.plan import PlacedStep, place_steps, plan_step, predict_step
from composer_jax.scale.roofline import OVERLAPS, PREDICTION
from composer_jax.scale.topology import tpu_slice
from composer_jax.schema.run_config import run_config

Figures = dict[str, Any]
"""Those of scale/plan.py: predict_step or plan_step; or {"refused": the sentence of a UserError}."""


class SearchRecord:
    """Figures of layouts that were traced or compiled, in a JSON-lines file, so that a search can be continued."""

    def __init__(self, path: Path | None):
        self._path = path
        lines = path.read_text().splitlines() if path is not None and path.exists() else []
        self._figures: dict[str, Figures] = {row["key"]: row["figures"] for row in map(json.loads, lines)}

    def figures(self, key: str, compute: Callable[[], Figures]) -> Figures:
        """Returns the recorded figures of a key, or computes and records them."""
        if key not in self._figures:
            self._figures[key] = compute()
            if self._path is not None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                with self._path.open("a") as file:
                    file.write(json.dumps({"key": key, "figures": self._figures[key]}) + "\n")
        return self._figures[key]


class LayoutSearch:
    """A search on one slice; `run` does it."""

    def __init__(
        self,
        config: Mapping[str, Any],
        topology: str,
        stage: str,
        record: Path | None = None,
        log: Callable[[str], None] = lambda line: None,
        overlap: str = PREDICTION,
    ):
        """Arguments as `search_layouts`."""
        if stage not in STAGES:
            raise UserError(f"--stage={stage} has no layout to search; the stages are {', '.join(STAGES)}.")
        if overlap not in OVERLAPS:
            raise UserError(f"--overlap={overlap} is unknown; use {', '.join(OVERLAPS)}.")
        self.config, self.topology, self.stage, self.log, self.overlap = config, topology, stage, log, overlap
        self.run_config = run_config(config)
        training = self.run_config.training(stage)
        if training.mesh is not None or training.model:
            raise UserError(
                f"config.{stage} has a mesh or model fields of its own, and the search changes config.mesh and "
                "config.model; move them there to search."
            )
        self.tpus = tpu_slice(topology)
        self.tokens = training.seq_len
        self.own = config_layout(self.run_config, stage, len(self.tpus.devices))
        self.record = SearchRecord(record)
        rest = Layout((1,) * len(AXES), 0, "", None, None, ()).apply(config, stage)  # the config without its layout
        described = json.dumps([rest, topology, stage, jax.__version__, version("libtpu")], sort_keys=True, default=str)
        self._digest = hashlib.sha256(described.encode()).hexdigest()[:16]
        self.estimates: dict[Layout, Estimate] = {}
        self.traced: dict[Layout, Figures] = {}
        self.compiled: dict[Layout, Figures] = {}

    def estimate(
        self, estimator: LayoutEstimator, batch_sizes: Sequence[int], dispatches: Sequence[str]
    ) -> dict[str, int]:
        """Fills `estimates` with the layouts that fit by the estimate; returns how many there were."""
        limit, counts = self.tpus.chip.hbm_usable, {"meshes": 0, "layouts": 0, "too_large": 0}
        devices, rows = len(self.tpus.devices), (self.own.batch_size, *batch_sizes)
        axes = dict.fromkeys(
            sizes for batch in rows for sizes in legal_axes(self.run_config.model, devices, batch, self.tokens)
        )
        for sizes in axes:
            if min(estimator.least_bytes(sizes, batch) for batch in rows) > limit:
                continue
            candidates = layouts(self.own, sizes, self.tokens, batch_sizes=batch_sizes, dispatches=dispatches)
            try:
                estimated = {layout: estimator.estimate(layout) for layout in candidates}
            except UserError:  # a weight does not divide over this mesh
                continue
            counts["meshes"] += 1
            counts["layouts"] += len(estimated)
            fitting = {layout: estimate for layout, estimate in estimated.items() if estimate.bytes <= limit}
            counts["too_large"] += len(estimated) - len(fitting)
            self.estimates |= fitting
        return counts

    def trace(self, layout: Layout, placed: PlacedStep | None = None) -> Figures:
        """Returns the figures of a layout by tracing its programs."""

        def compute() -> Figures:
            try:
                return predict_step(placed or self.place(layout))
            except UserError as error:
                return {"refused": str(error)}

        self.traced[layout] = self.record.figures(self._key("trace", layout), compute)
        return self.traced[layout]

    def compile(self, layout: Layout) -> Figures:
        """Returns the figures of a layout by compiling its programs, memory included."""
        self.compiled[layout] = self.record.figures(
            self._key("compile", layout), lambda: plan_step("train", self.place(layout), self.topology, self.log)
        )
        return self.compiled[layout]

    def explore(
        self, traces: int, batch_sizes: Sequence[int], dispatches: Sequence[str], progress: Progress
    ) -> dict[str, int]:
        """Traces the config's own layout and `traces` promising ones; returns the counts of `estimate`."""
        placed = self.place(self.own)
        figures = self.trace(self.own, placed)
        progress.update()
        estimator = LayoutEstimator(placed, figures, self.own, self.tokens, self.overlap)
        counts = self.estimate(estimator, batch_sizes, dispatches)
        self.log(
            f"estimated {counts['layouts']} layouts of {counts['meshes']} meshes; {counts['too_large']} are too large"
        )
        self._trace_all(self.promising(-(-2 * traces // 3)), progress)
        variants = self.promising(traces - (len(self.traced) - 1), like=self.ranked()[0])
        self._trace_all(variants, progress)
        return counts

    def _trace_all(self, candidates: Iterable[Layout], progress: Progress) -> None:
        for layout in candidates:
            self.trace(layout)
            progress.update(best_mfu=f"{self.mfu(self.ranked()[0]):.1%}")

    def first_that_fits(self, compiles: int, progress: Progress) -> Layout | None:
        """Compiles the best traced layouts, `compiles` at most, until one fits; returns that one."""
        for layout in self.ranked()[:compiles]:
            self.log(f"compiling {layout}")
            fits = self.compile(layout)["fits"]
            progress.update()
            if fits:
                return layout
        return None

    def place(self, layout: Layout) -> PlacedStep:
        return place_steps(layout.apply(self.config, self.stage), self.topology, self.stage)["train"]

    def _key(self, what: str, layout: Layout) -> str:
        return f"{what} {self._digest} {layout}"

    def ranked(self) -> list[Layout]:
        """Returns the traced layouts, the fewest predicted seconds per token first."""
        usable = [layout for layout, figures in self.traced.items() if "refused" not in figures]
        return sorted(usable, key=self.seconds_per_token)

    def seconds_per_token(self, layout: Layout) -> float:
        """Returns the seconds of a traced layout's step under the search's assumption, over its tokens."""
        figures = self.traced[layout]
        return figures["step_seconds"][self.overlap] / figures["tokens_per_step"]

    def mfu(self, layout: Layout) -> float:
        """Returns the model FLOP utilisation of a traced layout under the search's assumption."""
        figures = self.traced[layout]
        return figures["predicted_mfu"] * figures["predicted_step_seconds"] / figures["step_seconds"][self.overlap]

    def promising(self, count: int, like: Layout | None = None) -> list[Layout]:
        """Returns the best estimated layouts that are not yet traced: one for each mesh, batch and dispatch.

        like: only layouts with the mesh, batch and dispatch of this one, any number.
        """
        waiting = sorted(
            (layout for layout in self.estimates if layout not in self.traced),
            # Of equals, what keeps less memory.
            key=lambda layout: (self.estimates[layout].seconds_per_token, self.estimates[layout].bytes),
        )
        if like is not None:
            return [layout for layout in waiting if _place(layout) == _place(like)][:count]
        done = {_place(layout) for layout in self.traced}
        first: dict[tuple, Layout] = {}
        for layout in waiting:
            if _place(layout) not in done:
                first.setdefault(_place(layout), layout)
        return list(first.values())[:count]

    def row(self, layout: Layout) -> Figures:
        """Returns the figures of a traced layout for the table."""
        figures, compiled = self.traced[layout], self.compiled.get(layout)
        estimate, total = self.estimates.get(layout), figures["step_seconds"]["no_overlap"]
        largest = sorted(figures["profile_seconds"].items(), key=lambda item: -item[1])[:3]
        return {
            "layout": layout.fields(self.stage),
            "text": str(layout),
            "seconds": figures["step_seconds"][self.overlap],
            "seconds_per_token": self.seconds_per_token(layout),
            "mfu": self.mfu(layout),
            "step_seconds": figures["step_seconds"],
            "largest_fractions": {kind: seconds / total for kind, seconds in largest},
            "estimated_seconds": estimate and estimate.seconds,
            "estimated_bytes": estimate and estimate.bytes,
            "compiled_bytes": compiled and compiled["bytes_per_chip"]["total"],
            "fits": compiled and compiled["fits"],
        }


def search_layouts(
    config: Mapping[str, Any],
    topology: str,
    stage: str,
    *,
    traces: int = 12,
    compiles: int = 2,
    batch_sizes: Sequence[int] = (),
    dispatches: Sequence[str] = WITHOUT_DROPS,
    overlap: str = PREDICTION,
    record: Path | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> Figures:
    """Returns the best layouts of a training step on a slice, and the config's own.

    Args:
      config, topology, stage: as scale/plan.py: plan_stage; the stage is pretrain or sft.
      traces: layouts that are traced beside the config's own; two thirds of them differ in mesh, batch or dispatch, the
        others are variants of the best of these.
      compiles: at most so many of the best are compiled, until one fits; 0 trusts the estimate of memory.
      batch_sizes, dispatches: tried beside the config's own.
      overlap: the assumption about overlap by which layouts are ranked, one of OVERLAPS (scale/roofline.py).
      record: a JSON-lines file of what was traced and compiled; a search with the same file continues.
      log: receives progress, a line at a time.

    Returns:
      "own" and "best" (None if nothing that was compiled fits): rows, and "rows", the traced layouts in order;
      "counts" of the estimated layouts.

    Raises:
      UserError: as plan_stage.
    """
    began = time.perf_counter()
    search = LayoutSearch(config, topology, stage, record, log, overlap)
    with Progress(1 + traces + compiles, "layouts", "search") as progress:
        counts = search.explore(traces, batch_sizes, dispatches, progress)
        best = search.first_that_fits(compiles, progress) if compiles else search.ranked()[0]
    return {
        "topology": topology,
        "stage": stage,
        "overlap": overlap,
        "own": search.row(search.own),
        "best": best and search.row(best),
        "rows": [search.row(layout) for layout in search.ranked()],
        "refused": [f"{layout}: {row['refused']}" for layout, row in search.traced.items() if "refused" in row],
        "counts": counts,
        "limit": search.tpus.chip.hbm_usable,
        "search_seconds": time.perf_counter() - began,
        "versions": {"jax": jax.__version__, "libtpu": version("libtpu")},
    }


def _place(layout: Layout) -> tuple:
    return layout.axes, layout.batch_size, layout.dispatch
