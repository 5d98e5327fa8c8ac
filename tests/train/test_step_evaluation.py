"""fit() with an evaluation after some steps: training keeps its bits, and what a kill cut short runs again."""

import sys

import jax
import pytest

from tests.train.test_loop import Killed, assert_same, ctrl_c, killed, learner, loop, run, weights

__all__ = ["learner", "weights"]  # fixtures


@pytest.fixture(scope="module")
def uninterrupted(learner, weights, tmp_path_factory):
    return run(tmp_path_factory.mktemp("whole"), learner, weights)


class Evaluation:
    """A StepEvaluation after steps 3, 4 and 6: a number of the weights of each."""

    def __init__(self, at=None):
        self.at, self.done, self.began = at or {}, {}, []

    def truncate_after(self, step):
        self.done = {done: value for done, value in self.done.items() if done <= step}

    def is_due(self, step):
        return step in (3, 4, 6)

    def run(self, step, state):
        if step in self.done:
            return
        self.began.append(step)
        assert int(state.step) == step
        if action := self.at.pop(len(self.began), None):
            action(lambda: None)
        self.done[step] = float(jax.tree.leaves(state.params)[0].sum())


def test_an_evaluation_after_steps_changes_no_bit(tmp_path, learner, weights, uninterrupted):
    evaluation = Evaluation()
    assert_same(run(tmp_path, learner, weights, evaluation=evaluation), uninterrupted)
    assert evaluation.began == [3, 4, 6] and len(set(evaluation.done.values())) == 3


@pytest.mark.parametrize("action", [killed, ctrl_c], ids=["killed", "ctrl_c"])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_an_evaluation_that_is_cut_short_runs_again(tmp_path, learner, weights, uninterrupted, monkeypatch, action, n):
    """Checkpoints are of steps 2, 4 and 6. Step 4 is evaluated when the run goes on from its checkpoint."""
    real_save = loop.save_state
    whole, cut = Evaluation(), Evaluation(at={n: action})
    run(tmp_path / "whole", learner, weights, evaluation=whole)
    with monkeypatch.context() as patch:
        if action is killed:
            patch.setattr(
                loop, "save_state", lambda *a, **k: None if isinstance(sys.exception(), Killed) else real_save(*a, **k)
            )
        with pytest.raises(Killed if action is killed else KeyboardInterrupt):
            run(tmp_path / "cut", learner, weights, evaluation=cut)
    assert_same(run(tmp_path / "cut", learner, weights, evaluation=cut), uninterrupted)
    assert cut.done == whole.done
    # A second run of the same step follows a kill; an interrupt takes effect when the evaluation has ended.
    expected = [3, 4, 6]
    if action is killed:
        expected.insert(n, expected[n - 1])
    assert cut.began == expected
