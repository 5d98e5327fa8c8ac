"""The controls of benchmarks.controls: their algorithms, and what is made of their rows."""

import json

import numpy as np
import pytest

from benchmarks import controls
from benchmarks.control_algorithms import LengthNormalised, OtherSummaries, RandomAdvantages, RejectionSampling
from benchmarks.seeded_runs import SIZES
from composer_jax.rl.algorithm import GroupAdvantage
from composer_jax.rl.batch import Group
from composer_jax.rl.policy_update import weighted_rows
from launch.flags import parse
from tests.rl.made_up import conversation, episode

REWARDS = (1.0, 0.0, 0.0, 0.25)


def group(rewards=REWARDS, task="task"):
    episodes = [
        episode(reward, conversation(100 * i, summaries=i % 3), task_id=task) for i, reward in enumerate(rewards)
    ]
    return Group(episodes, rewards)


def advantages_by_kind(transcript, rows):
    """Returns kind -> the set of advantages of the tokens of that kind that rows train."""
    kinds = {token: node.kind for node in transcript.nodes for token in node.sampled_tokens.tolist()}
    out: dict[str, set[float]] = {}
    for weighted in rows:
        for place in np.flatnonzero(weighted.row.trained):
            kind = kinds[int(weighted.row.tokens[place])]
            out.setdefault(kind, set()).add(float(weighted.advantages[place]))
    return out


def test_a_summary_gets_the_advantage_of_the_next_episode_and_everything_else_its_own():
    made = group()
    advantages = GroupAdvantage()(REWARDS)
    by_episode = OtherSummaries().weigh(made, 0)
    for i, (one, rows) in enumerate(zip(made.episodes, by_episode, strict=True)):
        found = advantages_by_kind(one.transcript, rows)
        assert found["assistant"] == {float(advantages[i])}
        assert found.get("summary", set()) == (
            {float(advantages[(i + 1) % 4])} if one.transcript.nodes_of_kind("summary") else set()
        )


def test_random_advantages_have_the_sizes_of_real_ones_and_say_nothing_of_the_episodes():
    real = sorted(GroupAdvantage()(REWARDS).tolist())
    dealt = []
    for number in range(400):
        rows = RandomAdvantages().weigh(group(task=f"task-{number}"), 0)
        mine = [float(of_episode[0].advantages[of_episode[0].row.trained][0]) for of_episode in rows]
        assert sorted(mine) == real
        dealt.append(mine)
    assert dealt[0] == [
        float(r[0].advantages[r[0].row.trained][0]) for r in RandomAdvantages().weigh(group(task="task-0"), 7)
    ]
    # The solved episode has the largest advantage by itself; here its mean is that of any other.
    assert np.abs(np.mean(dealt, axis=0)).max() < 4 * np.std(real) / np.sqrt(400)


def test_a_long_episode_counts_as_much_as_a_short_one_if_the_loss_is_divided_by_its_length():
    made = group()
    lengths = [one.transcript.total_sampled for one in made.episodes]
    assert len(set(lengths)) > 1
    for one, rows, advantage in zip(
        made.episodes, LengthNormalised().weigh(made, 0), GroupAdvantage()(REWARDS), strict=True
    ):
        total = sum(weighted.advantages[weighted.row.trained].sum() for weighted in rows)
        assert total == pytest.approx(advantage * np.mean(lengths), rel=1e-5), one.task_id
    (equal,) = [[w.advantages for rows in LengthNormalised().weigh(group((1.0, 1.0)), 0) for w in rows]]
    assert not np.concatenate(equal).any()


def test_rejection_sampling_imitates_solved_episodes_and_leaves_the_others_out():
    (rows,) = weighted_rows([group()], RejectionSampling())
    assert {row.episode for row in rows} == {0}
    for row in rows:
        np.testing.assert_array_equal(row.ce_weights, row.row.trained.astype(np.float32))
        assert not row.weights.any() and not row.advantages.any()
    # A group in which all are solved teaches here, and nothing in RL.
    (rows,) = weighted_rows([group((1.0, 1.0))], RejectionSampling())
    assert {row.episode for row in rows} == {0, 1}


def row(seed, variant, solved, sampled=0.0):
    suite = {"family": "bugs", "pass_at_1": float(np.mean(list(solved.values()))), "solved": solved}
    return {"seed": seed, "variant": variant, "sampled_tokens": sampled, "suites": {"bugs_heldout": suite}}


