"""Scoring from files to a file: what `launch.score` does."""

import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from composer_jax.atomic_write import write_atomically
from composer_jax.checkpoint.checkpoint import Checkpoint, open_checkpoint
from composer_jax.checkpoint.dtypes import require_float_dtype
from composer_jax.data.codebase import CodebaseTokens, encode_codebase, read_codebase
from composer_jax.data.prepare.layout import printable_path
from composer_jax.errors import UserError
from composer_jax.evals.score import check_tokens, counted_predictions, nll_by_context, score, windows
from composer_jax.models.config import ModelConfig
from composer_jax.observe.plots import plot_nll_by_context
from composer_jax.parallel.mesh import make_mesh
from composer_jax.parallel.platform import use_compilation_cache
from composer_jax.parallel.processes import is_first_process
from composer_jax.storage.bucket import is_url
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

    Raises UserError for no tokenizer, a text that cannot be read or is too short, or extensions of a file.

    Args:
      text: a path or URL.
      extensions: as of `read_codebase`.
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


def score_files(
    address: str,
    out: str,
    *,
    tokens: str | None,
    text: str | None,
    logits: bool,
    dtype: str,
    rows: int,
    window: int,
    axes: Mapping[str, int],
    stride: int | None = None,
    extensions: Sequence[str] = (),
) -> dict[str, Any]:
    """Scores a .npy file of tokens, a text file, or a folder; prints one JSON line and returns its content.

    Every process reads the input files, which can be URLs; process 0 writes an .npz file, and of a folder a picture.

    Args:
      window, stride: as of `windows`; the window is at most the context of the network.
      axes: sizes of mesh axes; `replica` takes the devices that they leave.
      extensions: as of `read_codebase`.

    Raises:
      UserError: neither or both of tokens and text; files or weights that cannot be read; as `score`.
    """
    use_compilation_cache()
    if (tokens is None) == (text is None):
        raise UserError("give either --tokens=FILE.npy or --text=FILE.")
    if tokens is not None and (stride is not None or extensions):
        raise UserError("--stride and --extensions are about a --text; leave them out, or give --text.")
    if is_url(out):
        raise UserError(f"--out={out} is a URL, and scores are written to a file of this machine; name one.")
    require_float_dtype(dtype)
    checkpoint = open_checkpoint(address)
    network = checkpoint.config
    encoded = None
    if tokens is not None:
        ids = _load(tokens)
    else:
        assert text is not None
        encoded = encode_text(checkpoint, text, extensions)
        _check_output(encoded, out, logits)
        window, stride = _window(encoded, network, window, stride)
        ids = windows(encoded.ids, window, stride)
    check_tokens(ids, network)
    mesh = make_mesh(None, replica=-1, **axes)
    definition, params, bias = checkpoint.load(mesh, dtype, mtp=False)
    scores = score(definition, params, bias, ids, mesh=mesh, rows=rows, logits=logits)

    arrays, summary = _measure(encoded, ids, scores.logprobs, stride)
    if is_first_process():
        _write(out, arrays if scores.logits is None else arrays | {"logits": scores.logits})
        if "files" in summary:
            plot_nll_by_context(summary["nll_by_context"], _picture(out))
        print(json.dumps(summary))
    return summary


def _measure(
    encoded: EncodedText | None, rows: np.ndarray, logprobs: np.ndarray, stride: int | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the arrays to write and the numbers to print. Without a text, rows are documents of their own."""
    if encoded is None:
        return {"logprobs": logprobs}, _mean_loss(logprobs, int((rows[:, 1:] >= 0).sum()))
    assert stride is not None
    counted = counted_predictions(rows, stride)
    by_token = logprobs[counted]
    summary = _mean_loss(by_token, len(by_token))
    total = -float(by_token.sum(dtype=np.float64))
    summary |= {
        "bits_per_byte": total / math.log(2) / encoded.scored_bytes,
        "window": rows.shape[1],
        "stride": stride,
        "nll_by_context": nll_by_context(logprobs, rows),
    }
    if encoded.codebase is None:
        return {"logprobs": np.where(counted, logprobs, 0)}, summary
    summary |= {"summed_nll": total, "files": len(encoded.codebase.paths), "left_out": encoded.left_out}
    return {"logprobs": by_token, "tokens": encoded.ids} | encoded.file_measures(by_token), summary


def _mean_loss(logprobs: np.ndarray, count: int) -> dict[str, Any]:
    return {"tokens": count, "nll": -float(logprobs.sum(dtype=np.float64)) / max(count, 1)}


def _window(encoded: EncodedText, network: ModelConfig, window: int, stride: int | None) -> tuple[int, int]:
    """Returns the tokens of a row, and those by which rows are apart."""
    window = min(window, network.max_context)
    if stride is not None and stride >= window:
        raise UserError(
            f"--stride={stride} is not below the {window} tokens of a window, so that tokens would be left out or have "
            f"no context; use at most {window - 1}."
        )
    window = min(window, len(encoded.ids))
    return window, window - 1 if stride is None else min(stride, window - 1)


def _check_output(encoded: EncodedText, out: str, logits: bool) -> None:
    if encoded.codebase is None:
        return
    if logits:
        raise UserError("--logits are those of --tokens or of one file; leave it out, or name a file as --text.")
    if _picture(out) == Path(out):
        raise UserError(f"--out={out} is where the picture would be written; end it with .npz.")


def _picture(out: str) -> Path:
    return Path(out).with_suffix(".png")


def _write(out: str, arrays: Mapping[str, Any]) -> None:
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    write_atomically(Path(out), buffer.getvalue())


def _load(tokens: str) -> np.ndarray:
    try:
        array = np.load(local_copy(tokens), allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"cannot read the tokens {tokens}: {error}; an array saved by numpy.save is needed.") from error
    if not isinstance(array, np.ndarray):
        raise UserError(f"{tokens} holds several arrays; one array saved by numpy.save is needed.")
    return array
