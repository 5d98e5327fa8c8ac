"""Teacher: scores the hinted spans of packed rows with their hints, and gives the student's batches its states.

Each hinted span is one more row: the tokens before its turn, the hint, and the sampled tokens of the span. These rows
are packed into batches of the same shapes as all others, and a forward pass without a gradient returns the states at
the outputs that predict the span. The k-th token of the span in the teacher's row and the k-th in the student's are the
same token by construction; their outputs are the positions before them in the two rows.

The teacher is the policy before the step, as the student is, so that the KL of a span is that of the hint alone. It
chooses its own experts, also under router replay: the routes of the hint are unknown, and those of the span belong to
the context without the hint. The student replays its routes as in the rest of the loss.

Shapes are static: every batch has min(rl.feedback.tokens_per_row, S) slots in each row, so that each shape of
rl.batches has one program for the teacher and one for the loss. A row with more hinted tokens than slots takes further
passes over its batch, which train nothing else.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from composer_jax.agent.transcript import TranscriptError, TranscriptRow
from composer_jax.data.host_batch import HostField
from composer_jax.models.model_def import Params
from composer_jax.rl.batch import BeforeCall, HintedSpan, PackedRows, WeightedRow
from composer_jax.train.scoring import OutputStates, states_fields

STREAMS = ("weights", "advantages", "ce_weights", "kl_weights")
"""Fields of a batch that are zero in its further passes."""


class OutputPlaces(NamedTuple):
    """Where the outputs that predict T tokens lie, int [T] each."""

    batch_T: np.ndarray
    row_T: np.ndarray
    output_T: np.ndarray
    """Position in the row."""


class SlotPass(NamedTuple):
    """The tokens that one pass over a batch computes, int [n] each: their numbers, rows, slots and outputs."""

    tokens_n: np.ndarray
    rows_n: np.ndarray
    slots_n: np.ndarray
    outputs_n: np.ndarray

    def outputs(self, n_rows: int, n_slots: int) -> np.ndarray:
        """Returns the outputs by slot, int32 [B,N], -1 in empty slots."""
        outputs_BN = np.full((n_rows, n_slots), -1, np.int32)
        outputs_BN[self.rows_n, self.slots_n] = self.outputs_n
        return outputs_BN


class Teacher:
    """Scores hinted spans with a program that holds no weights."""

    def __init__(self, scorer: OutputStates, weight: float, tokens_per_row: int, before_call: BeforeCall):
        """weight, tokens_per_row: of FeedbackConfig. before_call: called with "teacher_states" and what is scored."""
        self._before_call = before_call
        self.scorer, self.weight, self.tokens_per_row = scorer, weight, tokens_per_row

    def add_states(
        self,
        student: PackedRows,
        teacher: PackedRows,
        batches: Sequence[Mapping[str, HostField]],
        policy: tuple[Params, Params],
    ) -> Iterator[dict[str, HostField]]:
        """Yields the student's batches with the SLOT_FIELDS of train/teacher_kl.py, once for each pass.

        The teacher is scored before the first batch is yielded, and one batch with states exists at a time.

        Args:
          student, teacher: packed rows, and their `teacher_rows`.
          batches: those of `student`, perhaps with further fields.
          policy: (params, router_bias) before the step.
        """
        spans = [(i, span) for i, row in enumerate(student.rows) for span in row.hints]
        students = _outputs(student, [(i, span.start, span.stop) for i, span in spans])
        ends = [len(row.row.tokens) for row in teacher.rows]
        lengths = [len(span.tokens) for _, span in spans]
        teachers = _outputs(teacher, [(i, end - n, end) for i, (end, n) in enumerate(zip(ends, lengths, strict=True))])
        states_TD = self._score(teacher, teachers, policy)
        for number, batch in enumerate(batches):
            n_rows, n_slots = self._slots(batch)
            for i, one in enumerate(slot_passes(students, number, n_slots)):
                weights_BN = np.zeros((n_rows, n_slots), np.float32)
                weights_BN[one.rows_n, one.slots_n] = self.weight
                states_BND = np.zeros((n_rows, n_slots, states_TD.shape[1]), states_TD.dtype)
                states_BND[one.rows_n, one.slots_n] = states_TD[one.tokens_n]
                silent = {name: np.zeros_like(batch[name]) for name in STREAMS} if i else {}
                yield {
                    **batch,
                    **silent,
                    "feedback_outputs": one.outputs(n_rows, n_slots),
                    "feedback_weights": weights_BN,
                    "teacher_states": states_BND,
                }

    def _score(self, teacher: PackedRows, places: OutputPlaces, policy: tuple[Params, Params]) -> np.ndarray:
        """Returns the teacher's state at every output of `places`, [T,D]."""
        config = self.scorer.definition.config
        states_TD = np.zeros((len(places.batch_T), config.d_model), jnp.dtype(config.compute_dtype))
        for number, batch in enumerate(teacher.batches):
            for one in slot_passes(places, number, self._slots(batch)[1]):
                outputs_BN = one.outputs(*self._slots(batch))
                self._before_call("teacher_states", states_fields(batch, outputs_BN))
                states_BND = self.scorer(*policy, batch, outputs_BN)
                states_TD[one.tokens_n] = states_BND[one.rows_n, one.slots_n]
        return states_TD

    def _slots(self, batch: Mapping[str, HostField]) -> tuple[int, int]:
        n_rows, length = batch["tokens"].shape
        return n_rows, min(self.tokens_per_row, length)


