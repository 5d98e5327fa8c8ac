"""The contract of results.json: every field a finished run must have, and what kind of value it holds."""

COUNT, RATE, POSITIVE = "a count", "a share", "a positive number"

CONTRACT = {
    "config_hash": str,
    "wall_seconds": POSITIVE,
    "peak_rss_gb": POSITIVE,
    "cpt.heldout_nll_first": POSITIVE,
    "cpt.heldout_nll_last": POSITIVE,
    "cpt.tokens": COUNT,
    "sft.loss_last": POSITIVE,
    "sft.tokens": COUNT,
    "rl.steps": COUNT,
    "rl.episodes": COUNT,
    "rl.pass_at_1_before": RATE,
    "rl.pass_at_1_after": RATE,
    "rl.pass_at_{k}_before": RATE,
    "rl.pass_at_{k}_after": RATE,
    "rl.unseen_family_before": RATE,
    "rl.unseen_family_after": RATE,
    "summary.pass_before": RATE,
    "summary.pass_after": RATE,
    "summary.tokens_before": float,
    "summary.tokens_after": float,
    "summary.compaction_error_before": float,
    "summary.compaction_error_after": float,
    "summary.prompted_baseline": dict,
    "throughput.train_tokens_per_s": POSITIVE,
    "throughput.decode_tokens_per_s": POSITIVE,
    "throughput.sandbox_runs_per_s": POSITIVE,
    "phases_s": dict,
}


def assert_contract(results: dict, k: int) -> None:
    """k: attempts at each task of the suite two_bugs."""
    for path, kind in CONTRACT.items():
        path = path.format(k=k)
        value = results
        for name in path.split("."):
            assert isinstance(value, dict) and name in value, f"results.json lacks {path}"
            value = value[name]
        if isinstance(kind, type):
            assert isinstance(value, kind), (path, value)
        elif kind == COUNT:
            assert isinstance(value, int) and value > 0, (path, value)
        elif kind == RATE:
            assert 0 <= value <= 1, (path, value)
        else:
            assert value > 0, (path, value)
