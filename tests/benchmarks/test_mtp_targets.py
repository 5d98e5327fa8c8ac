"""What benchmarks.mtp_targets makes of the drafts of its runs."""

import json

from benchmarks import mtp_targets


def row(seed, variant, accepted):
    counts = {"drafted": [100, 50, 20], "accepted": accepted}
    return {"seed": seed, "variant": variant, "drafts": {"0": counts, "1": counts}}


ROWS = [
    row(0, "distillation", [80, 40, 10]),
    row(0, "cross_entropy", [70, 30, 10]),
    row(1, "distillation", [60, 20, 10]),
    row(1, "cross_entropy", [60, 20, 0]),
    row(2, "distillation", [0, 0, 0]),  # the other target has not finished
]


def test_acceptance_is_by_place_and_the_difference_in_tokens_per_draft():
    out = mtp_targets.summarize(ROWS)
    assert json.loads(json.dumps(out)) == out
    assert out["seeds"] == [0, 1]
    assert out["distillation"]["0"] == [0.7, 0.6, 0.5] and out["cross_entropy"]["1"] == [0.65, 0.5, 0.25]
    mean, low, high = out["difference"]["0"]
    assert (mean, low, high) == (0.15, 0.1, 0.2)


def test_one_seed_has_no_interval():
    assert mtp_targets.summarize(ROWS[:2])["difference"] == {"0": None, "1": None}


def test_both_targets_of_a_seed_start_from_the_same_weights(tmp_path, monkeypatch, capsys):
    trained = []

    def train(config, weights, loss, steps, length, seed):
        trained.append((weights, loss.trained, loss.mtp_target, steps))
        return "base" if loss.trained == "all" else "module"

    counts = {"drafted": [1, 1, 1], "accepted": [1, 0, 0]}
    monkeypatch.setattr(mtp_targets, "train", train)
    monkeypatch.setattr(mtp_targets, "acceptance", lambda *_: counts)
    mtp_targets.base_weights.cache_clear()
    mtp_targets.main(["--seeds=0", f"--rows={tmp_path / 'rows.json'}", "--layers=2", "--experts=8"])
    mtp_targets.base_weights.cache_clear()
    assert [run[1:] for run in trained] == [
        ("all", "distillation", 300),
        ("mtp", "distillation", 200),
        ("mtp", "cross_entropy", 200),
    ]
    assert [run[0] for run in trained[1:]] == ["base", "base"]
    assert json.loads(capsys.readouterr().out)["distillation"]["0"] == [1.0, 0.0, 0.0]
