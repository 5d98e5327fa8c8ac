"""Study: simulated runs over splits of the chips and numbers of sandboxes, and what to buy next.

The speeds come from `predict_speeds`, which reads them off the roofline.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from composer_jax.errors import UserError
from composer_jax.observe.progress import Progress
from composer_jax.parallel.mesh import batch_shards
from composer_jax.rl.config import RLConfig
from composer_jax.rl.group_buffer import LateGroups
from composer_jax.sampler.session_gate import SOFT_LIMIT
from composer_jax.scale.message_costs import route_token_bytes
from composer_jax.scale.plan import PlacedStep, place_steps, predict_step
from composer_jax.scale.simulation.assumptions import Assumptions
from composer_jax.scale.simulation.outcome import Outcome
from composer_jax.scale.simulation.roles import Fleet, Speeds, TokenBytes, make_roles, turn_bytes, turn_seconds
from composer_jax.scale.simulation.simulation import HOUR_S, Simulation
from composer_jax.scale.simulation.workload import DrawnWorkload
from composer_jax.scale.step_bytes import token_bytes
from composer_jax.scale.topology import tpu_slice
from composer_jax.schema.run_config import RunConfig, run_config

MORE = 0.25
"""How much more of each thing is tried: a quarter."""
_PUBLISHED_BYTES = 2
"""Bytes of a published weight: rl.publish writes bfloat16."""


@dataclasses.dataclass(frozen=True)
class Study:
    """What all rows of a table share."""

    config: RunConfig
    """Its sections rl, agent and sampler.max_model_len are used."""
    speeds: Speeds
    assumed: Assumptions
    hours: float = 24.0
    """Simulated hours that are measured."""
    warm_up_hours: float = 4.0
    """Simulated hours before."""
    seed: int = 0
    parts: int = 4
    """How often an attempt alternates between sandbox and engine."""

    def __post_init__(self) -> None:
        _check_study(self.config.rl, self.hours, self.warm_up_hours, self.parts)

    @property
    def total_hours(self) -> int:
        """Whole hours of one simulated run."""
        return int(self.hours + self.warm_up_hours)

    def simulate(
        self, fleet: Fleet, *, rl: RLConfig | None = None, assumed: Assumptions | None = None, on_hour: Any = None
    ) -> Outcome:
        """Simulates one run. rl, assumed: those of the study by default.

        Raises:
          UserError: the fleet lacks a role.
        """
        rl, assumed = rl or self.config.rl, assumed or self.assumed
        workload = DrawnWorkload(
            assumed,
            group_size=rl.group_size,
            max_model_len=self.config.sampler.max_model_len,
            max_turns=self.config.agent.limits.max_turns,
            seed=self.seed,
        )
        sessions = self.sessions(workload.longest_context)
        roles = make_roles(
            fleet,
            self.speeds,
            assumed,
            workload.prefilled_per_sampled,
            sessions,
            self.sizes,
            one_process=rl.samples_here,
        )
        limit = self.config.agent.episode_seconds
        simulation = Simulation(rl, roles, workload, episode_seconds=limit, parts=self.parts)
        return simulation.run(self.hours * HOUR_S, warm_up_s=self.warm_up_hours * HOUR_S, on_hour=on_hour)

    @property
    def sizes(self) -> TokenBytes:
        """Bytes of a token of the run."""
        return token_bytes_of(self.config)

    @property
    def costs(self) -> dict[str, float]:
        """What hosts move, for the table."""
        return {
            "message_bytes": turn_bytes(self.sizes, self.assumed),
            "message_s": turn_seconds(self.sizes, self.assumed),
            "batch_token_bytes": self.sizes.batch,
            "patch_bytes": self.assumed.patch_fraction * self.speeds.weight_bytes,
        }

    def sessions(self, longest_context: float) -> int:
        """Returns how many sessions one replica of the engine holds, by the rule of sampler/session_gate.py.

        longest_context: mean tokens of an episode's longest context.
        """
        sampler, slots = self.config.sampler, self.speeds.decode_steps[-1][0]
        cache = (sampler.cache_tokens or sampler.slots * sampler.max_model_len) * slots / sampler.slots
        return max(slots, int(cache // sampler.max_model_len), int(SOFT_LIMIT * cache / longest_context + 1e-9))

    def gains(self, fleet: Fleet, outcome: Outcome, on_hour: Callable[[], None] | None = None) -> dict[str, float]:
        """Returns by what fraction the steps per day grow if one thing is increased and the others stay.

        Chips for learning and chips for rollout grow by the same number, a quarter of all chips (rollout by at least
        one replica), sandboxes by a quarter and the network's bandwidth by a quarter. Two changes cost nothing:
        max_staleness grows by 1, and late groups are dropped instead of waited for (or the other way round).
        """
        chips, rl = self.more_chips(fleet), self.config.rl
        other: LateGroups = "wait" if rl.late_groups == "drop" else "drop"
        faster = self.assumed.network_bytes_per_s * (1 + MORE)
        variants = {
            "chips for learning": dict(fleet=self._grown(fleet, "learner_chips", chips)),
            "chips for rollout": dict(fleet=self._grown(fleet, "rollout_chips", chips)),
            "sandboxes": dict(fleet=self._grown(fleet, "sandboxes", max(1, round(MORE * fleet.sandboxes)))),
            "network": dict(fleet=fleet, assumed=dataclasses.replace(self.assumed, network_bytes_per_s=faster)),
            f"rl.max_staleness={rl.max_staleness + 1}": dict(
                fleet=fleet, rl=dataclasses.replace(rl, max_staleness=rl.max_staleness + 1)
            ),
            f"rl.late_groups={other}": dict(fleet=fleet, rl=dataclasses.replace(rl, late_groups=other)),
        }
        base = outcome.steps_per_day
        if not base:
            return {}
        return {
            name: self.simulate(**variant, on_hour=on_hour).steps_per_day / base - 1
            for name, variant in variants.items()
        }

    def more_chips(self, fleet: Fleet) -> int:
        """Returns by how many chips `gains` increases a role."""
        return max(round(MORE * (fleet.learner_chips + fleet.rollout_chips)), self.speeds.replica_chips)

    def _grown(self, fleet: Fleet, field: str, more: int) -> Fleet:
        return dataclasses.replace(fleet, **{field: getattr(fleet, field) + more})


def token_bytes_of(config: RunConfig) -> TokenBytes:
    """Returns the bytes of a token of a run between hosts (scale/message_costs.py, scale/step_bytes.py)."""
    rl, shape = config.rl, config.rl.route_shape(config.model)
    return TokenBytes(
        route=route_token_bytes(config.model) if shape else 0,
        batch=token_bytes(shape, config.model.n_experts, has_reference=rl.algorithm.kl.coefficient > 0),
        batch_tokens=max(rows * length for length, rows in rl.batches),
        call_tokens=config.sampler.decode_steps,
    )


VARIANTS = 6
"""Simulations of one call of Study.gains."""


def _check_study(rl: RLConfig, hours: float, warm_up_hours: float, parts: int) -> None:
    if sum(rl.groups.values()) < 1:
        raise UserError("rl.groups has no group; set the groups of a step, e.g. --config.rl.groups.repository=512.")
    if rl.deterministic:
        raise UserError("rl.deterministic=True is not simulated; use --config.rl.deterministic=False.")
    if parts < 1:
        raise UserError(f"--parts={parts} is not a number of parts; use 1 or more.")
    if not hours > 0 or not warm_up_hours >= 0:
        raise UserError(
            f"--hours={hours} and --warm_up_hours={warm_up_hours} leave no time to simulate; use hours above 0, and 0 "
            "or more to warm up."
        )


def parse_splits(splits: Sequence[str]) -> list[tuple[int, int]]:
    """Returns the two numbers of splits such as "1:3", learning first.

    Raises:
      UserError: a split is malformed.
    """
    result = []
    for split in splits:
        left, _, right = split.partition(":")
        if not (left.isdecimal() and right.isdecimal() and int(left) and int(right)):
            raise UserError(
                f"--splits={split} is not a split; write chips for learning : chips for rollout, such as 1:3."
            )
        result.append((int(left), int(right)))
    return result


def split_chips(chips: int, splits: Sequence[tuple[int, int]], replica_chips: int) -> list[tuple[int, int]]:
    """Returns (chips for learning, chips for rollout) of splits such as (1, 3); rollout gets whole replicas.

    Raises:
      UserError: a split leaves a role without chips.
    """
    result = []
    for left, right in splits:
        rollout = chips * right // (left + right) // replica_chips * replica_chips
        if not 0 < rollout < chips:
            raise UserError(
                f"--splits={left}:{right} of --chips={chips} leaves rollout {rollout} chips; a replica of the engine "
                f"has {replica_chips}, so use more chips or another split."
            )
        result.append((chips - rollout, rollout))
    return result


def run_study(
    study: Study, splits: Sequence[tuple[int, int]], sandboxes: Sequence[int], on_hour: Callable[[], None] | None = None
) -> dict[str, Any]:
    """Simulates every split with every number of sandboxes; returns a JSON-able dict.

    "rows" has the figures of each run, "best" by number of sandboxes the split with the most steps per day and what
    more of each thing would gain, "wall_s" and "cpu_s" the seconds that simulating took.
    """
    began, cpu_began = time.perf_counter(), time.process_time()
    rows, best = [], []
    for count in sandboxes:
        outcomes = []
        for learner, rollout in splits:
            fleet = Fleet(learner, rollout, count)
            outcome = study.simulate(fleet, on_hour=on_hour)
            outcomes.append((fleet, outcome))
            rows.append(_as_row(fleet, outcome))
        fleet, outcome = max(outcomes, key=lambda pair: pair[1].steps_per_day)
        gains = study.gains(fleet, outcome, on_hour)
        best.append(_as_row(fleet, outcome) | {"gains": gains, "more_chips": study.more_chips(fleet)})
    return {
        "rows": rows,
        "best": best,
        "speeds": dataclasses.asdict(study.speeds),
        "costs": study.costs,
        "assumed": dataclasses.asdict(study.assumed),
        "config": _summarize_config(study.config),
        "wall_s": time.perf_counter() - began,
        "cpu_s": time.process_time() - cpu_began,
    }


def simulate_table(
    config: Mapping[str, Any],
    topology: str,
    assumed: Assumptions,
    *,
    chips: int,
    splits: Sequence[str],
    sandboxes: Sequence[str],
    hours: float,
    warm_up_hours: float,
    seed: int,
    parts: int,
) -> dict[str, Any]:
    """Predicts the speeds of a config on a slice and returns what `run_study` does, with progress on stderr.

    Args:
      config: a config of any run, such as configs/kimi_k2_5.py.
      chips: in all; 0 takes those of the slice.
      splits: such as "1:3", chips for learning to chips for rollout.
      hours, warm_up_hours, seed, parts: those of Study.

    Raises:
      UserError: an unknown field or slice, or numbers that make no run.
    """
    if not all(count.isdecimal() and int(count) for count in sandboxes):
        raise UserError(f"--sandboxes={','.join(sandboxes)} has a part that is not a number; write such as 1000,10000.")
    run, ratios = run_config(config), parse_splits(splits)
    _check_study(run.rl, hours, warm_up_hours, parts)  # before speeds are predicted, which takes long and needs libtpu
    speeds = predict_speeds(config, topology, assumed.context_fill)
    study = Study(run, speeds, assumed, hours, warm_up_hours, seed, parts)
    chip_splits = split_chips(chips or tpu_slice(topology).chips, ratios, speeds.replica_chips)
    runs = len(sandboxes) * (len(chip_splits) + VARIANTS)
    with Progress(runs * study.total_hours, "simulated hours", "simulate") as progress:
        result = run_study(study, chip_splits, [int(count) for count in sandboxes], progress.update)
    return result | {"topology": topology}


def predict_speeds(config: Mapping[str, Any], topology: str, context_fill: float) -> Speeds:
    """Predicts the learner's step, decode steps with several numbers of conversations, and prefill (scale/roofline.py).

    The programs are traced and not compiled, which takes seconds. docs/scale.md compares the training step with
    measured ones; decoding and prefill have been compared with none.

    The learner's speed is that of rl.batches on the whole slice, per chip. The engine is that of `sampler`, whose mesh
    has one or more replicas on the slice.

    Args:
      topology: such as v5p:8x8x16.
      context_fill: mean tokens of a running context, as a fraction of sampler.max_model_len.

    Raises:
      UserError: an unknown field or slice, or sizes that do not fit each other.
    """
    steps = place_steps(config, topology, "rl")
    train, decode = predict_step(steps["train"]), steps["decode"]
    replicas = decode.step.mesh.shape["replica"]
    values = ConfigDict(config).to_dict()
    sampler = values["sampler"]
    slots, unit = sampler["slots"], batch_shards(decode.step.mesh)
    sampler["max_model_len"] = context = max(2, round(context_fill * sampler["max_model_len"]))
    counts = [unit]
    while counts[-1] < slots:
        counts.append(min(2 * counts[-1], slots))
    decode_steps, steps = [], {}
    for count in counts:
        sampler["slots"] = count
        steps = place_steps(values, topology, "evaluate")
        decode_steps.append((count // replicas, predict_step(steps["decode"])["predicted_step_seconds"]))
    return Speeds(
        trained_tokens_per_s=train["predicted_tokens_per_second_per_chip"],
        replica_chips=decode.tpus.chips // replicas,
        decode_steps=tuple(decode_steps),
        prefill_s=_prefill_seconds(steps) * replicas,
        weight_bytes=_PUBLISHED_BYTES * float(train["params_total"]),
        mean_context=context,
    )


def _prefill_seconds(steps: Mapping[str, PlacedStep]) -> float:
    """Returns the seconds per token of the prefill call that is fastest per token, on all replicas, rows full."""
    predicted = [predict_step(placed) for name, placed in steps.items() if name.startswith("prefill")]
    return min(step["predicted_step_seconds"] / step["tokens_per_step"] for step in predicted)


def _as_row(fleet: Fleet, outcome: Outcome) -> dict[str, Any]:
    return dataclasses.asdict(fleet) | dataclasses.asdict(outcome) | {"limit": outcome.limit}


def _summarize_config(config: RunConfig) -> Mapping[str, Any]:
    """Returns the fields of a config on which a study depends, besides the speeds."""
    rl = config.rl
    return {
        "groups_per_step": sum(rl.groups.values()),
        "group_size": rl.group_size,
        "max_staleness": rl.max_staleness,
        "late_groups": rl.late_groups,
        "max_turns": config.agent.limits.max_turns,
        "episode_seconds": config.agent.episode_seconds,
        "slots": config.sampler.slots,
        "cache_tokens": config.sampler.cache_tokens,
        "max_model_len": config.sampler.max_model_len,
    }
