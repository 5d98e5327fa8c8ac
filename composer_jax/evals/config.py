"""The evaluate section of a run's config: suites as data."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from composer_jax.errors import UserError
from composer_jax.tasks.task import SPLITS, Split

WHICH = {
    "base": "evaluate the base",
    "before": "evaluate before RL",
    "greedy": "evaluate greedily before RL",
    "after": "evaluate after RL",
}
"""The evaluations of a run in their order, and what their progress bars say."""

HELDOUT = "heldout_"
"""Beginning of the names of the suites of tasks.heldout; the task family follows."""

DURING = ("sft", "rl")
"""The training stages that suites can be run in."""


@dataclass(frozen=True)
class SuiteConfig:
    """Attempts at generated tasks of one family under one compaction."""

    family: str
    """A family of tasks.families."""
    split: Split = "heldout"
    """Split of the tasks: "heldout", "unseen", or "train"."""
    tasks: int = 32
    """Number of tasks."""
    attempts: int = 4
    """Episodes per task; pass@k is measured for k = attempts."""
    compaction: str = "none"
    """A compaction of agent.compactions."""
    compare_to: str = ""
    """Suite of the same tasks without compaction; the compaction error is its pass@1 minus this suite's."""
    results: Mapping[str, str] = field(default_factory=dict)
    """Measure (pass_at_1, pass_at_k, tokens_per_summary, compaction_error, ...) -> further dotted key of results.json.
    "{which}" stands for base, before or after, "{k}" for the number of attempts; a key without "{which}" keeps the
    value of the first evaluation."""

    def __post_init__(self) -> None:
        if self.split not in SPLITS:
            raise UserError(f"a suite has split={self.split!r}; use one of {', '.join(SPLITS)}.")
        for name in ("tasks", "attempts"):
            if getattr(self, name) < 1:
                raise UserError(f"a suite of {self.family} has {name}={getattr(self, name)}; it must be at least 1.")


@dataclass(frozen=True)
class EvaluateConfig:
    """What is evaluated: the base of a run that has one, the policy before RL, and the policy after it."""

    suites: Mapping[str, SuiteConfig] = field(default_factory=dict)
    """Name -> suite of generated tasks."""
    which: tuple[str, ...] = ("base", "before", "after")
    """Evaluations that are made, where the run has them: "base", "before" and "after" RL, and "greedy", a control of
    RL: the policy before it with its most probable tokens, once per task. RL that only sharpens it is no better."""
    every: Mapping[str, int] = field(default_factory=dict)
    """Suite -> steps between its runs while a stage trains: RL steps in RL, optimizer steps in SFT. Suites are those of
    `suites`, and heldout_FAMILY for each family of tasks.heldout. A run measures the weights after the step, and
    leaves a row in DIR/metrics/evaluate_STAGE.jsonl."""
    during: tuple[str, ...] = DURING
    """Training stages in which the suites of `every` run. SFT makes a sampler for them, whose weights and cache need
    memory beside the training state while a suite runs."""
    slots_fraction: float = 0.25
    """Episodes of the suites of `every` that play at once while RL plays others, as a fraction of sampler.slots, at
    least one. In SFT and under rl.deterministic nothing else plays meanwhile, and as many play as the sampler opens
    sessions for and agent.concurrency has sandboxes for."""
    temperature: float = 1.0
    """Temperature of all evaluations; 0 is greedy, and attempts at a task then agree."""
    effort: str = ""
    """Level of rl.reward.effort.levels that all evaluations are played at; empty: no prompt speaks of effort."""
    headline: tuple[str, ...] = ()
    """Suites whose results the pipeline prints in its last line, in this order."""
    heldout_attempts: int = 4
    """Episodes per task of tasks.heldout."""
    heldout_compaction: str = "summary"
    """Compaction of the episodes of tasks.heldout."""
    recorded_tasks: int = 4
    """Tasks of each suite whose first two attempts go into the report."""

    def __post_init__(self) -> None:
        for which in self.which:
            if which not in WHICH:
                raise UserError(f"evaluate.which names {which!r}; the evaluations are {', '.join(WHICH)}.")
        for name, steps in self.every.items():
            if not name.startswith(HELDOUT):  # those of families on disk are checked when the tasks have been read
                self._require_suite(name, "every")
            if steps < 1:
                raise UserError(f"evaluate.every.{name}={steps}; it must be at least 1 step, or leave the suite out.")
        for stage in self.during:
            if stage not in DURING:
                raise UserError(f"evaluate.during names {stage!r}; suites can run in {' and '.join(DURING)}.")
        if not 0 < self.slots_fraction <= 1:
            raise UserError(
                f"evaluate.slots_fraction={self.slots_fraction} is not a share of the slots; use above 0, at most 1."
            )
        if self.temperature < 0:
            raise UserError(f"evaluate.temperature={self.temperature} is negative; use 0 to sample greedily.")
        if self.heldout_attempts < 1:
            raise UserError(f"evaluate.heldout_attempts={self.heldout_attempts}; it must be at least 1.")
        if self.recorded_tasks < 0:
            raise UserError(f"evaluate.recorded_tasks={self.recorded_tasks} is negative; use 0 to record none.")
        for name in self.headline:
            self._require_suite(name, "headline")
        for name, suite in self.suites.items():
            if suite.compare_to:
                self._require_suite(suite.compare_to, f"suites.{name}.compare_to")

    def _require_suite(self, name: str, field: str) -> None:
        if name not in self.suites:
            raise UserError(f"evaluate.{field} names the suite {name!r}; there are {', '.join(self.suites) or 'none'}.")
