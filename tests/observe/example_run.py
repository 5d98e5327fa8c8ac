"""An invented run in the format of a real one, for the tests of observe."""

import json
import math
import random
from pathlib import Path

from composer_jax.observe.episodes import CallRecord, EpisodeRecord, MessageRecord, write_episodes
from composer_jax.observe.metrics import MetricsWriter


def suite_measures(
    attempts: int,
    pass_at_1: float,
    pass_at_k: float,
    tokens_per_summary: float = 0.0,
    compaction_error: float | None = None,
) -> dict[str, float]:
    """The measures of one suite as evaluate writes them."""
    measures = {
        "attempts": attempts,
        "tasks": 32,
        "pass_at_1": pass_at_1,
        "pass_at_k": pass_at_k,
        "tokens_per_summary": tokens_per_summary,
    }
    return measures if compaction_error is None else measures | {"compaction_error": compaction_error}


def change(difference: float, low: float, high: float, **more: str | int) -> dict[str, float | str]:
    """What RL changed in pass@1 of a suite, as the report stage writes it."""
    return {"from": "before", "to": "after", "difference": difference, "low": low, "high": high, "tasks": 32, **more}


RESULTS = {
    "config_hash": "4f1c09ab",
    "wall_seconds": 1447.3,
    "peak_rss_gb": 2.93,
    "cpt": {"heldout_nll_first": 6.93, "heldout_nll_last": 3.41, "tokens": 812_544},
    "sft": {"loss_last": 0.271, "tokens": 1_503_232},
    "rl": {"steps": 96, "episodes": 6144, "weight_gap_max": 0.0123},
    "suites": {
        "whole": {
            "before": suite_measures(4, 0.605, 0.8),
            "after": suite_measures(4, 0.727, 0.9),
            "change": change(0.122, -0.02, 0.264),
        },
        "bugs": {
            "before": suite_measures(8, 0.262, 0.891),
            "after": suite_measures(8, 0.813, 0.969),
            "change": change(0.551, 0.44, 0.65),
        },
        "unseen_bugs": {
            "before": suite_measures(4, 0.438, 0.6),
            "after": suite_measures(4, 0.109, 0.3),
            "change": change(-0.329, -0.45, -0.2),
        },
        "short_window": {
            "before": suite_measures(1, 0.245, 0.245, 61.4, 0.36),
            "after": suite_measures(1, 0.586, 0.586, 23.1, 0.141),
            "change": change(0.341, 0.2, 0.48),
        },
    },
    "throughput": {"train_tokens_per_s": 8421.0, "decode_tokens_per_s": 3150.4, "sandbox_runs_per_s": 212.0},
    "phases_s": {
        "data": 21.4,
        "pretrain": 148,
        "sft": 292,
        "evaluate_before": 61,
        "rl": 802,
        "evaluate_after": 66,
    },
}

CONFIG = {
    "seed": 0,
    "rl": {"groups": {"bugfix": 5, "memory_chain": 3}, "group_size": 8},
    "evaluate": {
        "headline": ["bugs", "short_window"],
        "suites": {
            "whole": {"family": "memory_chain", "split": "heldout", "compaction": "none"},
            "bugs": {"family": "bugfix", "split": "heldout", "compaction": "none"},
            "unseen_bugs": {"family": "bugfix", "split": "unseen", "compaction": "none"},
            "short_window": {
                "family": "memory_chain",
                "split": "heldout",
                "compaction": "short",
                "compare_to": "whole",
            },
        },
    },
}

SYSTEM = "You fix small Python repositories. Tools: read, grep, edit, run_tests, finish."


