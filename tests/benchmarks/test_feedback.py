"""benchmarks.feedback: the habit that SFT teaches, the measures of turns, and what is made of the runs."""

import json

import numpy as np
import pytest

from benchmarks import feedback
from benchmarks.control_algorithms import NoAdvantages
from benchmarks.feedback_config import LONGEST, get_config
from benchmarks.tool_habit import STEPS, HabitTraces, hinted_traces
from composer_jax.data.chat.compact import CompactFormat
from composer_jax.data.chat.messages import ToolCall
from composer_jax.observe.episodes import write_episodes
from composer_jax.observe.metrics import MetricsWriter
from composer_jax.rl.algorithm import make_algorithm
from composer_jax.rl.batch import Group
from composer_jax.rl.feedback import HintFinder
from composer_jax.rl.policy_update import weighted_rows
from composer_jax.schema.run_config import run_config
from composer_jax.stages.run_data import RunData
from composer_jax.stages.trace_sources import SourceContext
from configs.memory_chain import SIZES
from tests.rl.hinted_episodes import CHAT, FINISH, READ, episode_of

CONFIG = run_config(get_config())
HINT = "Reminder: there is no tool open. Available tools: read, edit, finish."
OPEN = CHAT.render_assistant("", [ToolCall("open", {"path": "a"})])

# -- The habit ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def context(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    tokenizer = RunData(CONFIG, folder).tokenizer
    return SourceContext(3, tokenizer, CompactFormat(tokenizer), CONFIG.agent, folder, CONFIG.sft.seq_len)


@pytest.fixture(scope="module")
def episodes(context):
    return HabitTraces(context, traces=20).play()


def calls(episode, chat):
    """The names of the first calls of an episode's messages, and the arguments."""
    messages = (chat.parse(node.sampled_tokens.tolist()) for node in episode.transcript.nodes_of_kind("assistant"))
    return [(message.calls[0].name, message.calls[0].arguments) for message in messages]


def test_the_expert_opens_before_it_reads_and_the_wrong_calls_are_trained(context, episodes):
    wrong = reads = 0
    for episode in episodes:
        made = calls(episode, context.chat)
        assert episode.outcome == "finished" and episode.reward == 1
        for (name, arguments), after in zip(made, made[1:], strict=False):
            reads += name == "read"
            wrong += name == "open"
            assert name != "open" or after == ("read", arguments)
        assert made[-1][0] == "edit"
        (row,) = episode.transcript.rows()
        sampled = [node.sampled_tokens for node in episode.transcript.nodes_of_kind("assistant")]
        np.testing.assert_array_equal(row.tokens[row.trained], np.concatenate(sampled))
        answers = [context.chat.answer_text(n.tokens.tolist()) for n in episode.transcript.nodes_of_kind("tool")]
        assert answers.count("ERROR no tool open") == [name for name, _ in made].count("open")
    assert reads == len(episodes) * (STEPS - 1) and 0.45 < wrong / reads < 0.75


def test_a_hinted_trace_is_the_context_of_the_teacher_and_trains_the_right_call_alone(context, episodes):
    chat = context.chat
    finder = HintFinder(CONFIG.rl.feedback, chat, CONFIG.rl.batches[-1][0])
    count = 0
    for episode in episodes:
        traces = hinted_traces(episode, chat)
        turns = episode.transcript.nodes_of_kind("assistant")
        wrong = [number for number, (name, _) in enumerate(calls(episode, chat)) if name == "open"]
        hints = finder(episode).get(0, ())
        assert len(traces) == len(wrong) == len(hints)
        for (tokens, trained), number, hint in zip(traces, wrong, hints, strict=True):
            before = [node.tokens for node in episode.transcript.path(turns[number].parent)]
            head = np.concatenate([*before, chat.user([HINT]), chat.generation_prompt])
            right = turns[number + 1].sampled_tokens
            np.testing.assert_array_equal(tokens, np.concatenate([head, right]))
            np.testing.assert_array_equal(tokens[~trained], hint.context)
            np.testing.assert_array_equal(tokens[trained], right)
            count += 1
    assert count > 20


