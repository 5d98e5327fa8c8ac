"""The KL to a teacher that predicts the same tokens in another context (rl/feedback.py).

The teacher is the policy itself before the step, so that its last hidden states and the head of the network are its
distributions over the whole vocabulary. A batch of the student has the teacher's states in N slots for each row:

    feedback_outputs   int32 [B,N]      the output that predicts the token, a position of the whole row; -1: empty slot
    feedback_weights   float32 [B,N]    weight of the KL; 0 in empty slots
    teacher_states     [B,N,D]          the teacher's normalised last state at the same token, compute dtype

The KL and its gradient are exact: no vocabulary is cut, and the head makes the logits from the same bits in the same
dtype as in a forward pass over the hinted context. A state takes D numbers instead of W log-probabilities, and the head
is applied to N outputs of a row, not to S. The fields are not divided over the mesh axis `context`: each device of it
computes the slots whose output it has.
"""

from typing import Any

import jax
import jax.numpy as jnp

from composer_jax.models.config import ModelConfig
from composer_jax.models.decoder import Decoder
from composer_jax.models.predictions import Predictions
from composer_jax.ops.shapes import check_shapes
from composer_jax.ops.vma import match_vma
from composer_jax.parallel import context
from composer_jax.train.forward import Batch, predict_positions

SLOT_FIELDS = ("feedback_outputs", "feedback_weights", "teacher_states")
"""Fields of a batch with an entry per slot of a row."""


def slot_shapes(n_rows: int, n_slots: int, config: ModelConfig) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Returns (shape, dtype) of each of the SLOT_FIELDS for B rows of N slots."""
    shape, dtypes = (n_rows, n_slots), (jnp.int32, jnp.float32, jnp.dtype(config.compute_dtype))
    shapes = (shape, shape, (*shape, config.d_model))
    return dict(zip(SLOT_FIELDS, zip(shapes, dtypes, strict=True), strict=True))


def states_at(last_BSD: jax.Array, outputs_BN: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the states [B,N,D] at outputs of the whole row, and which of them this device has, bool [B,N]."""
    check_shapes(last_BSD=(last_BSD, jnp.floating), outputs_BN=(outputs_BN, jnp.int32))
    index_BN, is_here_BN = context.local_index(outputs_BN, last_BSD.shape[1])
    return jnp.take_along_axis(last_BSD, index_BN[..., None], axis=1, mode="clip"), is_here_BN


def teacher_kl(decoder: Decoder, last_BSD: jax.Array, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns the weighted sum of KL(teacher || student) over this device's outputs, float32 [], and its metrics.

    No gradient reaches the teacher; that of the student's logits is weight * (p_student - p_teacher).

    Args:
      last_BSD: the student's normalised states.
      batch: has the SLOT_FIELDS.

    Returns:
      The sum, and "feedback_kl": the sum of the KL in nats, "feedback_weighted": the weighted sum, "feedback_tokens":
      the number of tokens in both.
    """
    outputs_BN, weights_BN, teacher_BND = (batch[name] for name in SLOT_FIELDS)
    check_shapes(
        last_BSD=(last_BSD, jnp.floating),
        outputs_BN=(outputs_BN, jnp.int32),
        weights_BN=(weights_BN, jnp.float32),
        teacher_BND=(teacher_BND, last_BSD.dtype),
    )
    # The slots are typed as varying over `context`, like the states: each device of it has terms of its own outputs.
    last_BSD, outputs_BN, weights_BN, teacher_BND = match_vma(last_BSD, outputs_BN, weights_BN, teacher_BND)
    student_BND, is_here_BN = states_at(last_BSD, outputs_BN)
    weights_BN = jnp.where(is_here_BN, weights_BN, 0)

    def at_slot(teacher: Predictions, student: Predictions):
        return teacher.divergence(student)

    with jax.named_scope("teacher_kl"):
        kl_BN = predict_positions(decoder, at_slot, decoder.config.head_chunk, (teacher_BND, student_BND))
        term = (weights_BN * kl_BN).sum()
        sums = {
            "feedback_kl": jnp.where(weights_BN != 0, kl_BN, 0).sum(),
            "feedback_weighted": term,
            "feedback_tokens": (weights_BN != 0).sum().astype(jnp.float32),
        }
    return term, sums
