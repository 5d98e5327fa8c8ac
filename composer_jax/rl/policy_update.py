"""PolicyUpdate: groups of graded episodes -> one update of the weights."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from composer_jax.agent.episode import Episode
from composer_jax.agent.transcript import TranscriptRow
from composer_jax.data.chat.chat_format import ChatFormat
from composer_jax.data.host_batch import HostField
from composer_jax.models.flops import row_flops
from composer_jax.models.model_def import Params
from composer_jax.parallel.mesh import batch_shards
from composer_jax.rl.algorithm import Algorithm, make_algorithm
from composer_jax.rl.batch import (
    Group,
    HintedSpan,
    PackedRoutes,
    PackedRows,
    WeightedRow,
    empty_batch,
    has_enough_graded,
    pack_rows,
)
from composer_jax.rl.config import RLConfig
from composer_jax.rl.feedback import HintFinder, feedback_metrics
from composer_jax.rl.penalties import import_behaviors
from composer_jax.rl.reference import Reference, with_reference
from composer_jax.rl.replay import ReplayMix
from composer_jax.rl.teacher import Teacher, teacher_rows
from composer_jax.sampler.weight_checksums import WeightChecksums
from composer_jax.train.learner import Learner, TrainState
from composer_jax.train.losses import LossTermNormalisers
from composer_jax.train.scoring import OutputStates, TokenScorer

PER_TOKEN = ("entropy", "out_of_region", "dual_clipped", "sampler_kl")
"""Metrics that are means over the tokens of the policy gradient. dual_clipped is the part of out_of_region that
rl.loss.dual_clip leaves out. sampler_kl is the k1 estimate of KL(sampler || learner) in nats, log p_sampler - log p."""
OF_REFERENCE = {"kl_reference": "reference_k1", "kl_reference_k3": "reference_k3"}
"""Column -> the loss's name, of metrics that are there with a reference only."""
OF_STEP = ("grad_norm", "learning_rate", "skipped")
OF_RATIO = ("log_ratio_max", "ratio_max")
OF_EXPERTS = ("load_imbalance", "router_entropy")
"""Metrics that only a network with experts has."""
OF_QK_CLIP = ("max_attention_logit",)


FindHints = Callable[[Episode], Mapping[int, tuple[HintedSpan, ...]]]
"""Returns the hints of an episode by the number of the row in Transcript.rows()."""


OnDeviceCall = Callable[[str, Mapping[str, HostField], Sequence[float | None]], object]
"""The name of a device call, its batch (empty for calls without) and LossTermNormalisers (of a gradient)."""


@dataclasses.dataclass(frozen=True)
class UpdateResult:
    """What one step of learning did."""

    is_updated: bool
    """Whether the weights changed."""
    metrics: dict[str, float | None]
    """Columns of metrics/rl.jsonl; those of an update are None without one."""
    checksums: WeightChecksums | None = None
    """Of the updated weights, which a sampler that takes them must have; None where nobody compares them."""
    lengths: Sequence[int] = ()
    """Tokens of each row that went through the learner."""


class GroupLearner(Protocol):
    """What the orchestrator learns with."""

    def step(
        self, state: TrainState, groups: Sequence[Group], episodes: int, step: int
    ) -> tuple[TrainState, UpdateResult]:
        """See PolicyUpdate.step."""
        ...

    def score(self, state: TrainState, tokens: Sequence[int], routing: np.ndarray | None) -> np.ndarray:
        """See PolicyUpdate.score."""
        ...