def test_the_source_mixes_episodes_and_hinted_traces_and_is_a_function_of_the_seed(context):
    source = HabitTraces(context, traces=20, hinted=0.5)
    traces, reported = source.traces(), source.report()
    with_hint = [HINT in context.tokenizer.decode(tokens) for tokens, _ in traces]
    assert len(traces) == 20 and reported == {"hinted_traces": sum(with_hint)} and 4 <= sum(with_hint) <= 16
    for (tokens, trained), is_hinted in zip(traces, with_hint, strict=True):
        messages = np.count_nonzero(trained & (tokens == context.tokenizer.end))
        assert messages == 1 if is_hinted else messages >= STEPS
    for (tokens, trained), (again, trained_again) in zip(traces, source.traces(), strict=True):
        np.testing.assert_array_equal(tokens, again)
        np.testing.assert_array_equal(trained, trained_again)


def test_a_wrong_call_before_each_read_fits_the_task_and_every_length_of_the_config(context):
    for episode in HabitTraces(context, traces=4, rate=1.0).play():
        assert episode.reward == 1 and episode.turns == 2 * STEPS - 1
        assert len(episode.transcript.tokens) <= LONGEST == CONFIG.sampler.max_model_len == CONFIG.sft.seq_len
        finder = HintFinder(CONFIG.rl.feedback, context.chat, CONFIG.rl.batches[-1][0])
        assert len(finder(episode)[0]) == STEPS - 1 and finder.too_long == 0


@pytest.mark.parametrize("size", SIZES)
def test_the_config_records_all_episodes_that_are_measured(size):
    config = run_config(get_config(size))
    suite = config.evaluate.suites["chain"]
    assert suite.attempts <= 2 and config.evaluate.recorded_tasks >= suite.tasks
    assert config.rl.keep_groups and config.rl.feedback.weight == 0 and config.rl.groups["memory_chain"] > 0


# -- The measures -------------------------------------------------------------------------------------------------


def test_changes_are_those_of_the_turns_that_the_detector_does_not_name():
    episodes = [episode_of(READ, OPEN, READ, FINISH), episode_of(READ, READ)]
    changes = np.zeros((2, 400))
    values = ([0.5, 9.0, 0.25, 1.0], [0.125, 0.0])
    for changes_S, episode, of_turns in zip(changes, episodes, values, strict=True):
        for span, value in zip(episode.transcript.trained_spans().values(), of_turns, strict=True):
            changes_S[span.start - 1 : span.stop - 1] = value
    reads, end = len(READ), len(FINISH)
    assert feedback.mean_changes(episodes, CHAT, changes) == {
        "other_turns": pytest.approx((0.25 * reads + 1.0 * end) / (reads + end)),
        "right_reads": pytest.approx((0.5 + 0.125 + 0.0) / 3),
    }
    only_wrong = feedback.mean_changes([episode_of(OPEN)], CHAT, changes[:1])
    assert only_wrong == {"other_turns": None, "right_reads": None}


@pytest.mark.parametrize(
    ("malformed", "step"), [([0.3, 0.2, 0.03, 0.2], 3), ([0.3, 0.2, 0.031], None), ([0.5, 0.0], 2)]
)
def test_the_first_step_with_a_tenth_of_the_wrong_calls(malformed, step):
    assert feedback.steps_to_tenth(malformed) == step


def test_without_advantages_only_rows_with_hints_are_trained():
    group = Group([episode_of(READ, OPEN, reward=1.0), episode_of(READ, FINISH)], [1.0, 0.0])
    algorithm = make_algorithm("benchmarks.control_algorithms:NoAdvantages", CONFIG.rl.algorithm.options)
    np.testing.assert_array_equal(NoAdvantages()([1.0, 0.0]), [0.0, 0.0])
    (chosen,) = weighted_rows([group], algorithm, find_hints=HintFinder(CONFIG.rl.feedback, CHAT, 1000))
    assert [len(row.hints) for row in chosen] == [1] and not chosen[0].advantages.any()


# -- The runs -----------------------------------------------------------------------------------------------------


def row(seed, variant, malformed=(), *, after=0.1, passed=0.5, other=0.01):
    of_rl = {"malformed": malformed, "grade": [0.5] * len(malformed), "other_turns": other, "right_reads": 0.2}
    return {"seed": seed, "variant": variant, "malformed_after": after, "pass_at_1": passed, **of_rl}


