"""A Learner skips a step whose gradient is not finite; several such steps in a row end the run."""

from composer_jax.errors import UserError

LIMIT = 3
"""Skipped steps in a row that end a run: one may be the fault of its batch, several in a row are not."""


class SkippedSteps:
    """Counts the steps of a run that were skipped."""

    def __init__(self) -> None:
        self.total = 0
        self._in_a_row: list[int] = []

    def add(self, step: int, skipped: float) -> None:
        """Counts a step.

        Args:
          skipped: the metric of Learner.step, 1 or 0.
        """
        self.total += bool(skipped)
        self._in_a_row = [*self._in_a_row, step] if skipped else []

    def require_progress(self) -> None:
        """Raises a UserError if the last LIMIT steps were skipped, or more."""
        if len(self._in_a_row) >= LIMIT:
            steps = self._in_a_row
            raise UserError(
                f"nothing was learned in steps {steps[0]} to {steps[-1]}, because their gradients are not finite. Look "
                "at the data, or start a new workdir with a lower optimizer.peak; the same command goes on with the "
                "next batches."
            )