class PolicyUpdate:
    """The learning half of an RL step: advantages, batches and the optimizer step. It holds no weights."""

    def __init__(self, config: RLConfig, learner: Learner, chat: ChatFormat | None = None):
        """chat: the format of the episodes, for rl.feedback.

        Raises UserError if an algorithm, a behaviour or a detector of the config does not resolve, and ValueError if
        rl.feedback is on and there is no chat format.
        """
        self.config, self.learner = config, learner
        self.algorithm = make_algorithm(config.algorithm.name, config.algorithm.options)
        import_behaviors(config.reward.behaviors)  # refuses a wrong path before a rollout
        self.route_shape = config.route_shape(learner.definition.config)
        self.is_compiled = False
        self.learner_checksums: Callable[[Params], WeightChecksums] | None = None
        """Sampler.learner_checksums of the sampler that takes the weights."""
        self.on_device_call: OnDeviceCall | None = None
        """Called before every device call of `step` and `score`: every process of the learner makes the same ones in
        the same order (`follow_device_call`)."""
        self._gradient: dict[str, Any] | None = None
        """Of the batches of a step that process 0 takes, in the other processes."""
        self._reference: Reference | None = None
        self._replay: ReplayMix | None = None
        self._find_hints: HintFinder | None = None
        feedback = config.feedback
        if feedback.weight:
            if chat is None:
                raise ValueError(f"rl.feedback.weight={feedback.weight} needs the chat format of the episodes")
            self._find_hints = HintFinder(feedback, chat, config.batches[-1][0])
            scorer = OutputStates(learner.definition, learner.mesh)
            self._teacher = Teacher(scorer, feedback.weight, feedback.tokens_per_row, self._begin_call)

    def set_reference(self, params: Params, router_bias: Params) -> None:
        """Sets the policy that rl.algorithm.kl refers to: the weights that RL started from, also in a resumed run.

        The arrays are kept as they are, and nothing may donate them. With a coefficient of 0 they are not kept. Raises
        UserError if the weights are not of the network that is trained.
        """
        if self.config.algorithm.kl.coefficient:
            self._reference = Reference(params, router_bias, self._scorer, self._begin_call)

    def set_replay(self, mix: ReplayMix) -> None:
        """Sets the conversations of SFT that rl.replay trains beside the episodes of every step."""
        self._replay = mix

    @functools.cached_property
    def _scorer(self) -> TokenScorer:
        return TokenScorer(
            self.learner.definition, self.learner.mesh, plausibility=self.config.loss.replay_plausibility
        )

    def score(self, state: TrainState, tokens: Sequence[int], routing: np.ndarray | None) -> np.ndarray:
        """Returns the log-probability of each token of a row under the learner's weights, float32 [n].

        The row takes the place of one in a batch of the first of rl.batches. The first token's entry has no meaning.

        routing: int16 [n-1, expert layers, experts per token] of the sampler, used where routes are replayed.
        """
        n, (length, rows) = len(tokens), self.config.batches[0]
        batch: dict[str, Any] = empty_batch(
            length, rows, route_shape=self.route_shape, n_experts=self.learner.definition.config.n_experts
        )
        batch["tokens"][0, :n], batch["positions"][0, :n], batch["segments"][0, :n] = tokens, np.arange(n), 1
        if self.route_shape is not None and routing is not None:
            ids, zeros = np.asarray(tokens, np.int32), np.zeros(n, np.float32)
            row = TranscriptRow(ids, zeros > 0, zeros, np.full(n, -1, np.int32), [(0, np.asarray(routing))])
            batch["routes"] = PackedRoutes(
                [[(0, row)], *[[]] * (rows - 1)], batch["routes"].shape, batch["routes"].dtype
            )
        self._begin_call("policy_logprobs", batch)
        return self._scorer(state.params, state.router_bias, batch)[0, :n]

    def follow_device_call(
        self, state: TrainState, call: str, batch: Mapping[str, HostField], normalisers: Sequence[float | None]
    ) -> TrainState:
        """Takes part in a device call of process 0 (`on_device_call`); returns the state, which "update" replaces.

        What comes out is the business of process 0, apart from the weights. Raises ValueError for an unknown call.
        """
        policy = (state.params, state.router_bias)
        if call == "gradient":
            self._gradient = self.learner.add_gradient(self._gradient, state, batch, LossTermNormalisers(*normalisers))
        elif call == "update":
            assert self._gradient is not None, "process 0 updates the weights after a gradient"
            state, _ = self.learner.apply_gradient(state, self._gradient, int(state.step))
            self._gradient = None
        elif call == "checksums":
            assert self.learner_checksums is not None, "all processes compare the weights, or none"
            self.learner_checksums(state.params)
        elif call == "policy_logprobs":
            self._scorer(*policy, batch)
        elif call == "reference_logprobs" and self._reference is not None:
            self._reference.scorer(self._reference.params, self._reference.router_bias, batch)
        elif call == "teacher_states" and self._find_hints is not None:
            self._teacher.scorer(*policy, batch, batch["feedback_outputs"])
        else:
            raise ValueError(f"process 0 makes the call {call!r}, which this process has no program for")
        return state

    def _begin_call(
        self, call: str, batch: Mapping[str, HostField], normalisers: LossTermNormalisers | None = None
    ) -> None:
        if self.on_device_call is not None:
            self.on_device_call(call, batch, [] if normalisers is None else list(normalisers))

    def _with_calls(
        self, batches: Iterable[dict[str, HostField]], normalisers: LossTermNormalisers
    ) -> Iterator[dict[str, HostField]]:
        """Yields the batches of a step, each before its gradient is computed; the update follows the last one."""
        for batch in batches:
            self._begin_call("gradient", batch, normalisers)
            yield batch
        self._begin_call("update", {})

    def step(
        self, state: TrainState, groups: Sequence[Group], episodes: int, step: int
    ) -> tuple[TrainState, UpdateResult]:
        """Takes one optimizer step on the groups.

        Groups that lost half of their episodes or more are left out; the metric groups_incomplete counts them. Groups
        of equal rewards are dropped before they cost a training token, except for their rows with hints (rl.feedback).
        A step without anything to train leaves the weights alone: an update with a zero gradient would still move them
        by Adam's momentum. Nothing is replayed in it (rl.replay); in others the metric sft_replay_tokens counts the
        tokens of the conversations, context included.

        Args:
          state: donated; use the returned one.
          episodes: number of episodes that the loss is divided by, times rl.tokens_per_episode; those without a grade
            count as well, so that a lost episode does not raise the weight of the others.
          step: RL steps before this one, for algorithms that depend on it.
        """
        complete = [group for group in groups if has_enough_graded(group, self.config.group_size)]
        too_long_before = self._find_hints.too_long if self._find_hints else 0
        by_group = weighted_rows(complete, self.algorithm, step, self._find_hints)
        # First the rows with a signal of their rewards, whose places are then those of a step without hints.
        rows = sorted((row for rows in by_group for row in rows), key=lambda row: not row.has_signal)
        replayed = self._draw_replay(rows, step)
        rows += replayed
        learned: dict[str, float] | None = None
        normalisers = self.normalisers(rows, episodes)
        if rows:
            batches = self._batches(rows, state, normalisers)
            self.is_compiled = True
            if self.on_device_call is not None:
                batches = self._with_calls(batches, normalisers)
            state, learned = self.learner.step(state, batches, normalisers)
        metrics = learning_metrics(
            learned,
            has_experts=self.learner.definition.config.n_experts > 0,
            has_reference=self.config.algorithm.kl.coefficient > 0,
            has_qk_clip=self.config.optimizer.qk_clip is not None,
        )
        if self.route_shape is not None:
            metrics |= replay_metrics(learned)
        if self._find_hints is not None:
            metrics |= feedback_metrics(learned, rows, self.config.feedback, normalisers.feedback)
            metrics["feedback_too_long"] = self._find_hints.too_long - too_long_before
        if self._replay is not None:
            metrics["sft_replay_tokens"] = sum(len(row.row.tokens) for row in replayed)
        metrics["groups_used"] = sum(any(row.has_signal for row in rows) for rows in by_group)
        metrics["groups_incomplete"] = len(groups) - len(complete)
        is_updated = learned is not None and not learned["skipped"]
        make_checksums = self.learner_checksums if is_updated else None
        if make_checksums is not None:
            self._begin_call("checksums", {})
        checksums = make_checksums and make_checksums(state.params)
        return state, UpdateResult(is_updated, metrics, checksums, [len(row.row.tokens) for row in rows])

    def _draw_replay(self, rows: Sequence[WeightedRow], step: int) -> list[WeightedRow]:
        """Returns the conversations that go with the rows of a step."""
        if self._replay is not None:
            return self._replay.draw(step, sum(len(row.row.tokens) for row in rows))
        if self.config.replay.fraction:
            raise ValueError(f"rl.replay.fraction={self.config.replay.fraction} needs set_replay() before a step")
        return []

    def _batches(
        self, rows: Sequence[WeightedRow], state: TrainState, normalisers: LossTermNormalisers
    ) -> Iterable[dict[str, HostField]]:
        """Returns the batches, with the KL to the reference and the teacher of hints if the config has them."""
        config = self.config.algorithm.kl
        packed = self._pack(rows, self.route_shape)
        batches = packed.batches
        if config.coefficient:
            if self._reference is None:
                raise ValueError(
                    f"rl.algorithm.kl.coefficient={config.coefficient} needs set_reference() before a step"
                )
            policy = (state.params, state.router_bias)
            batches = with_reference(packed, config, self._reference, policy, normalisers)
        if self._find_hints is None:
            return batches
        hinted = self._pack(teacher_rows(rows), None)
        return self._teacher.add_states(packed, hinted, batches, (state.params, state.router_bias))

    def _pack(self, rows: Sequence[WeightedRow], route_shape: tuple[int, int] | None) -> PackedRows:
        """Packs rows; for the first update with a batch of every shape without a gradient, which compiles them all."""
        return pack_rows(
            rows,
            self.config.batches,
            every_shape=not self.is_compiled,
            shards=batch_shards(self.learner.mesh),
            cost=functools.partial(row_flops, self.learner.definition.config),
            route_shape=route_shape,
            n_experts=self.learner.definition.config.n_experts,
        )

    def normalisers(self, rows: Sequence[WeightedRow], episodes: int) -> LossTermNormalisers:
        """Returns what each loss term of a step is divided by: rl.algorithm.normalisers."""
        constant = episodes * self.config.tokens_per_episode

        def count(loss_term: str) -> float:
            return float(sum(np.count_nonzero(getattr(row, loss_term)) for row in rows))

        kinds = self.config.algorithm.normalisers
        feedback = None
        if self._find_hints is not None:
            hinted = float(sum(len(span.tokens) for row in rows for span in row.hints))
            feedback = constant if kinds.feedback == "constant" else max(1.0, hinted)
        by_kind = {"constant": lambda _: constant, "tokens": lambda loss_term: max(count(loss_term), 1.0)}
        return LossTermNormalisers(
            policy=by_kind[kinds.policy]("weights"),
            cross_entropy=by_kind[kinds.cross_entropy]("ce_weights"),
            kl=by_kind[kinds.kl]("kl_weights"),
            feedback=feedback,
        )