ROWS = [
    {"seed": 1, "variant": "before", "malformed_after": 0.3, "pass_at_1": 0.25},
    row(1, "feedback", [0.3, 0.03, 0.0], after=0.0),
    row(0, "feedback", [0.5, 0.25, 0.1], passed=1.0, other=0.02),
    {"seed": 0, "variant": "before", "malformed_after": 0.5, "pass_at_1": 0.75},
    {"seed": 2, "variant": "before", "malformed_after": 0.5, "pass_at_1": 0.75},
]
"""Seed 2 has not finished."""


def test_lists_are_in_the_order_of_the_seeds_that_have_all_variants():
    out = feedback.summarize(ROWS)
    assert out == {
        "before": {"malformed_after": [0.5, 0.3], "pass_at_1": [0.75, 0.25]},
        "feedback": {
            "malformed_after": [0.1, 0.0],
            "pass_at_1": [1.0, 0.5],
            "steps_to_tenth": [None, 2],
            "malformed": [0.4, 0.14, 0.05],
            "grade": [0.5, 0.5, 0.5],
            "other_turns": [0.02, 0.01],
            "right_reads": [0.2, 0.2],
        },
        "seeds": [0, 1],
    }
    assert json.loads(json.dumps(out)) == out


def test_without_rows_there_is_nothing_to_report():
    assert feedback.summarize([]) == {"seeds": []}


@pytest.fixture
def started(monkeypatch):
    """Replaces the runs by folders with their results; returns the (folder, fields) of each."""
    started = []
    call = {"name": "read", "arguments": {}}
    message = {"kind": "assistant", "text": "", "tokens": 1, "sampled": True, "calls": [call]}
    fields = dict(family="memory_chain", split="heldout", seed=0, reward=1.0, outcome="finished", turns=1, summaries=0)
    fields |= dict(condition="none", step=None, tokens=1, sampled_tokens=1, summary_tokens=0, instruction="")
    records = [
        {"task_id": "a", **fields, "parts": {"malformed_calls": 1}, "segments": [[message] * 4]},
        {"task_id": "b", **fields, "parts": {}, "segments": [[message] * 2]},
    ]

    def run_pipeline(workdir, size, seed, *, config, **fields):
        started.append((workdir.name, fields))
        which = "before" if workdir.name == "before" else "after"
        for name in ("stages", "episodes"):
            (workdir / name).mkdir(parents=True, exist_ok=True)
        results = {"suites": {"chain": {"pass_at_1": 0.75}}}
        (workdir / "stages" / f"evaluate_{which}.json").write_text(json.dumps(results))
        write_episodes(workdir / "episodes" / f"{which}.jsonl", records)
        if which == "after":
            with MetricsWriter(workdir / "metrics" / "rl.jsonl") as metrics:
                for step in range(2):
                    metrics.write(step + 1, grade=step, behavior_malformed_calls=0.5 - step / 2)

    monkeypatch.setattr(feedback, "run_pipeline", run_pipeline)
    monkeypatch.setattr(feedback, "turn_changes", lambda *_: {"other_turns": 0.5, "right_reads": None})
    return started


def test_all_runs_of_rl_start_from_one_sft_policy_and_differ_in_feedback(started, tmp_path, capsys):
    for _ in range(2):  # the second time all rows are there
        feedback.main(["--seeds=3", f"--workdir={tmp_path}"])
    out = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert out["before"] == {"malformed_after": [0.125], "pass_at_1": [0.75]}
    measures = {"malformed": [0.5, 0.0], "grade": [0.0, 1.0], "steps_to_tenth": [2], "right_reads": [None]}
    assert out["reward"] == {**out["before"], **measures, "other_turns": [0.5]}
    runs = [(name, fields) for name, fields in started if name != "before"]
    start = {"base": tmp_path / "seed3" / "before" / "checkpoints" / "sft"}
    start |= {"stages": "('rl',)", "evaluate__which": "('after',)"}
    assert runs == [(name, start | fields) for name, fields in feedback.VARIANTS.items()]


def test_some_variants_can_be_chosen(started, tmp_path, capsys):
    with pytest.raises(SystemExit):
        feedback.main(["--variants=reward,other", f"--workdir={tmp_path}"])
    assert "--variants names 'other'" in capsys.readouterr().err and not started
    feedback.main(["--seeds=0", "--variants=reward", f"--workdir={tmp_path}"])
    assert json.loads(capsys.readouterr().out).keys() == {"reward", "seeds"}
