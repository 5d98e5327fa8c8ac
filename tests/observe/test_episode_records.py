import pytest

from composer_jax.errors import UserError
from composer_jax.observe.episodes import EpisodeRecord, read_episodes, write_episodes
from tests.observe.example_run import bug_episode, chain_episode


def test_records_come_back_as_written(tmp_path):
    records = [bug_episode(3, 0, 1.0, None, 0), chain_episode(4, 1, None, 12, 11)]
    path = write_episodes(tmp_path / "episodes" / "rl.jsonl", records)
    assert read_episodes(path) == records
    assert [file.name for file in path.parent.iterdir()] == ["rl.jsonl"]


def test_plain_mappings_are_records_too(tmp_path):
    record = chain_episode(4, 0, 0.0, 3, 2)
    path = write_episodes(tmp_path / "rl.jsonl", [record.to_json()])
    assert read_episodes(path) == [record]


def test_any_text_survives(tmp_path):
    odd = 'line\u2028separator, "quotes"\r\n\x00\x1b[31m, lone surrogate \udc80, \N{SNOWMAN}'
    record = {**bug_episode(3, 0, 1.0, None, 0).to_json(), "instruction": odd}
    assert read_episodes(write_episodes(tmp_path / "e.jsonl", [record]))[0].instruction == odd


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"seeed": 1}, "EpisodeRecord: unknown seeed"),
        ({"segments": [[{"kind": "prompt", "text": "x"}]]}, "MessageRecord: missing tokens, sampled"),
        (
            {"segments": [[{"kind": "shout", "text": "x", "tokens": 1, "sampled": False}]]},
            "message kind 'shout' is unknown; the kinds are prompt",
        ),
    ],
)
def test_a_wrong_record_is_refused_before_anything_is_written(tmp_path, change, sentence):
    with pytest.raises(ValueError, match=sentence):
        write_episodes(tmp_path / "e.jsonl", [{**bug_episode(3, 0, 1.0, None, 0).to_json(), **change}])
    assert not (tmp_path / "e.jsonl").exists()


def test_a_missing_field_is_named():
    record = bug_episode(3, 0, 1.0, None, 0).to_json()
    del record["reward"]
    with pytest.raises(ValueError, match="EpisodeRecord: missing reward"):
        EpisodeRecord.from_json(record)


def test_a_damaged_file_names_its_line(tmp_path):
    path = write_episodes(tmp_path / "e.jsonl", [bug_episode(3, 0, 1.0, None, 0)])
    path.write_text(path.read_text() + "{}\n")
    with pytest.raises(UserError, match="line 2 of .*e.jsonl is not an episode record: EpisodeRecord: missing task_id"):
        read_episodes(path)


def test_no_file_is_no_episodes(tmp_path):
    assert read_episodes(tmp_path / "before.jsonl") == []
