"""kill -9 of a writer at each of its writes: the folder reads, and no turn is there twice."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import zstandard

from composer_jax.serve.traffic.folder import TrafficFolder
from tests.serve.traffic.conftest import stored
from tests.stages.base_model import write_base

ROOT = Path(__file__).parents[3]
WRITES = """
import json, os, signal, sqlite3, sys, types
from pathlib import Path
from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.data.chat.text_processor import TextProcessor
from composer_jax.data.text_files import text_files
from composer_jax.sampler.policy import Sample
from composer_jax.serve.traffic import retention
from composer_jax.serve.traffic.consent import TrafficHeaders
from composer_jax.serve.traffic.writer import TrafficLimits, TrafficWriter

base, folders, policy, step = sys.argv[1:]
text = TextProcessor(text_files(base), types.SimpleNamespace(vocab_size=1 << 20), "m")
text.tokenizer.decode([1])

def kill_at(count):
    left = [count]
    def counted(call):
        def run(*args, **kwargs):
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            return call(*args, **kwargs)
        return run
    class Database(sqlite3.Connection):
        executemany, __exit__ = counted(sqlite3.Connection.executemany), counted(sqlite3.Connection.__exit__)
    connect = sqlite3.connect
    sqlite3.connect = lambda path, **options: connect(path, factory=Database, **options)
    for name in ("pwrite", "fsync", "ftruncate", "truncate"):
        setattr(os, name, counted(getattr(os, name)))
    Path.unlink, Path.replace = counted(Path.unlink), counted(Path.replace)

def write(folder):
    writer = TrafficWriter(folder, policy, text, limits=TrafficLimits(flush_seconds=0.001))
    headers = TrafficHeaders("training", user="u")
    for i in range(3):
        for session in ("a", "b"):
            request = writer.open_request("key", session, headers, f"cmpl-{i:024x}", ())
            prompt, sample = [1] + [9, 8, 3] * i, Sample([9, 8], [-1.0, -1.0], [0, 0], "stop", [-1.0, -1.0])
            writer.offer(request, 0, prompt, sample, SamplingParams(4), 0)
            while writer.queue_length:
                continue
    retention.forget(folder, session="a")
    writer.close()

for count in range(0, 90, int(step)):
    if (child := os.fork()) == 0:
        kill_at(count)
        write(Path(folders, str(count)))
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    print(status, flush=True)
    if status == 0:
        break
"""


@pytest.mark.parametrize("step", [4, pytest.param(2, marks=pytest.mark.slow)])
def test_a_writer_that_is_killed_leaves_a_folder_that_reads(tmp_path, new_writer, policy_file, step):
    base = write_base(tmp_path / "small")
    command = [sys.executable, "-c", WRITES, str(base), str(tmp_path), policy_file(), str(step)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=120, text=True)
    *killed, last = map(int, done.stdout.split())
    assert last == 0 and {*killed} == {signal.SIGKILL} and len(killed) >= 48 // step, done.stderr
    counts = []
    for count in range(0, len(killed) * step, step):
        folder = tmp_path / str(count)
        begun = (folder / "traffic.sqlite").is_file() and (folder / "policy.json").is_file()
        before = turns_of(folder) if begun else {}
        forgotten = begun and TrafficFolder(folder).is_forgotten("a")
        new_writer(folder=folder).close()
        assert turns_of(folder) == before, "a second server repairs and changes nothing that is read"
        assert "a" not in before or not forgotten
        ids = sorted(turn.id for turns in before.values() for turn in turns)
        assert rows_of(folder) == ids, "nothing else is in the files"
        counts.append(len(ids))
    assert counts[0] == 0 and max(counts) >= 5 and len({*counts}) >= 5 and counts[-1] == 3
    new_writer(folder=tmp_path / str(len(killed) * step)).close()
    assert len(rows_of(tmp_path / str(len(killed) * step))) == 3


def turns_of(folder):
    """Session -> its turns, whose parents come first."""
    sessions = {name: one.turns for name, one in stored(folder).items()}
    for turns in sessions.values():
        parents = ["", *(turn.id for turn in turns)]
        assert [turn.parent for turn in turns] == parents[:-1]
    return sessions


def rows_of(folder):
    """The ids of all turns in the files."""
    reader, ids = zstandard.ZstdDecompressor(), []
    for path in folder.glob("turns/*/*"):
        with path.open("rb") as file:
            lines = reader.stream_reader(file, read_across_frames=True).read().splitlines()
        ids += [json.loads(line)["id"] for line in lines]
    return sorted(ids)
