"""The device calls of one schedule, as they run in a thread beside the event loop."""

import dataclasses
import time
from collections.abc import Sequence

from composer_jax.sampler.drafts import Speculation
from composer_jax.sampler.request import RequestHandle
from composer_jax.sampler.runner import NewScores, NewTokens, RowRequest, Runner
from composer_jax.sampler.sequence import SchedulerOutput


@dataclasses.dataclass(frozen=True)
class StepOutput:
    """Of the device calls of a schedule."""

    version: int
    """Of the weights in these calls."""
    scores: list[NewScores] | None
    """Of each chunk, where any of them wants scores."""
    decoded: list[NewTokens]


def run_schedule(
    runner: Runner,
    speculation: Speculation | None,
    schedule: SchedulerOutput,
    handles: Sequence[RequestHandle],
    version: int,
) -> StepOutput:
    """Makes the device calls of a schedule.

    Args:
      speculation: drafts for decode calls; None decodes step by step.
      handles: of the sequences that decode.
      version: of the weights in `runner`.
    """
    scores = None
    if schedule.prefill_shape is not None:
        scored = not all(chunk.sequence.uses_cache for chunk in schedule.prefill)
        scores = runner.prefill(schedule.prefill_shape, schedule.prefill, scores=scored)
    rows = [RowRequest(handle.sequence, handle.request.seed % 2**32, handle.request.params) for handle in handles]
    if not rows:
        if speculation is not None:
            speculation.note_prefill()
        return StepOutput(version, scores, [])
    drafts = None
    if speculation is not None:
        drafts = speculation.draft(handles, runner.decode_rows(schedule.decode))
    started = time.perf_counter()
    decoded = runner.decode(rows, drafts)
    if speculation is not None:
        if schedule.prefill_shape is not None:
            speculation.note_prefill()
        speculation.note(drafts is not None, decoded, time.perf_counter() - started)
    return StepOutput(version, scores, decoded)
