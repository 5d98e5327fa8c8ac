"""Scoring from files to a file: what `launch.score` does."""

import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from composer_jax.atomic_write import write_atomically
from composer_jax.checkpoint.checkpoint import open_checkpoint
from composer_jax.checkpoint.dtypes import require_float_dtype
from composer_jax.errors import UserError
from composer_jax.evals.encoded_text import EncodedText, encode_text
from composer_jax.evals.rolling_loss import counted_predictions, nll_by_context
from composer_jax.evals.score import check_tokens, score, windows
from composer_jax.models.config import ModelConfig
from composer_jax.observe.plots import plot_nll_by_context
from composer_jax.parallel.mesh import make_mesh
from composer_jax.parallel.platform import use_compilation_cache
from composer_jax.parallel.processes import is_first_process
from composer_jax.storage.bucket import is_url
from composer_jax.storage.local_copy import local_copy


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
