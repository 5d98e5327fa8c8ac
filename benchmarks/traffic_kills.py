"""A scripted cycle of releases is killed at every write: it must go on, and lose or double nothing.

    python -m benchmarks.traffic_kills [FOLDER]

The cycle has an A/A test and three releases that claim sessions and publish a candidate: the gate refuses one; one is
held at the gate and in its canary, approved both times, and rolled back from there; one is released and then rolled
back. A learner's states go with them. A process is forked for every file that the cycle opens for writing, renames or
deletes, and kills itself with SIGKILL just before; the next one completes the cycle. Prints one JSON object.
"""

import json
import os
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from composer_jax.atomic_write import write_atomically
from composer_jax.checkpoint.weight_chain import ChainFiles, Shard, WeightPublisher, WeightReceiver
from composer_jax.realtime.release.canary import CanaryRules, LabelRow
from composer_jax.realtime.release.releases import NEXT, ReleaseFolder, read_releases
from composer_jax.realtime.release.steps import approve, canary_step

SESSIONS = [f"session{i}" for i in range(60)]
ENDS = ["released", "failed", "rolled_back", "rolled_back"]
VERSIONS, RESTORED = [1, 2, 3, 5], [4, 6]
"""Candidates of the releases, and the versions that restore version 1."""
PINNED = {5, 6}
"""The last two versions that served all users."""
RULES = CanaryRules(horizon_s=10, min_users=5, planned_users=400)
USERS = 3000
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class LearnerFiles:
    """A learner's states in a folder: VERSION.json {"weights": VERSION} of what it saved, kept/ of releases."""

    def __init__(self, folder: str) -> None:
        self._folder, self._kept = Path(folder), Path(folder) / "kept"
        self._kept.mkdir(parents=True, exist_ok=True)

    def save(self, version: int, weights: int) -> None:
        """Writes the state that the learner goes on from."""
        write_atomically(self._folder / f"{version}.json", json.dumps({"weights": weights}).encode())

    def latest(self) -> tuple[int, int]:
        """Returns (version, the version whose weights it has) of what the learner goes on from."""
        version = max(_versions(self._folder))
        return version, json.loads((self._folder / f"{version}.json").read_bytes())["weights"]

    def kept(self) -> set[int]:
        """Returns the versions whose states are kept."""
        return _versions(self._kept)

    def keep(self, versions: Iterable[int]) -> None:
        """As of LearnerStates."""
        versions = set(versions)
        for version in self.kept() - versions:
            (self._kept / f"{version}.json").unlink()
        for version in _versions(self._folder) & (versions - self.kept()):
            write_atomically(self._kept / f"{version}.json", (self._folder / f"{version}.json").read_bytes())

    def has(self, version: int) -> bool:
        """As of LearnerStates."""
        return version in self.kept()

    def restore(self, version: int, as_version: int) -> None:
        """As of LearnerStates."""
        self.save(as_version, json.loads((self._kept / f"{version}.json").read_bytes())["weights"])
        for later in _versions(self._folder) - {as_version}:
            if later > version:
                (self._folder / f"{later}.json").unlink()


def _versions(folder: Path) -> set[int]:
    return {int(file.stem) for file in folder.glob("[0-9]*.json")}


class Cycle:
    """The scripted cycle in a folder; `run` goes on from whatever is there."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.chain, self.learner = folder, str(folder / "weights"), str(folder / "learner")

    def run(self) -> None:
        """Takes steps until the script has ended. Time is a count of the transitions that are on disk."""
        self._publish_initial()
        with ReleaseFolder(self.folder, by="script", clock=self._clock, learner=LearnerFiles) as releases:
            while self._step(releases):
                pass

    def _clock(self) -> float:
        return 1000.0 * (1 + sum(len(one.transitions) for one in read_releases(self.folder)))

    def _step(self, releases: ReleaseFolder) -> bool:
        """Takes one step; returns whether there may be more."""
        number = len(releases.releases)
        if number == 0:
            releases.adopt(self.chain, 1, 1, learner=self.learner)
            return True
        last = releases.last
        if last.state == "collecting":
            releases.claim(SESSIONS, most=20)
        elif last.state == "labelled":
            version = max(ChainFiles(self.chain).manifests()) + 1
            self._publish(version, {"release": last.number})
            releases.record_candidate(version)
        elif last.state == "trained":
            releases.record_gate({"verdict": {2: "fail", 3: "hold"}.get(number, "pass"), "reasons": []})
        elif last.state == "held":
            approve(releases, "the script says so")
        elif last.state == "canary" and number == 3:
            if [row["state"] for row in last.transitions].count("held") < 2:
                releases.move("held", "the script says so")
            else:
                releases.roll_back("the script says so")
        elif last.state in ("gated", "canary"):
            rows = self._labels(releases) if last.state == "canary" else []
            canary_step(releases, rows, RULES, clock=self._clock)
        elif number < len(ENDS):
            releases.begin(self.chain, learner=self.learner)
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
        LearnerFiles(self.learner).save(version, version)
        WeightPublisher(self.chain).publish({Shard("w", (0,), (64,)): _weights(version)}, version, labels)


def _weights(version: int) -> np.ndarray:
    return np.random.default_rng(version).standard_normal(64).astype(np.float32)


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
    if (states := [one.state for one in releases]) != ENDS:
        wrong.append(f"states {states}")
    if (versions := [one.version for one in releases]) != VERSIONS:
        wrong.append(f"candidates {versions}: one was published twice, or is lost")
    if (restored := [one.rollback["as"] for one in releases if one.rollback]) != RESTORED:
        wrong.append(f"restored as {restored}")
    for one in releases:
        states = [row["state"] for row in one.transitions]
        wrong += [f"{a} -> {b}" for a, b in zip(states, states[1:], strict=False) if b not in NEXT[a]]
    claimed = Counter(session for one in releases for session in one.sessions)
    wrong += [f"{session} in {count} batches" for session, count in claimed.items() if count > 1]
    wrong += [f"{session} lost" for session in SESSIONS if session not in claimed]
    wrong += [f"{file} left" for file in (folder / "releases").iterdir() if file.name.startswith(".0")]
    receiver, learner = WeightReceiver(chain), LearnerFiles(str(folder / "learner"))
    receiver.receive()
    if receiver.version != RESTORED[-1] or receiver.arrays["w"].tobytes() != _weights(1).tobytes():
        wrong.append(f"version {receiver.version} is the newest, or has other weights than those that were restored")
    arms = json.loads((Path(chain) / "arms.json").read_text())
    if arms != {"anchor": RESTORED[-1], "candidate": RESTORED[-1]}:
        wrong.append(f"arms {arms}")
    if (pins := ChainFiles(chain).pins()) != PINNED or learner.kept() != PINNED:
        wrong.append(f"pins {pins}, and states {learner.kept()} of the learner")
    if (latest := learner.latest()) != (RESTORED[-1], 1):
        wrong.append(f"the learner goes on from {latest}")
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
