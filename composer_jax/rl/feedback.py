"""Targeted textual feedback: hints at mistakes become a KL term on the turns that made them.

Composer 2.5 (blog post of 18 May 2026): for a message of the model a short hint is inserted into the local context, the
distribution with the hint is the teacher, that of the original context is the student, and an on-policy distillation KL
moves the student toward the teacher for that turn only; the RL objective of the whole trajectory is kept. Nothing is
sampled: the same tokens are scored a second time. Related: SDPO (arXiv 2601.20802) and OPSD (arXiv 2601.18734).

    L = L_RL + weight/Z sum over tokens t of hinted turns of KL(sg[p(. | context, hint, x_<t)] || p(. | context, x_<t))

The direction of the KL, the weight and Z are not published; Aleph Alpha's Kolibri publishes this direction, whose
gradient at a logit is p_student - p_teacher. Tokens that an older policy sampled get no importance weight: the KL is
between two distributions of the policy that is trained, at contexts of the older one. Detectors (rl/hint_detectors.py)
read the finished episodes in the learner, so rollouts, stored groups and workers know nothing of all this.

This file finds the hints. rl/teacher.py scores the hinted contexts, and train/teacher_kl.py is the term of the loss.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from composer_jax.agent.episode import Episode
from composer_jax.agent.transcript import Node, Transcript
from composer_jax.data.chat.chat_format import ChatFormat
from composer_jax.errors import UserError
from composer_jax.extensions import resolve
from composer_jax.rl.batch import HintedSpan, WeightedRow
from composer_jax.rl.hint_detectors import DETECTORS, Detector, ParsedEpisode

PLACE = "config.rl.feedback.detectors"


@dataclasses.dataclass(frozen=True)
class FeedbackConfig:
    """Targeted textual feedback (rl/feedback.py).

    Raises UserError for an unknown detector, two of one name, none at all, or a number out of range.
    """

    weight: float = 0.0
    """lambda, the weight of the KL to the teacher with the hint; 0 scores nothing. Not published; 0.1 to 1 is a start
    where its normaliser (rl.algorithm.normalisers.feedback) is that of the policy gradient."""
    detectors: tuple[str, ...] = tuple(DETECTORS)
    """What gets a hint: names of rl.hint_detectors.DETECTORS, or import paths of such functions. Composer 2.5 names
    unknown tools; its others are not published."""
    hints_per_episode: int = 4
    """Most turns of an episode that get a hint, the earliest ones. Each costs a forward pass over its context (not
    published)."""
    tokens_per_row: int = 1024
    """Hinted tokens of a row of a batch that one pass has room for; the teacher of each is a state [d_model]. More of
    them take further passes over the batch, so that none is left out (ours)."""

    def __post_init__(self) -> None:
        if not self.weight >= 0:
            raise UserError(f"rl.feedback.weight={self.weight} is negative; use 0 or more.")
        for name in ("hints_per_episode", "tokens_per_row"):
            if getattr(self, name) < 1:
                raise UserError(f"rl.feedback.{name}={getattr(self, name)}; it must be at least 1.")
        if not self.detectors:
            raise UserError("rl.feedback.detectors is empty; name a detector, or use rl.feedback.weight=0.")
        for name in self.detectors:
            if ":" not in name:
                resolve(name, DETECTORS, PLACE)
        names = [detector_name(name) for name in self.detectors]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise UserError(f"rl.feedback.detectors has {twice!r} twice; metrics need one name for each.")


def detector_name(detector: str) -> str:
    """Returns the name of a detector in metrics: that of the table, or the attribute of an import path."""
    return detector.rpartition(":")[2]


def feedback_metrics(
    learned: Mapping[str, float] | None, rows: Sequence[WeightedRow], config: FeedbackConfig, normaliser: float
) -> dict[str, float | None]:
    """Returns what feedback did in one update.

    feedback_kl           KL(teacher || student) in nats per hinted token, before the step; None without any
    feedback_loss         the term of the loss: weight/Z times the sum of the KL; None without any
    feedback_tokens       hinted tokens
    feedback_turns        hinted turns; feedback_turns_NAME those with a hint of this detector

    Args:
      learned: sums of the loss; None for a step without an update.
      rows: what the step trains.
      normaliser: Z, of the loss term `feedback`.

    Raises:
      UserError: the loss has no such term.
    """
    spans = [span for row in rows for span in row.hints]
    if learned is not None and "feedback_kl" not in learned:
        raise UserError(
            f"rl.feedback.weight={config.weight} needs a loss with a term for it, which the one of rl.loss.name lacks; "
            'use "policy_gradient", or rl.feedback.weight=0.'
        )
    sums = learned or {"feedback_tokens": 0.0}
    tokens = sums["feedback_tokens"]
    return {
        "feedback_kl": sums["feedback_kl"] / tokens if tokens else None,
        "feedback_loss": sums["feedback_weighted"] / normaliser if tokens else None,
        "feedback_tokens": tokens,
        "feedback_turns": len(spans),
        **{
            f"feedback_turns_{name}": sum(name in span.detectors for span in spans)
            for name in map(detector_name, config.detectors)
        },
    }


class HintFinder:
    """Finds the hinted spans of episodes.

    too_long: hinted turns that were left out since the finder was made, because with the hint they are longer than
    every training batch.
    """

    def __init__(self, config: FeedbackConfig, chat: ChatFormat, longest_row: int):
        """longest_row: tokens of the longest row that can be scored.

        Raises UserError for the import path of a detector that does not resolve.
        """
        self.detectors: dict[str, Detector] = {
            detector_name(name): resolve(name, DETECTORS, PLACE) for name in config.detectors
        }
        self.config, self.chat, self.longest_row, self.too_long = config, chat, longest_row, 0

    def __call__(self, episode: Episode) -> Mapping[int, tuple[HintedSpan, ...]]:
        """Returns the hinted spans of an episode by the number of their row in Transcript.rows().

        A turn that no row trains gets no hint. Raises UserError for a tool of the task that this process cannot import,
        and ValueError if a detector names a turn that the episode does not have.
        """
        by_turn = self._hints(ParsedEpisode.of(episode, self.chat))
        places = episode.transcript.trained_spans()
        by_row: dict[int, tuple[HintedSpan, ...]] = {}
        hinted = [(node, hints) for node, hints in by_turn if node.id in places and places[node.id].start]
        for node, hints in hinted[: self.config.hints_per_episode]:
            place = places[node.id]
            context = self._context(episode.transcript, node, "\n".join(hints.values()))
            if len(context) + len(node.sampled_tokens) > self.longest_row:
                self.too_long += 1
                continue
            span = HintedSpan(place.start, place.stop, node.sampled_tokens, context, tuple(hints))
            by_row[place.row] = (*by_row.get(place.row, ()), span)
        return by_row

    def _hints(self, parsed: ParsedEpisode) -> list[tuple[Node, dict[str, str]]]:
        """Returns the turns with hints, oldest first, with the text of each detector that has one for the turn."""
        by_turn: dict[int, dict[str, str]] = {}
        for name, detector in self.detectors.items():
            for hint in detector(parsed):
                if not 0 <= hint.turn < len(parsed.turns):
                    raise ValueError(f"detector {name} names turn {hint.turn}; the episode has {len(parsed.turns)}.")
                texts = by_turn.setdefault(hint.turn, {})
                texts[name] = f"{texts[name]}\n{hint.text}" if name in texts else hint.text
        return [(parsed.turns[turn].node, by_turn[turn]) for turn in sorted(by_turn)]

    def _context(self, transcript: Transcript, node: Node, text: str) -> np.ndarray:
        """int32 [m]: the tokens before the node, a user message with the hint, and the prompt of the node's message.

        The ids of the transcript stay as they were sampled, and the hint is encoded as text.
        """
        before = [earlier.tokens for earlier in transcript.path(node.parent)]
        return np.concatenate([*before, np.asarray(self.chat.user([text]), np.int32), node.harness_tokens])
