"""RolloutLedger: what an RL run has admitted, played and trained, on disk.

    DIR/rl/admitted.jsonl           one line whenever a group starts to be played, and one when it is dropped
    DIR/rl/groups/NUMBER.frames     a PlayedGroup, from its last episode until a checkpoint has learned from it
    DIR/rl/samples/GROUP/SEED       what the episodes of a group have sampled, until it is stored (rl/sample_journal.py)
    DIR/rl/tokenizer.txt            the fingerprint of the tokenizer whose ids the groups have
    DIR/batches.jsonl               one line per optimizer step, before it is taken

Every line and file is complete or absent. A run that continues from the checkpoint of step s takes the later steps of
batches.jsonl again with the stored groups, so that it gets the same weights without a rollout. It plays the groups that
were admitted and not stored again, and their episodes go on after what they had sampled. Nothing else has to be
restored.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from composer_jax.atomic_write import open_atomically, write_atomically
from composer_jax.errors import UserError
from composer_jax.observe.journal import Journal, read_journal
from composer_jax.rl.curriculum import FamilyResults, family_results
from composer_jax.rl.played_group import PlayedGroup, encode_group, hash_tokens
from composer_jax.rl.sample_journal import SampleJournal


@dataclasses.dataclass(frozen=True)
class BatchRecord:
    """One line of batches.jsonl."""

    step: int
    """Optimizer step of RL; 1 is the first."""
    version: int
    """Version of the weights that the step starts from."""
    versions: tuple[int, int]
    """The oldest weights version of a token of the batch, and the newest version at which a group ended."""
    groups: tuple[int, ...]
    """Numbers of the groups."""
    tasks: tuple[str, ...]
    """Ids of their tasks."""
    tokens: str
    """Hash of the training rows (played_group.hash_tokens)."""
    families: FamilyResults
    """What the groups of each family showed (rl/curriculum.py: family_results)."""

    @classmethod
    def of(cls, step: int, version: int, groups: Sequence[PlayedGroup]) -> Self:
        """The record of a step that trains these groups."""
        return cls(
            step=step,
            version=version,
            versions=(min(g.oldest_version for g in groups), max(g.resolved_version for g in groups)),
            groups=tuple(g.number for g in groups),
            tasks=tuple(g.episodes[0].task_id for g in groups),
            tokens=hash_tokens(groups),
            families=family_results([g.episodes for g in groups]),
        )

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Self:
        """The record of a line of batches.jsonl."""
        fields: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in row.items()}
        return cls(**fields)


class RolloutLedger:
    """The ledger in the folder of a run; a context manager. Only process 0 has one.

    Attributes:
      admitted: number -> optimizer steps that had been taken when the group was admitted; of all groups.
      places: number -> (family, index of its task); of all groups.
      dropped: numbers of the groups that were dropped.
      batches: the BatchRecord of every step that was taken or begun, the first step first.
      samples: what the groups that play have sampled.
    """

    def __init__(self, folder: Path, before_write: Callable[[], None] | None = None):
        """Raises UserError for a folder with groups of an earlier version."""
        self._folder = folder
        group_file(folder, 0).parent.mkdir(parents=True, exist_ok=True)
        refuse_older_groups(folder)
        self._admitted = Journal(folder / "rl" / "admitted.jsonl", before_write)
        self._batches = Journal(folder / "batches.jsonl", before_write)
        self.samples = SampleJournal(folder / "rl" / "samples", before_write)
        rows = read_journal(self._admitted.path)
        admitted = [row for row in rows if "step" in row]
        self.admitted: dict[int, int] = {row["group"]: row["step"] for row in admitted}
        self.places: dict[int, tuple[str, int]] = {row["group"]: (row["family"], row["index"]) for row in admitted}
        self.dropped: set[int] = {row["group"] for row in rows if "dropped" in row}
        self.batches = [BatchRecord.from_json(row) for row in read_journal(self._batches.path)]

    def note_tokenizer(self, fingerprint: str) -> None:
        """Writes which tokenizer the groups belong to, atomically."""
        write_atomically(tokenizer_file(self._folder), fingerprint.encode())

    def admit(self, number: int, step: int, place: tuple[str, int]) -> None:
        """Notes that a group is about to be played, once more if it was cut short before.

        step: optimizer steps that had been taken when it was admitted first.
        """
        self._admitted.append({"group": number, "step": step, "family": place[0], "index": place[1]})
        self.admitted[number], self.places[number] = step, place

    def drop(self, number: int, step: int) -> None:
        """Notes that a group will never be trained, and deletes it."""
        self._admitted.append({"group": number, "dropped": step})
        self.dropped.add(number)
        self._file(number).unlink(missing_ok=True)
        self.samples.forget(number)

    def store(self, group: PlayedGroup) -> None:
        """Writes a group, atomically."""
        with open_atomically(self._file(group.number)) as file:
            file.writelines(encode_group(group))
        self.samples.forget(group.number)

    def has(self, number: int) -> bool:
        """Whether a group is stored."""
        return self._file(number).exists()

    def load(self, number: int) -> PlayedGroup:
        """Returns a stored group. Raises a UserError if its file is damaged."""
        file = self._file(number)
        try:
            return PlayedGroup.read(file)
        except UserError as error:
            raise UserError(f"{error}; delete it, and the group will be played again") from error

    def begin_step(self, record: BatchRecord) -> None:
        """Notes a step before it is taken. A step that is taken again must be the same.

        Raises RuntimeError if batches.jsonl has another batch for this step; always a bug.
        """
        if record.step <= len(self.batches):
            recorded = self.batches[record.step - 1]
            known = _without_unrecorded(record.families, recorded.families)
            if dataclasses.replace(record, families=known) != recorded:
                raise RuntimeError(f"step {record.step} was {recorded} and is now {record}")
            return
        self._batches.append(dataclasses.asdict(record))
        self.batches.append(record)

    def recover(self, step: int) -> list[int]:
        """Continues after step `step`, from its checkpoint; returns the admitted groups that are still to be trained.

        Lines of later steps stay as far as all of their groups are stored.
        """
        complete = step
        for record in self.batches[step:]:
            if not all(self.has(number) for number in record.groups):
                break
            complete = record.step
        if complete < len(self.batches):
            self._batches.rewrite(read_journal(self._batches.path)[:complete])
            self.batches = self.batches[:complete]
            self.samples.keep([])  # weights that no step leads to any more may have sampled them
        trained = {number for record in self.batches[:step] for number in record.groups}
        remaining = self.admitted.keys() - trained - self.dropped
        self.samples.keep(remaining)
        return sorted(remaining)

    def forget(self, numbers: Iterable[int]) -> None:
        """Deletes groups that all checkpoints have learned from."""
        for number in numbers:
            self._file(number).unlink(missing_ok=True)

    def close(self) -> None:
        self._admitted.close()
        self._batches.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _file(self, number: int) -> Path:
        return group_file(self._folder, number)


def _without_unrecorded(families: FamilyResults, recorded: FamilyResults) -> FamilyResults:
    """Returns `families` without the fields that an earlier version did not record."""
    return {
        family: {name: value for name, value in fields.items() if name in recorded.get(family, fields)}
        for family, fields in families.items()
    }


def group_file(folder: Path, number: int) -> Path:
    """Returns the path of a group in the folder of a run."""
    return folder / "rl" / "groups" / f"{number:08d}.frames"


def refuse_older_groups(folder: Path) -> None:
    """Raises a UserError if the folder of a run has groups of an earlier version, which were compressed JSON."""
    if older := next((folder / "rl" / "groups").glob("*.json.zst"), None):
        raise UserError(
            f"{older} is a group of an earlier version of composer_jax, which this one does not read; finish the run "
            f"with that version, or delete {older.parent}/*.json.zst, and the run plays again what it has not learned."
        )


def tokenizer_file(folder: Path) -> Path:
    """Returns the path of the fingerprint of the tokenizer in the folder of a run."""
    return folder / "rl" / "tokenizer.txt"