def teacher_rows(rows: Sequence[WeightedRow]) -> list[WeightedRow]:
    """Returns the teacher's row of every hinted span, in the order of the rows and their hints.

    Raises TranscriptError if a row does not have the tokens of its span; always a bug.
    """
    return [_teacher_row(row.row, span) for row in rows for span in row.hints]


def _teacher_row(row: TranscriptRow, span: HintedSpan) -> WeightedRow:
    here = slice(span.start, span.stop)
    if not np.array_equal(row.tokens[here], span.tokens) or not row.trained[here].all():
        raise TranscriptError(f"tokens {span.start} to {span.stop} of a row are not those of the hinted turn")
    tokens = np.concatenate([span.context, span.tokens])
    n = len(tokens)
    trained = np.arange(n) >= len(span.context)
    unsampled = TranscriptRow(tokens, trained, np.zeros(n, np.float32), np.full(n, -1, np.int32))
    return WeightedRow.of(unsampled, 0.0, weight=0.0, kl_weight=0.0)


def slot_passes(places: OutputPlaces, batch: int, n_slots: int) -> list[SlotPass]:
    """Returns the passes over a batch, at least one. A pass has up to n_slots tokens of each row, in their order."""
    tokens = np.flatnonzero(places.batch_T == batch)
    rows = places.row_T[tokens]
    order = np.argsort(rows, kind="stable")
    in_row = np.empty(len(tokens), int)  # number of the token among the hinted ones of its row
    in_row[order] = np.arange(len(tokens)) - np.searchsorted(rows[order], rows[order])
    passes = []
    for number in range(1 + int(in_row.max(initial=0)) // n_slots):
        chosen = in_row // n_slots == number
        of_pass = tokens[chosen]
        passes.append(SlotPass(of_pass, rows[chosen], in_row[chosen] % n_slots, places.output_T[of_pass]))
    return passes


def _outputs(packed: PackedRows, spans: Sequence[tuple[int, int, int]]) -> OutputPlaces:
    """Returns the outputs that predict the tokens of spans (row, start, stop): the positions before them."""
    parts: list[tuple[int, int, np.ndarray]] = []
    for row, start, stop in spans:
        place = packed.places[row]
        parts.append((place.batch, place.row, place.start + np.arange(start - 1, stop - 1)))
    lengths = [len(outputs) for _, _, outputs in parts]
    return OutputPlaces(
        np.repeat([batch for batch, _, _ in parts], lengths).astype(int),
        np.repeat([row for _, row, _ in parts], lengths).astype(int),
        np.concatenate([np.zeros(0, int), *(outputs for _, _, outputs in parts)]),
    )