def bug_episode(
    task: int, seed: int, reward: float | None, step: int | None, version: int, outcome: str = "finished"
) -> EpisodeRecord:
    instruction = f"Function clamp_{task} in calc/limits.py fails its tests. Find the bug and fix it."
    code = f"def clamp_{task}(x):\n    # is x at least {task}\n    return x > {task}\n"
    messages = [
        MessageRecord("prompt", f"{SYSTEM}\n\n{instruction}", 74, False),
        _said("Run the tests to see what fails.", version, CallRecord("run_tests", {})),
        MessageRecord("tool", f"FAIL clamp_{task}({task}) is False, want True", 17, False),
        _said("", version, CallRecord("read", {"path": "calc/limits.py"})),
        MessageRecord("tool", code, 31, False),
        _said("", version, CallRecord("edit", '{"path":"calc/limits.py","old"', "arguments are not JSON")),
        MessageRecord("tool", "The call was not understood: arguments are not JSON.", 14, False),
        _said(
            f"clamp_{task}: is x at least {task}",
            version,
            CallRecord(
                "edit",
                {"path": "calc/limits.py", "old": f"return x > {task}", "new": f"return x >= {task}"},
            ),
        ),
        MessageRecord("tool", "edited calc/limits.py", 6, False),
        _said("", version, CallRecord("finish", {})),
    ]
    return _episode(f"bugfix-compare-{task:04d}", "bugfix", seed, reward, outcome, step, instruction, [messages])


def chain_episode(task: int, seed: int, reward: float | None, step: int | None, version: int) -> EpisodeRecord:
    instruction = f"Read bold_moon_{task}, then the next."
    prompt = MessageRecord("prompt", f"{SYSTEM}\n\n{instruction}", 69, False)
    request = MessageRecord("summary_request", "Summarize what you need to go on.", 11, False)
    value = ("amber", "coral", "jade")[task % 3]
    item = f"item_1 = {value}"

    def carry(text: str, tokens: int) -> MessageRecord:
        return MessageRecord("carry", text, tokens, False)

    def summary(text: str, tokens: int) -> MessageRecord:
        return MessageRecord("summary", text, tokens, True, version)

    segments = [
        [
            prompt,
            _said("", version, CallRecord("read", {"path": f"bold_moon_{task}"})),
            MessageRecord("tool", f"{item}\nnext = calm_lake\n", 96, False),
            request,
            summary(f"{item}\nnext = calm_lake", 8),
        ],
        [
            prompt,
            carry(f"Summary 1:\n{item}\nnext = calm_lake", 14),
            _said("", version, CallRecord("read", {"path": "calm_lake"})),
            MessageRecord("tool", "item_2 = ruby\nnext = dry_corn.py\n", 88, False),
            request,
            summary(f"{item}\nnext = dry_corn.py", 19),
        ],
        [
            prompt,
            carry(f"Summary 2:\n{item}\nnext = dry_corn.py", 25),
            _said(
                item,
                version,
                CallRecord("edit", {"path": "dry_corn.py", "old": "item_1", "new": f"'{value}'"}),
            ),
            MessageRecord("tool", "edited dry_corn.py", 6, False),
            _said("", version, CallRecord("finish", {})),
        ],
    ]
    return _episode(f"chain-{task:04d}", "memory_chain", seed, reward, "finished", step, instruction, segments)


def make_workdir(workdir: Path) -> Path:
    """Writes a finished run: results, config, three metric files and episodes of all three stages."""
    draw = random.Random(0)
    workdir.mkdir(parents=True, exist_ok=True)
    (workdir / "results.json").write_text(json.dumps(RESULTS))
    (workdir / "config.json").write_text(json.dumps({"config_hash": RESULTS["config_hash"], "config": CONFIG}))
    with MetricsWriter(workdir / "metrics" / "pretrain.jsonl") as metrics:
        for step in range(1, 265):
            loss = 3.3 + 3.7 * math.exp(-step / 45) + draw.gauss(0, 0.07)
            held = {"heldout_nll": loss + 0.1} if step % 44 == 0 or step == 1 else {}
            metrics.write(step, tokens=step * 3072, loss=loss, tokens_per_s=8400.0, **held)
    with MetricsWriter(workdir / "metrics" / "sft.jsonl") as metrics:
        for step in range(1, 490):
            metrics.write(step, tokens=step * 3072, loss=0.27 + 2.6 * math.exp(-step / 60) + draw.gauss(0, 0.03))
    with MetricsWriter(workdir / "metrics" / "rl.jsonl") as metrics:
        for step in range(96):
            metrics.write(step, **_rl_row(step, draw))
    tasks = range(3, 9)
    write_episodes(
        workdir / "episodes" / "before.jsonl",
        [bug_episode(n, 0, float(n % 3 == 0), None, 0) for n in tasks]
        + [chain_episode(n, 0, float(n % 4 == 0), None, 0) for n in tasks],
    )
    write_episodes(
        workdir / "episodes" / "after.jsonl",
        [bug_episode(n, 0, float(n != 5), None, 96) for n in tasks]
        + [chain_episode(n, 0, float(n % 4 != 0), None, 96) for n in tasks],
    )
    write_episodes(
        workdir / "episodes" / "rl.jsonl",
        [bug_episode(20 + n, n, [0.0, 1.0, 0.5, None][n % 4], 12 * n, 12 * n) for n in range(8)],
    )
    return workdir


