"""The learner's states of released versions: kept beside its checkpoints, and gone back to with the weights.

RUN/checkpoints/rl/STEP              what the learner goes on from; it deletes old steps
RUN/checkpoints/rl-released/VERSION  the step of a version that a release needs, in hard links
RUN/checkpoints/rl-released/reached.json  the task step that the run had reached at the last restoration
"""

import contextlib
import json
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

from composer_jax.atomic_write import write_atomically
from composer_jax.checkpoint.store import CheckpointStore
from composer_jax.errors import UserError
from composer_jax.observe.journal import read_journal
from composer_jax.storage.workdir import lock_folder, require_holder

REACHED = "reached.json"


class LearnerCheckpoints:
    """The checkpoints of an RL stage, by the version of the weights (LearnerStates of realtime/release/releases.py)."""

    def __init__(self, checkpoints: str, holder: str | None = None) -> None:
        """
        Args:
          checkpoints: RUN/checkpoints/rl.
          holder: of the run that this process has open (Workdir.holder); None locks the run where it is needed.

        Raises:
          UserError: it is not a folder of this machine.
        """
        self._folder = Path(checkpoints)
        if not self._folder.is_dir():
            raise UserError(f"{checkpoints} is not a folder of checkpoints; give RUN/checkpoints/rl of this machine.")
        self._kept, self._holder = self._folder.with_name(f"{self._folder.name}-released"), holder

    def keep(self, versions: Iterable[int]) -> None:
        """Keeps the states of these versions that the learner has, and drops those of all others.

        Raises:
          UserError: a checkpoint cannot be read, or was deleted while it was copied.
        """
        versions, kept = set(versions), self._kept_versions()
        for version in kept - versions:
            shutil.rmtree(self._kept / str(version))
        if versions <= kept:
            return
        latest = {version: step for step, version in self._steps().items()}  # steps rise; not each makes a version
        for version in latest.keys() & (versions - kept):
            self._copy(latest[version], version)

    def has(self, version: int) -> bool:
        """Returns whether the state of a version is kept."""
        return version in self._kept_versions()

    def restore(self, version: int, as_version: int) -> None:
        """Makes the state of a version the latest checkpoint, bit for bit, as that of `as_version`.

        Its cursor has the optimizer's step of that state and the task step of the run, whose tasks are not played
        again. Its JSON values have {"restores": version}. Checkpoints of all versions above are deleted. A second call
        changes nothing.

        Raises:
          UserError: no state of this version was kept, or the run is in use.
        """
        if not self.has(version):
            raise UserError(
                f"{self._kept} has no state of version {version}, so the learner cannot go back; release versions "
                "that the learner has saved (rl.save_every)."
            )
        with self._locked(), CheckpointStore(self._kept) as kept:
            steps = self._steps()
            if steps and self._is_restored(max(steps), version, as_version):
                return
            step = self._note_step(steps)
            cursor = {**kept.read_json(version)["cursor"], "task_step": step, "weight_version": as_version}
            arrays, notes = kept.restore_to_host(version), kept.read_notes()
            for old, of in steps.items():
                if of > version or old == step:
                    shutil.rmtree(self._folder / str(old))
            with CheckpointStore(self._folder, notes=notes) as store:
                store.save(step, arrays=arrays, json={**kept.read_json(version), "cursor": cursor, "restores": version})

    def _note_step(self, steps: Iterable[int]) -> int:
        """Returns the task step of the run; writes it down, because the steps that tell it are deleted before a save.

        A process that is killed in between leaves the file, which can only say less than what came later.
        """
        file, batches = self._kept / REACHED, len(read_journal(self._folder.parents[1] / "batches.jsonl"))
        noted = json.loads(file.read_bytes())["task_step"] if file.exists() else 0
        step = max([*steps, batches, noted])
        write_atomically(file, json.dumps({"task_step": step}).encode())
        return step

    def _is_restored(self, step: int, version: int, as_version: int) -> bool:
        """Returns whether a step is the state of `version` as that of `as_version`, and not one that was learned."""
        with CheckpointStore(self._folder) as store:
            values = store.read_json(step)
        return values.get("restores") == version and values["cursor"]["weight_version"] == as_version

    def _steps(self) -> dict[int, int]:
        """Returns step -> version of its weights."""
        with CheckpointStore(self._folder) as store:
            return {step: store.read_json(step)["cursor"]["weight_version"] for step in store.steps()}

    def _kept_versions(self) -> set[int]:
        if not self._kept.is_dir():
            return set()
        for left in self._kept.glob(".*"):  # of a process that was killed while it copied or wrote
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        return {int(folder.name) for folder in self._kept.iterdir() if folder.name.isdigit()}

    def _copy(self, step: int, version: int) -> None:
        temporary = self._kept / f".{version}.{uuid.uuid4().hex[:8]}"
        try:
            shutil.copytree(self._folder / str(step), temporary, copy_function=os.link)
            temporary.rename(self._kept / str(version))
        except OSError as error:  # shutil.Error is one
            raise UserError(
                f"cannot copy {self._folder / str(step)} to {self._kept} ({error}); the learner may have deleted it "
                "meanwhile: run the same command again."
            ) from error

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Locks the run, so that no learner goes on from the checkpoint that is replaced."""
        if self._holder is not None:
            require_holder(self._folder.parents[1], self._holder)
            yield
            return
        lock = lock_folder(self._folder.parents[1], f"{os.getpid()} {uuid.uuid4().hex[:8]}")
        try:
            yield
        finally:
            os.close(lock)
