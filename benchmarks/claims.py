"""What was published about RL of coding agents, in miniature: `python -m benchmarks.claims [--data=docs/data]`.

Reads the rows that other benchmarks have measured and runs nothing: the files of the folder --data that have the names
of these benchmarks (FILES). A claim is one difference between a policy and its control on the same tasks. It holds if
the 95 % interval of the difference, by bootstrap over the tasks of all seeds, lies above zero. Claims whose rows are
missing, or exist for one seed only, are null.

Prints a line for each claim on stderr and, as the last line of stdout, one JSON object: claim -> {"holds", "effect",
"low", "high", "seeds"}. With --pictures=FOLDER it draws FOLDER/CLAIM.png for each claim that was measured.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import claim_measures as measures
from benchmarks.claim_measures import Measure, Measured
from benchmarks.seeded_runs import Row, integers
from composer_jax.errors import UserError
from composer_jax.observe.picture import LIGHT, new_figure, percent_y_axis, save_figure


@dataclass(frozen=True)
class Claim:
    """A published statement and how it is measured here.

    measure: see claim_measures.
    is_rate: whether its picture shows rates, in percent.
    """

    sentence: str
    axis: str
    measure: Measure
    is_rate: bool = True


HARD = "two_bugs"
HARD_AXIS = "pass@1 of two bugs"
CLAIMS: Mapping[str, Claim] = {
    "rl_lifts_pass_at_1": Claim(
        "RL solves more held-out tasks at the first attempt than SFT sampled greedily.",
        HARD_AXIS,
        measures.pass_rates(HARD, "rl", "sft_greedy", "sft"),
    ),
    "rl_beats_rejection_sampling": Claim(
        "RL beats fine-tuning on the solved episodes of SFT, of the same tasks and as many sampled tokens.",
        HARD_AXIS,
        measures.pass_rates(HARD, "rl", "rft", "sft"),
    ),
    "rl_beats_rejection_sampling_on_chains": Claim(
        "The same for chains, of which a guess solves an eighth and rejection sampling learns from such episodes, too.",
        "pass@1 of chains with summaries",
        measures.pass_rates("chain", "rl", "rft", "sft"),
    ),
    "rl_needs_its_rewards": Claim(
        "RL beats the same RL whose advantages are dealt at random.",
        HARD_AXIS,
        measures.pass_rates(HARD, "rl", "rl_random_advantages", "sft"),
    ),
    "rl_solves_what_64_samples_do_not": Claim(
        "Of the tasks that 64 samples of SFT never solve, RL solves more than 64 further samples do.",
        "pass@1 and pass@64 of three bugs",
        measures.unsolved_by_64("three_bugs"),
    ),
    "summaries_need_their_own_loss": Claim(
        "RL that trains its summaries carries more than RL that trains everything else.",
        "pass@1 of chains with summaries",
        measures.pass_rates("chain", "rl", "rl_masked_summaries", "sft"),
    ),
    "summaries_need_their_own_credit": Claim(
        "Summaries learn from the episode that goes on from them, not from another one of the task.",
        "pass@1 of chains with summaries",
        measures.pass_rates("chain", "rl", "rl_other_summaries", "sft"),
    ),
    "trained_summaries_halve_the_error": Claim(
        "Trained summaries have at most half of the compaction error of prompted reports, without a price of length.",
        "compaction error of chains",
        measures.half_the_error("prompted_summaries", "sft"),
    ),
    "trained_summaries_halve_the_error_at_equal_length": Claim(
        "They have at most half of the error of the policy before RL, whose summaries are as long.",
        "compaction error of chains",
        measures.half_the_error("sft"),
    ),
    "joint_beats_frozen": Claim(
        "A fact survives three summaries if RL trains them, and not if it trains all but them.",
        "pass@1 of the memory chain",
        measures.chain,
    ),
    "rl_survives_a_rule_change": Claim(
        "When the rule of the training tasks changes, RL loses at most half of what SFT on solved episodes loses.",
        "pass@1 of one bug, old and new rule",
        measures.changed_rule,
    ),
    "price_raises_parallel_calls": Claim(
        f"A price of messages raises calls per message by at least {measures.RISE:.0%} over the same RL without it.",
        "calls per message",
        measures.more_parallel_calls,
        is_rate=False,
    ),
    "std_normalisation_inflates_small_differences": Claim(
        "Advantages divided by the standard deviation of their group make a hundredth of that price matter.",
        "calls per message",
        measures.inflated_by_deviation,
        is_rate=False,
    ),
    "std_normalisation_costs_solved_tasks": Claim(
        "At that price RL solves more tasks if its advantages are not divided by the standard deviation.",
        "pass@1 of lookups in four files",
        measures.solved_without_deviation,
    ),
    "price_shortens_easy_tasks_more": Claim(
        "The length cost, which bends down, saves a larger part of easy tasks than of hard ones.",
        "messages saved",
        measures.shorter_easy_tasks,
    ),
    "length_normalisation_lengthens_failures": Claim(
        "A loss that is divided by each episode's length makes failures longer.",
        "tokens of failed attempts",
        measures.longer_failures,
        is_rate=False,
    ),
    "ladder_beats_fixed_mix": Claim(
        "RL on tasks that grow harder solves more hard tasks than RL on all of them from the first step.",
        HARD_AXIS,
        measures.harder_tasks(HARD),
    ),
    "router_replay_halves_the_gap": Claim(
        "With the engine's experts, log-probabilities of engine and learner are at most half as far apart.",
        "99th percentile of the gap in nats",
        measures.replayed_routes,
        is_rate=False,
    ),
    "feedback_beats_the_reward": Claim(
        "Textual feedback removes a habit of malformed calls faster than the grade alone.",
        "malformed calls during RL",
        measures.faster_than("reward"),
    ),
    "feedback_beats_a_price": Claim(
        "It removes the habit faster than a price of malformed calls in the reward.",
        "malformed calls during RL",
        measures.faster_than("priced_reward"),
    ),
}
"""Name -> claim, in the order of docs/science.md."""


NAMES = {
    "sft": "before RL",
    "sft_greedy": "greedy before RL",
    "rft": "rejection sampling",
    "rl": "RL",
    "rl_masked_summaries": "masked summaries",
    "rl_other_summaries": "others' summaries",
    "rl_random_advantages": "random advantages",
    "rl_price_0": "RL, no price",
    "prompted_summaries": "prompted",
    "frozen": "masked summaries",
    "joint": "RL",
    "free": "RL, no price",
    "priced": "RL, price",
    "tiny_price": "price / 100",
    "tiny_price_std": "price / 100, std",
    "without": "own experts",
    "replay": "the engine's",
    "fixed": "fixed mix",
    "reward": "grade",
    "priced_reward": "grade and price",
}
"""Policy of a row -> its name in a picture; others keep theirs."""


FILES = (
    "controls",
    "pass_at_64",
    "memory_chain",
    "rule_change",
    "parallel_calls",
    "length_normalisation",
    "ladder",
    "router_replay",
    "feedback",
)
"""Benchmarks whose rows claims read."""


def _name(policy: str) -> str:
    """Returns the name of a policy in a picture; what follows a comma stays: "rft, new"."""
    head, comma, rest = policy.partition(",")
    return NAMES.get(head, head.replace("_", " ")) + comma + rest


def draw(claim: Claim, measured: Measured, path: Path) -> Path:
    """Draws the policies of a claim with their intervals."""
    figure, (ax,) = new_figure(LIGHT, 4.6, 2.6)
    for i, (_, mean, low, high) in enumerate(measured.points):
        color = LIGHT.palette[0] if i == len(measured.points) - 1 else LIGHT.muted
        ax.errorbar(
            i, mean, [[max(0, mean - low)], [max(0, high - mean)]], fmt="o", color=color, capsize=3, markersize=5
        )
        ax.annotate(
            f"{mean:z.0%}" if claim.is_rate else f"{mean:z.2f}",
            (i, mean),
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            color=color,
            fontsize=8.5,
        )
    names = [_name(name) for name, *_ in measured.points]
    ax.set_xticks(
        range(len(names)), names, rotation=20 if len(names) > 3 else 0, ha="right" if len(names) > 3 else "center"
    )
    ax.set_xlim(-0.5, len(measured.points) - 0.2)
    if claim.is_rate:
        percent_y_axis(ax)
    ax.set_title(claim.axis, loc="left", fontsize=9, color=LIGHT.muted)
    return save_figure(figure, path)


def read_rows(folder: Path, seeds: Sequence[int] | None = None) -> dict[str, list[Row]]:
    """Returns the rows of each file that claims use, of all seeds or of some; [] for a file that does not exist."""
    files = {}
    for name in FILES:
        path = folder / f"{name}.json"
        rows = json.loads(path.read_bytes()) if path.exists() else []
        files[name] = [row for row in rows if seeds is None or row["seed"] in seeds]
    return files


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("docs/data"), help="folder of the rows (default: docs/data)")
    parser.add_argument("--seeds", type=integers, help="comma-separated integers (default: all that have rows)")
    parser.add_argument("--pictures", type=Path, help="folder for one picture per claim (default: none)")
    o = parser.parse_args(argv)
    if not o.data.is_dir():
        parser.error(f"--data={o.data} is not a folder; give the folder that has controls.json")
    files = read_rows(o.data, o.seeds)
    results: dict[str, Any] = {}
    for name, claim in CLAIMS.items():
        try:
            measured = claim.measure(files)
        except UserError as error:
            parser.error(str(error))
        results[name] = measured and {
            "holds": measured.holds,
            **{field: round(getattr(measured, field), 4) for field in ("effect", "low", "high")},
            "seeds": list(measured.seeds),
        }
        if measured is None:
            print(f"not measured   {claim.sentence}", file=sys.stderr)
            continue
        words = "holds         " if measured.holds else "does not hold "
        interval_text = f"{measured.effect:+.3f} [{measured.low:+.3f}, {measured.high:+.3f}]"
        print(f"{words} {interval_text} {claim.sentence}", file=sys.stderr)
        if o.pictures:
            draw(claim, measured, o.pictures / f"{name}.png")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
