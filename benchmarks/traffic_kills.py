"""A scripted cycle of releases is killed at every write: it must go on, and lose or double nothing.

    python -m benchmarks.traffic_kills [FOLDER]

The cycle has an A/A test, two releases that claim sessions, publish a candidate and go through gate and canary, and a
rollback. A process is forked for every file that the cycle opens for writing, renames or deletes, and kills itself with
SIGKILL just before; the next one goes on and completes the cycle. Prints one JSON object.
"""

import json
import os
import shutil
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from composer_jax.checkpoint.pinned_versions import weights_hash
from composer_jax.checkpoint.weight_chain import ChainFiles, Shard, WeightPublisher, WeightReceiver
from composer_jax.realtime.release.canary import CanaryRules, LabelRow
from composer_jax.realtime.release.releases import NEXT, ReleaseFolder, read_releases
from composer_jax.realtime.release.steps import canary_step

SESSIONS = [f"session{i}" for i in range(40)]
RULES = CanaryRules(horizon_s=10, min_users=5, planned_users=400)
USERS = 3000
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class Cycle:
    """The scripted cycle in a folder; `run` goes on from whatever is there."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.chain = folder, str(folder / "weights")

    def run(self) -> None:
        """Takes steps until the script has ended. Time is a count of the transitions that are on disk."""
        self._publish_initial()
        with ReleaseFolder(self.folder, by="script", clock=self._clock) as releases:
            while self._step(releases):
                pass

    def _clock(self) -> float:
        return 1000.0 * (1 + sum(len(one.transitions) for one in read_releases(self.folder)))

    def _step(self, releases: ReleaseFolder) -> bool:
        """Takes one step; returns whether there may be more."""
        number = len(releases.releases)
        if number == 0:
            releases.adopt(self.chain, 1, 1)
            return True
        last = releases.last
        if last.state == "collecting":
            releases.claim(SESSIONS, most=20)
        elif last.state == "labelled":
            version = max(ChainFiles(self.chain).manifests()) + 1
            self._publish(version, {"release": last.number})
            releases.trained(version)
        elif last.state == "trained":
            releases.gated({"verdict": "pass", "reasons": []})
        elif last.state in ("gated", "canary"):
            rows = self._labels(releases) if last.state == "canary" else []
            canary_step(releases, rows, RULES, clock=self._clock)
        elif number < 3:
            releases.begin(self.chain)
        elif last.state == "released":
            releases.roll_back("the script says so")
        else:
            return False
        return True

    def _labels(self, releases: ReleaseFolder) -> list[LabelRow]:
        """Returns a label per user; the arms have their due sizes whatever the salt is, so that no chance holds it."""
        fraction, rng = releases.last.fraction, np.random.default_rng(0)
        every = round(1 / fraction)
        return [
            LabelRow(str(i), "candidate" if i % every == 0 else "anchor", fraction, float(rng.normal()))
            for i in range(USERS)
        ]

    def _publish_initial(self) -> None:
        if not ChainFiles(self.chain).manifests():
            self._publish(1, {})

    def _publish(self, version: int, labels: dict[str, int]) -> None:
        weights = np.random.default_rng(version).standard_normal(64).astype(np.float32)
        WeightPublisher(self.chain).publish({Shard("w", (0,), (64,)): weights}, version, labels)


def count_writes(folder: Path) -> int:
    """Returns how many writes the whole cycle makes in a folder."""
    writes = [0]

    def count(_: str) -> None:
        writes[0] += 1

    _hooked(folder, count)
    return writes[0]


def _hooked(folder: Path, on_write: Any) -> None:
    """Runs the cycle; `on_write` is called before each write below the folder, with what is written."""
    _HOOK["folder"], _HOOK["on_write"] = str(folder), on_write
    try:
        Cycle(folder).run()
    finally:
        _HOOK["on_write"] = None


_HOOK: dict[str, Any] = {"folder": "", "on_write": None}


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    """Python's audit hook, which cannot be removed: it does nothing outside `_hooked`."""
    if _HOOK["on_write"] is None or event not in ("open", "os.rename", "os.remove", "os.rmdir"):
        return
    if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & WRITES):
        return
    if str(arguments[0]).startswith(_HOOK["folder"]):
        _HOOK["on_write"](str(arguments[0]))


def _run_killed(folder: Path, at: int) -> bool:
    """Runs the cycle in a process that kills itself before write number `at`; returns whether it was killed."""
    process = os.fork()
    if process == 0:
        writes = [0]

        def kill(_: str) -> None:
            writes[0] += 1
            if writes[0] > at:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            _hooked(folder, kill)
        except BaseException as error:
            print(f"killed at {at}: {error!r}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(process, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        raise RuntimeError(f"the cycle in {folder} failed; its error is above")
    return os.WIFSIGNALED(status)


def problems(folder: Path) -> list[str]:
    """Returns what is wrong in the folder of a cycle that has ended."""
    releases, chain, wrong = read_releases(folder), str(folder / "weights"), []
    if [one.state for one in releases] != ["released", "released", "rolled_back"]:
        wrong.append(f"states {[one.state for one in releases]}")
    for one in releases:
        states = [row["state"] for row in one.transitions]
        wrong += [f"{a} -> {b}" for a, b in zip(states, states[1:], strict=False) if b not in NEXT[a]]
    claimed = Counter(session for one in releases for session in one.sessions)
    wrong += [f"{session} in {count} batches" for session, count in claimed.items() if count > 1]
    wrong += [f"{session} lost" for session in SESSIONS if session not in claimed]
    wrong += [f"{file} left" for file in (folder / "releases").iterdir() if file.name.startswith(".0")]
    last = releases[-1]
    if last.rollback is not None:
        receiver = WeightReceiver(chain)
        receiver.receive()
        if receiver.version != last.rollback["as"] or weights_hash(chain, last.rollback["to"]) != weights_hash(
            chain, last.rollback["as"]
        ):
            wrong.append("other weights than those that were restored")
        if json.loads((Path(chain) / "arms.json").read_text()) != {
            "anchor": receiver.version,
            "candidate": receiver.version,
        }:
            wrong.append("arms serve another version")
    return wrong


def kill_everywhere(folder: Path, every: int = 1) -> dict[str, Any]:
    """Returns {"points", "kills", "problems": sentences} of a cycle that is killed before every `every`-th write.

    At every point the second process is killed, too, before a write of its own, and the third one completes the cycle.
    """
    sys.addaudithook(_audit)
    points = range(0, count_writes(folder / "whole"), every)
    wrong = [f"whole: {problem}" for problem in problems(folder / "whole")]
    kills = 0
    for at in points:
        there = folder / str(at)
        kills += _run_killed(there, at)
        kills += _run_killed(there, at % 7)
        if _run_killed(there, 1 << 30):
            wrong.append(f"{at}: killed")
        wrong += [f"{at}: {problem}" for problem in problems(there)]
        shutil.rmtree(there)
    return {"points": len(points), "kills": kills, "problems": wrong}


def main() -> None:
    """Kills the cycle at every write in a temporary folder, or in the folder that is named."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(temporary)
        print(json.dumps(kill_everywhere(folder.absolute())))


if __name__ == "__main__":
    main()