def weighted_rows(
    groups: Sequence[Group],
    algorithm: Algorithm,
    step: int = 0,
    find_hints: FindHints | None = None,
) -> list[list[WeightedRow]]:
    """Returns, for each group, the rows that have something to train; none for a group without a signal.

    A row with hints and without a signal of its rewards is trained towards its teacher only.

    Args:
      step: RL steps before this one.
      find_hints: finds the hints of an episode (rl/feedback.py); None: no hints. It is not asked about episodes with
        given advantages.
    """
    numbers, by_group = itertools.count(), []
    for group in groups:
        chosen = []
        for episode, rows in zip(group.episodes, algorithm.weigh(group, step), strict=True):
            number = next(numbers)
            # The tools of a user's session are its client's, which detectors do not know.
            hints = find_hints(episode) if find_hints and episode.advantages is None else {}
            hinted = (dataclasses.replace(row, episode=number, hints=hints.get(i, ())) for i, row in enumerate(rows))
            chosen += [row if row.has_signal else row.without_signal() for row in hinted if row.has_signal or row.hints]
        by_group.append(chosen)
    return by_group


def learning_metrics(
    learned: dict[str, float] | None, *, has_experts: bool, has_reference: bool = False, has_qk_clip: bool = False
) -> dict[str, float | None]:
    """Returns the metrics of one update; None for those that it lacks, and for a step without an update.

    cross_entropy is in nats per unit of weight. kl_reference and kl_reference_k3 estimate KL(learner || reference) in
    nats per token, by k1 = log p - log p_ref and by k3 = exp(-k1) - 1 + k1.
    """
    optional = (*(OF_EXPERTS if has_experts else ()), *(OF_QK_CLIP if has_qk_clip else ()))
    of_reference = OF_REFERENCE if has_reference else {}
    columns = (*PER_TOKEN, *of_reference, "cross_entropy", *OF_RATIO, *OF_STEP, *optional)
    if learned is None:
        return {"trained_tokens": 0.0, **dict.fromkeys(columns)}
    tokens, ce_weight = max(learned["tokens"], 1.0), learned.get("ce_weight", 0.0)
    return {
        **{name: learned[name] / tokens for name in PER_TOKEN},
        **{column: learned[name] / tokens for column, name in of_reference.items()},
        "cross_entropy": learned["cross_entropy"] / ce_weight if ce_weight else None,
        "log_ratio_max": learned["log_ratio"],
        "ratio_max": float(np.exp(learned["log_ratio"])),
        "trained_tokens": learned["tokens"],
        **{name: learned[name] for name in (*OF_STEP, *optional)},
    }


def replay_metrics(learned: dict[str, float] | None) -> dict[str, float | None]:
    """Returns what router replay did in one update; None for a step without an update.

    replay_foreign: fraction of the sampler's choices of experts that the learner's router would not have made.
    replay_filtered: fraction that loss.replay_plausibility replaced.
    """
    if learned is None:
        return {"replay_foreign": None, "replay_filtered": None}
    choices = max(learned["replayed"], 1.0)
    return {name: learned[name] / choices for name in ("replay_foreign", "replay_filtered")}