def test_every_control_has_its_rate_its_interval_and_the_paired_difference_of_rl():
    out = controls.summarize(
        [
            row(0, "sft", {"a": 0.0, "b": 0.5}),
            row(1, "sft", {"c": 0.25, "d": 0.25}),
            row(0, "rl", {"a": 1.0, "b": 1.0}, sampled=100.0),
            row(1, "rl", {"c": 0.75, "d": 0.75}, sampled=300.0),
            row(0, "rft", {"a": 1.0, "b": 0.5}, sampled=100.0),
        ]
    )
    assert json.loads(json.dumps(out)) == out
    sft, rl, rft = (out[name]["suites"]["bugs_heldout"] for name in ("sft", "rl", "rft"))
    assert (sft["family"], sft["pass_at_1"], rl["pass_at_1"]) == ("bugs", 0.25, 0.875)
    assert sft["low"] <= 0.25 <= sft["high"]
    assert sft["rl_minus"]["difference"] == 0.625 and sft["rl_minus"]["tasks"] == 4
    assert rft["rl_minus"]["difference"] == 0.25 and rft["rl_minus"]["tasks"] == 2, "the seeds that both have"
    assert "rl_minus" not in rl and out["rl"]["sampled_tokens"] == 200 and out["sft"]["seeds"] == [0, 1]


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["--controls=sft,greedy"], "--controls names 'greedy'; use some of sft, sft_t05"),
        (["--seeds=3"], "--seeds=3 is one seed, whose interval has no seeds in it; use two"),
    ],
)
def test_bad_input_is_one_sentence(arguments, sentence, capsys, tmp_path):
    with pytest.raises(SystemExit) as ended:
        controls.main([*arguments, f"--workdir={tmp_path}"])
    assert ended.value.code == 2 and sentence in capsys.readouterr().err


def test_controls_on_other_tasks_are_refused_in_one_sentence(tmp_path, capsys):
    rows = [row(0, "rl", {"a": 1.0}), row(1, "rl", {"b": 1.0}), row(0, "sft", {"c": 1.0}), row(1, "sft", {"b": 1.0})]
    file = tmp_path / "rows.json"
    file.write_text(json.dumps(rows))
    with pytest.raises(SystemExit) as ended:
        controls.main(["--seeds=0,1", "--controls=sft,rl", f"--rows={file}", f"--workdir={tmp_path}"])
    assert ended.value.code == 2 and "the control 'sft' was measured on 2 tasks" in capsys.readouterr().err


def test_every_control_has_a_maker(tmp_path):
    makers = controls.Seed(tmp_path, "smoke", 0).makers
    expected = ("sft", "sft_t05", "sft_greedy", "prompted_summaries", "rft", "rl", "rl_masked_summaries")
    expected += ("rl_other_summaries", "rl_random_advantages", "rl_price_0")
    assert sorted(makers) == sorted(expected)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["sft", "sft_t05", "prompted_summaries", "rft", *controls.RL_CONTROLS])
def test_the_config_has_every_field_that_a_control_sets(name, size, tmp_path, monkeypatch):
    """launch.pipeline would refuse a name that the config lacks, after an hour of other runs."""
    runs, seed = [], controls.Seed(tmp_path, size, 0)
    monkeypatch.setattr(controls, "run_pipeline", lambda workdir, *_, entry="", **fields: runs.append(fields))
    monkeypatch.setattr(controls, "run_entry", lambda *_: None)
    seed.makers[name](name)
    assert runs
    for fields in runs:
        flags = [f"--config.{key.replace('__', '.')}={value}" for key, value in fields.items() if key != "base"]
        config, _ = parse(["prog", f"--config=configs/tiny.py:{size}", f"--workdir={tmp_path}", *flags])
        changed = [value for key, value in fields.items() if key.endswith("train_summaries")]
        assert [config.agent.compactions.short.train_summaries] == (changed or [True])


def test_policies_of_another_folder_are_measured_as_they_were_before_rl(tmp_path):
    """The folder is that of a whole demo, whose final policy is another one."""
    sft = tmp_path / "demos" / "seed3" / "sft"
    (sft / "stages").mkdir(parents=True)
    (sft / "config.json").write_text(json.dumps({"config": {"evaluate": {"suites": {"bugs": {"family": "one_bug"}}}}}))
    for which, rate in (("before", 0.25), ("greedy", 0.5), ("after", 1.0)):
        measures = dict.fromkeys(controls.MEASURES, rate) | {"solved": {"a": rate}}
        (sft / "stages" / f"evaluate_{which}.json").write_text(json.dumps({"suites": {"bugs": measures}}))
    measured = controls.Seed(tmp_path / "runs", "full", 3, tmp_path / "demos").measure("sft")
    assert measured["suites"]["bugs"]["solved"] == {"a": 0.25} and measured["sampled_tokens"] == 0
    assert not (tmp_path / "runs").exists(), "nothing is trained"


def test_a_base_without_its_policy_is_refused_in_one_sentence(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        controls.main(["--seeds=0,1", "--controls=sft", f"--workdir={tmp_path}", f"--base={tmp_path / 'demos'}"])
    assert ended.value.code == 2
    assert "seed0/sft has no policy that was evaluated before RL; run a demo there" in capsys.readouterr().err
