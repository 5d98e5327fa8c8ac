"""What the preparation of pretraining data can be told."""

from dataclasses import dataclass
from typing import Literal

from composer_jax.data.prepare.languages import LANGUAGES
from composer_jax.errors import UserError


@dataclass(frozen=True)
class PrepareConfig:
    """The result is a function of these fields, the tokenizer and the sources. The defaults are ours (not published).

    Raises UserError for a value out of range; the message names the field.
    """

    languages: tuple[str, ...] = ()
    """Languages that are read, by the names in data/prepare/languages.py; empty reads all of them."""
    max_file_bytes: int = 1_000_000
    """Larger files, which are rarely written by people, are left out."""
    heldout_fraction: float = 0.01
    """Fraction of the files that are written to the held-out shards; a hash of each file's path decides."""
    near_duplicates: float = 0.8
    """Estimated Jaccard similarity of the five-word shingles of two documents from which the later one is left out; 0
    keeps near duplicates."""
    documents: Literal["repository", "file"] = "repository"
    """repository: the files of a repository follow each other in the order of their imports, each under a line with its
    path; file: every file is a document of its own."""
    repository_bytes: int = 400_000
    """Bytes after which a document of a repository ends and the next one begins."""
    commits: int = 0
    """Newest commits of each git repository that become documents (message and diff), merges excluded."""
    commit_bytes: int = 100_000
    """Commits with more bytes of message and diff are left out."""
    fim_share: float = 0.0
    """Share of the training documents whose (last) file is written as prefix, suffix and middle."""
    text_field: str = "text"
    """Key of the text in rows of JSON lines and Parquet."""
    path_field: str = ""
    """Key of the file's path in rows, which gives the language; empty takes rows as plain text."""
    unit_bytes: int = 8_000_000
    """Bytes of source that a worker reads at once; a repository with more is put in order part by part."""
    seed: int = 0
    """Seed of where a file is cut for filling in the middle."""

    def __post_init__(self) -> None:
        known = [language.name for language in LANGUAGES]
        if unknown := [name for name in self.languages if name not in known]:
            raise UserError(f"languages={unknown[0]} is unknown; use some of {', '.join(known)}")
        for name in ("max_file_bytes", "repository_bytes", "commit_bytes", "unit_bytes"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)}; it must be at least 1 byte")
        for name in ("near_duplicates", "fim_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"{name}={getattr(self, name)} is not a fraction; use a number from 0 to 1")
        if not 0 <= self.heldout_fraction < 1:
            raise UserError(f"heldout_fraction={self.heldout_fraction} is not a fraction of the files; use 0 <= f < 1")
        if self.commits < 0:
            raise UserError(f"commits={self.commits}; use 0 or more")
        if not self.text_field:
            raise UserError("text_field is empty; name the key of the text in a row")