def _rl_row(step: int, draw: random.Random) -> dict[str, float | None]:
    learned = 1 - math.exp(-step / 30)
    bugs = min(1.0, max(0.0, 0.3 + 0.53 * learned + draw.gauss(0, 0.06)))
    chains = min(1.0, max(0.0, 0.22 + 0.4 * learned + draw.gauss(0, 0.08)))
    rollout, train = 4.1 + draw.random(), 2.6 + 0.3 * draw.random()
    compiling = 31.0 if step == 0 else 0.0
    summary_tokens = 24 + 38 * math.exp(-step / 25) + draw.gauss(0, 2)
    return {
        "reward": (bugs + chains) / 2,
        "reward_bugfix": bugs,
        "reward_memory_chain": chains if step % 7 else None,
        "pass_compacted": chains,
        "turns": 4.3 + 1.6 * learned,
        "tokens": 200.0 + 40 * learned,
        "summary_tokens": summary_tokens,
        "summaries": 2.0,
        "entropy": 0.42 - 0.18 * learned + draw.gauss(0, 0.01),
        "ratio_max": 1.0004 + 0.0003 * draw.random(),
        "staleness_max": min(4.0, step // 8),
        "staleness_in_flight": min(2.0, step / 20),
        "staleness_in_queue": min(1.0, step / 40),
        "groups_queued": step % 3,
        "groups_playing": 8 + step % 5,
        "groups_dropped": 0,
        "sampler_kl": 4e-5 + 1e-5 * draw.random(),
        "out_of_region": 1e-4 * draw.random(),
        "grad_norm": 0.6 + 0.2 * draw.random(),
        "learning_rate": 3e-4,
        "rollout_s": rollout,
        "sandbox_s": 0.4,
        "train_s": train + compiling,
        "step_s": rollout + 0.4 + train + compiling + 0.2,
        "groups_used": 12,
    }


def _said(thought: str, version: int, *calls: CallRecord) -> MessageRecord:
    return MessageRecord("assistant", thought, 12 + len(thought) // 3, True, version, calls)


def _episode(
    task_id: str,
    family: str,
    seed: int,
    reward: float | None,
    outcome: str,
    step: int | None,
    instruction: str,
    segments: list[list[MessageRecord]],
) -> EpisodeRecord:
    messages = [message for segment in segments for message in segment]
    sampled = [message for message in messages if message.sampled]
    return EpisodeRecord(
        task_id=task_id,
        family=family,
        split="train" if step is not None else "heldout",
        seed=seed,
        reward=reward,
        outcome=outcome,
        turns=sum(message.kind == "assistant" for message in messages),
        summaries=len(segments) - 1,
        condition="none",
        step=step,
        tokens=sum(message.tokens for message in messages),
        sampled_tokens=sum(message.tokens for message in sampled),
        summary_tokens=sum(message.tokens for message in messages if message.kind == "summary"),
        parts={} if reward is None else {"hidden_tests": f"{4 if reward else 3} of 4", "finished": True},
        instruction=instruction,
        segments=tuple(tuple(segment) for segment in segments),
    )
