"""TextFiles: where the texts of a published model are read from, such as its tokenizer and its chat template."""

import json
from pathlib import Path
from typing import Any, Protocol

from fsspec.core import url_to_fs

from composer_jax.errors import UserError


class TextFiles(Protocol):
    """Named texts: the files of a folder, or what another container of a model (a GGUF file) holds in their place."""

    @property
    def name(self) -> str:
        """Where the texts come from, for error messages."""
        ...

    def text(self, file: str) -> str | None:
        """Returns the text of a file; None if there is no such file."""
        ...


class TextFolder:
    """The text files of a local folder, or of one at a URL that fsspec reads (gs://...)."""

    def __init__(self, path: Path | str) -> None:
        """Raises UserError for a URL that fsspec cannot read."""
        self.name = str(path)
        try:
            self._fs, self._root = url_to_fs(self.name)
        except (ValueError, ImportError) as error:
            raise UserError(f"{self.name} is neither a folder nor a readable URL: {error}") from error

    def text(self, file: str) -> str | None:
        """See TextFiles.text. Raises UserError for a file that cannot be read."""
        path = f"{self._root.rstrip('/')}/{file}"
        try:
            return self._fs.cat_file(path).decode("utf-8")
        except FileNotFoundError:
            return None
        except Exception as error:  # remote file systems raise exceptions of their own types
            raise UserError(f"{self.name}/{file} cannot be read ({error}); download it again") from error


def text_files(source: TextFiles | Path | str) -> TextFiles:
    """Returns `source`, or the folder of that path or URL."""
    return TextFolder(source) if isinstance(source, str | Path) else source


def read_json_object(files: TextFiles, file: str) -> dict[str, Any]:
    """Returns the JSON object in a file; {} if there is no such file. Raises UserError for anything else."""
    try:
        value = json.loads(files.text(file) or "{}")
    except json.JSONDecodeError as error:
        raise UserError(f"{files.name}/{file} is not JSON ({error}); download it again") from error
    if not isinstance(value, dict):
        raise UserError(f"{files.name}/{file} is not a JSON object; download it again")
    return value
