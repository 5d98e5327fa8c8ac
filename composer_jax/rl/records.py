"""RolloutRecords: what an RL run has left in its ledger (rl/ledger.py), for reading."""

from pathlib import Path

from composer_jax.errors import UserError
from composer_jax.observe.journal import read_journal
from composer_jax.rl.ledger import BatchRecord, group_file, refuse_older_groups, tokenizer_file
from composer_jax.rl.played_group import PlayedGroup


class RolloutRecords:
    """The groups and steps of an RL run.

    Attributes:
      folder: of the run.
      batches: the BatchRecord of every step, the first step first.
      places: number -> (family, index of its task); of all groups.
      numbers: of the groups that are stored, ascending.
    """

    def __init__(self, folder: Path, tokenizer: str):
        """tokenizer: fingerprint of the tokenizer that reads the records.

        Raises UserError if the folder holds no records, or records of another tokenizer or an earlier version.
        """
        self.folder = folder
        file = tokenizer_file(folder)
        if not file.exists():
            raise UserError(f"{folder} holds no records of RL ({file} is missing); name the folder of an RL run.")
        if (theirs := file.read_text(encoding="utf-8")) != tokenizer:
            raise UserError(
                f"The records in {folder} have the ids of another tokenizer ({theirs}) than this run ({tokenizer}); "
                "use a run with the same tokenizer, such as one with --config.base=RUN/checkpoints/sft."
            )
        refuse_older_groups(folder)
        self.batches = [BatchRecord.from_json(row) for row in read_journal(folder / "batches.jsonl")]
        rows = [row for row in read_journal(folder / "rl" / "admitted.jsonl") if "step" in row]
        self.places: dict[int, tuple[str, int]] = {row["group"]: (row["family"], row["index"]) for row in rows}
        self.numbers = [number for number in sorted(self.places) if self.has(number)]

    def has(self, number: int) -> bool:
        """Whether a group is stored."""
        return group_file(self.folder, number).exists()

    def load(self, number: int) -> PlayedGroup:
        """Returns a group. Raises UserError if it is damaged, or the run has deleted it."""
        if not self.has(number):
            raise UserError(
                f"{self.folder} has deleted group {number}; only a run with --config.rl.keep_groups=True keeps all."
            )
        return PlayedGroup.read(group_file(self.folder, number))
