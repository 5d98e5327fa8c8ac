"""What an RL run leaves on disk: complete lines and files only, and groups that are equal bit for bit."""

import json

import numpy as np
import pytest

from composer_jax.errors import UserError
from composer_jax.frames import encode_frame
from composer_jax.rl.ledger import BatchRecord, RolloutLedger
from composer_jax.rl.played_group import PlayedGroup, hash_tokens
from tests.rl.made_up import conversation, episode


def group(number: int, start: int = 100) -> PlayedGroup:
    episodes = [episode(1.0, conversation(start, summaries=1), summaries=1), episode(None), episode(0.0)]
    return PlayedGroup(number, episodes, admitted_at=1, resolved_version=3)


def test_a_group_is_stored_bit_for_bit(tmp_path):
    with RolloutLedger(tmp_path) as ledger:
        ledger.store(group(7))
        loaded = ledger.load(7)
    assert loaded == group(7)
    assert hash_tokens([loaded]) == hash_tokens([group(7)])
    for ours, theirs in zip(group(7).episodes[0].transcript.rows(), loaded.episodes[0].transcript.rows(), strict=True):
        np.testing.assert_array_equal(ours.logprobs, theirs.logprobs)


def test_the_hash_is_of_tokens_and_of_what_is_trained():
    assert hash_tokens([group(1)]) == hash_tokens([group(2)])
    assert hash_tokens([group(1)]) != hash_tokens([group(1, start=101)])
    other = group(1)
    other.episodes[0].transcript.nodes[1] = (
        other.episodes[0]
        .transcript.nodes[1]
        .__class__(**{**other.episodes[0].transcript.nodes[1].__dict__, "trained": False})
    )
    assert hash_tokens([other]) != hash_tokens([group(1)])


def test_a_damaged_group_is_named(tmp_path):
    with RolloutLedger(tmp_path) as ledger:
        ledger.store(group(7))
        file = next((tmp_path / "rl" / "groups").iterdir())
        file.write_bytes(file.read_bytes()[:-9])
        with pytest.raises(UserError, match="00000007.frames is damaged"):
            ledger.load(7)


def test_a_group_whose_bytes_have_changed_is_damaged(tmp_path):
    with RolloutLedger(tmp_path) as ledger:
        ledger.store(group(7))
        file = next((tmp_path / "rl" / "groups").iterdir())
        content = bytearray(file.read_bytes())
        content[-2] ^= 1
        file.write_bytes(content)
        with pytest.raises(UserError, match="episode 2 has other bytes than were written"):
            ledger.load(7)
        file.write_bytes(encode_frame(*group(7).episodes[0].to_frame()))
        with pytest.raises(UserError, match="a file of 'composer_jax episode 1', not of 'composer_jax group 1'"):
            ledger.load(7)


def test_groups_of_an_earlier_version_are_named(tmp_path):
    file = tmp_path / "rl" / "groups" / "00000003.json.zst"
    file.parent.mkdir(parents=True)
    file.touch()
    with pytest.raises(UserError, match="00000003.json.zst is a group of an earlier version"):
        RolloutLedger(tmp_path)


def filled(path, steps: int = 4) -> list[BatchRecord]:
    with RolloutLedger(path) as ledger:
        for number in range(2 * steps + 2):
            ledger.admit(number, number // 2, ("bugfix", number))
            ledger.store(group(number))
        for step in range(steps):
            ledger.begin_step(BatchRecord.of(step + 1, step, [ledger.load(2 * step), ledger.load(2 * step + 1)]))
        return list(ledger.batches)


@pytest.mark.parametrize("cut", [1, 40, 300])
def test_a_line_that_a_kill_cut_short_never_was(tmp_path, cut):
    batches = filled(tmp_path)
    file = tmp_path / "batches.jsonl"
    content = file.read_bytes()
    file.write_bytes(content[:-cut])
    whole = content[:-cut].count(b"\n")
    with RolloutLedger(tmp_path) as ledger:
        assert ledger.batches == batches[:whole]
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == list(range(1, whole + 1))


def test_a_run_goes_on_with_what_its_checkpoint_has_not_learned(tmp_path):
    batches = filled(tmp_path)
    with RolloutLedger(tmp_path) as ledger:
        ledger.drop(9, 4)
        assert ledger.recover(2) == [4, 5, 6, 7, 8]
        assert ledger.batches == batches and not ledger.has(9)


def test_recorded_steps_whose_groups_are_gone_are_taken_anew(tmp_path):
    batches = filled(tmp_path)
    with RolloutLedger(tmp_path) as ledger:
        ledger.forget([7])
        assert ledger.recover(2) == [4, 5, 6, 7, 8, 9]
        assert ledger.batches == batches[:3]
        ledger.begin_step(batches[2])
        ledger.begin_step(batches[3])
        assert ledger.batches == batches


def test_a_step_can_be_taken_again_with_the_same_tokens_also_if_it_was_recorded_without_grades(tmp_path):
    batches, file = filled(tmp_path), tmp_path / "batches.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows:
        del row["families"]["bugfix"]["grade"]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    other = {"bugfix": {**batches[1].families["bugfix"], "turns": 99.0}}
    with RolloutLedger(tmp_path) as ledger:
        ledger.begin_step(batches[1])
        for changes in ({"families": other}, {"tokens": "0"}):
            with pytest.raises(RuntimeError, match="step 2 was"):
                ledger.begin_step(BatchRecord(**{**batches[1].__dict__, **changes}))
    file.write_text("no json\n")
    with pytest.raises(UserError, match="line 1 of .*batches.jsonl"):
        RolloutLedger(tmp_path)
