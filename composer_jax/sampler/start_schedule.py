"""The device calls of one schedule: `start_schedule` and what finishes them run in a thread beside the event loop."""

import dataclasses
import time
from collections.abc import Callable, Sequence

from composer_jax.sampler.drafts import Speculation
from composer_jax.sampler.request import RequestHandle
from composer_jax.sampler.runner import NewScores, NewTokens, Runner
from composer_jax.sampler.sequence import SchedulerOutput


@dataclasses.dataclass(frozen=True)
class StepOutput:
    """Of the device calls of a schedule."""

    version: int
    """Of the weights in these calls."""
    scores: list[NewScores] | None
    """Of each chunk, where any of them wants scores."""
    decoded: list[NewTokens]


def start_schedule(
    runner: Runner,
    speculation: Speculation | None,
    schedule: SchedulerOutput,
    handles: Sequence[RequestHandle],
    version: int,
) -> Callable[[], StepOutput]:
    """Starts the device calls of a schedule; the function that it returns waits for their results.

    Args:
      speculation: drafts for decode calls; None decodes step by step.
      handles: of the sequences that decode.
      version: of the weights in `runner`.
    """
    read_scores: Callable[[], list[NewScores] | None] = lambda: None  # noqa: E731
    if schedule.prefill_shape is not None:
        scored = not all(chunk.sequence.uses_cache for chunk in schedule.prefill)
        read_scores = runner.start_prefill(schedule.prefill_shape, schedule.prefill, scores=scored)
        if speculation is not None:
            speculation.note_prefill()
    rows = [handle.row for handle in handles]
    if not rows:
        return lambda: StepOutput(version, read_scores(), [])
    drafts = None
    if speculation is not None:
        drafts = speculation.draft(handles, runner.decode_rows(schedule.decode))
    started = time.perf_counter()
    read_tokens = runner.start_decode(rows, drafts)

    def finish() -> StepOutput:
        scores, decoded = read_scores(), read_tokens()
        if speculation is not None:
            speculation.note(drafts is not None, decoded, time.perf_counter() - started)
        return StepOutput(version, scores, decoded)

    return finish
