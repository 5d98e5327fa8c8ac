"""A text to be scored, as token ids: a file, or a folder of source files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tokenizers

from composer_jax.checkpoint.checkpoint import Checkpoint
from composer_jax.data.codebase import CodebaseTokens, encode_codebase, read_codebase
from composer_jax.data.prepare.layout import printable_path
from composer_jax.errors import UserError
from composer_jax.storage.local_copy import local_copy


@dataclass(frozen=True)
class EncodedText:
    """The tokens of a text. The first has no context to be scored in, so `scored_bytes` are those of the others."""

    ids: np.ndarray
    """int[N], N at least 2."""
    scored_bytes: int
    codebase: CodebaseTokens | None = None
    """The files; None for a text of one file."""
    left_out: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Reason -> paths of the files that are left out."""

    def file_measures(self, logprobs: np.ndarray) -> dict[str, Any]:
        """Returns arrays over the files: their paths, bytes, scored tokens and mean loss (nats per token).

        Args:
          logprobs: [N-1] of ids[1:]. The id at the end of the codebase belongs to no file.
        """
        assert self.codebase is not None, "a text of one file has no measures by file"
        starts = np.maximum(self.codebase.starts - 1, 0)  # the first token of all is not scored
        tokens = np.diff(starts)
        totals = np.diff(np.concatenate([[0.0], np.cumsum(logprobs, dtype=np.float64)])[starts])
        return {
            "paths": np.array(self.codebase.paths),
            "file_bytes": self.codebase.num_bytes,
            "file_tokens": tokens,
            "file_nll": -totals / tokens,
        }


def encode_text(checkpoint: Checkpoint, text: str, extensions: Sequence[str]) -> EncodedText:
    """Encodes a file, or a folder of source files, with the tokenizer of a checkpoint.

    Args:
      text: a path or URL.
      extensions: as of `read_codebase`.

    Raises:
      UserError: no tokenizer, a text that cannot be read or is too short, or extensions of a file.
    """
    copy = local_copy(text)
    if not copy.is_dir():
        if extensions:
            raise UserError(f"--extensions={','.join(extensions)} chooses files of a folder, and {text} is none.")
        return _encode_file(checkpoint, text)
    tok = checkpoint.text.tokenizer
    codebase = read_codebase(copy, extensions)
    tokens = encode_codebase(codebase, tok)
    first = len(tok.decode(tokens.ids[:1].tolist()).encode())
    left_out = {reason: [*map(printable_path, paths)] for reason, paths in sorted(codebase.left_out.items())}
    return EncodedText(tokens.ids, int(tokens.num_bytes.sum()) - first, tokens, left_out)


def _encode_file(checkpoint: Checkpoint, text: str) -> EncodedText:
    tokenizer_json = checkpoint.text.files.text("tokenizer.json")
    if tokenizer_json is None:
        raise UserError(f"{checkpoint.address} has no tokenizer.json; give --tokens instead of --text.")
    try:
        tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
    except Exception as error:  # the library raises plain Exception
        raise UserError(f"the tokenizer.json of {checkpoint.address} cannot be read: {error}") from error
    tokenizer.encode_special_tokens = True  # the characters of a control token in a text are characters
    try:
        content = local_copy(text).read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the text {text}: {error}") from error
    encoded = tokenizer.encode(content, add_special_tokens=False)
    if len(encoded.ids) < 2:
        raise UserError(f"{text} has {len(encoded.ids)} tokens; at least two are needed to score one.")
    return EncodedText(np.array(encoded.ids), len(content[encoded.offsets[0][1] :].encode()))
