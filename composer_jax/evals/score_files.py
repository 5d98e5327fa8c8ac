"""Scoring from files to a file: what `launch.score` does."""

import io
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from composer_jax.atomic_write import write_atomically
from composer_jax.checkpoint.address import (
    Address,
    find_weights,
    load_model_config,
    load_tokenizer_files,
    load_weights,
)
from composer_jax.checkpoint.bucket import is_url
from composer_jax.checkpoint.dtypes import require_float_dtype
from composer_jax.data.local_copy import local_copy
from composer_jax.errors import UserError
from composer_jax.evals.score import Scores, check_tokens, score, windows
from composer_jax.parallel.mesh import make_mesh
from composer_jax.parallel.platform import use_compilation_cache
from composer_jax.parallel.processes import is_first_process


def score_files(
    checkpoint: str,
    out: str,
    *,
    tokens: str | None,
    text: str | None,
    logits: bool,
    dtype: str,
    rows: int,
    window: int,
    axes: Mapping[str, int],
) -> dict[str, float]:
    """Scores a .npy file of tokens or a text file; writes an .npz file, prints one JSON line and returns its content.

    Every process reads the input files, which can be URLs; process 0 writes and prints.

    Args:
      axes: sizes of mesh axes; `replica` takes the devices that they leave.

    Raises:
      UserError: neither or both of tokens and text; files or weights that cannot be read; as `score`.
    """
    use_compilation_cache()
    if (tokens is None) == (text is None):
        raise UserError("give either --tokens=FILE.npy or --text=FILE.")
    if is_url(out):
        raise UserError(f"--out={out} is a URL, and scores are written to a file of this machine; name one.")
    require_float_dtype(dtype)
    address = find_weights(checkpoint)
    network = load_model_config(address)
    if tokens is not None:
        ids, scored_bytes = _load(tokens), None
    else:
        assert text is not None
        ids, scored_bytes = _encode(address, text)
        ids = windows(ids, min(window, network.max_context, len(ids)))
    check_tokens(ids, network)
    mesh = make_mesh(None, replica=-1, **axes)
    definition, params, bias = load_weights(address, mesh, dtype, mtp=False)
    scores = score(definition, params, bias, ids, mesh=mesh, rows=rows, logits=logits)

    count = int((ids[:, 1:] >= 0).sum())
    total = -float(scores.logprobs.sum(dtype=np.float64))
    summary = {"tokens": count, "nll": total / max(count, 1)}
    if scored_bytes is not None:
        summary["bits_per_byte"] = total / math.log(2) / scored_bytes
    if is_first_process():
        _write(out, scores)
        print(json.dumps(summary))
    return summary


def _write(out: str, scores: Scores) -> None:
    arrays: dict[str, Any] = {"logprobs": scores.logprobs}
    if scores.logits is not None:
        arrays["logits"] = scores.logits
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


def _encode(address: Address, text: str) -> tuple[np.ndarray, int]:
    """Returns the token ids of a file, and the bytes of all but the first, which has no context to be scored in."""
    files = load_tokenizer_files(address)
    if files is None or "tokenizer.json" not in files:
        raise UserError(f"{address} has no tokenizer.json; give --tokens instead of --text.")
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(files["tokenizer.json"])
    except Exception as error:  # the library raises plain Exception
        raise UserError(f"the tokenizer.json of {address} cannot be read: {error}") from error
    tokenizer.encode_special_tokens = True  # the characters of a control token in a text are characters
    try:
        content = local_copy(text).read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the text {text}: {error}") from error
    encoded = tokenizer.encode(content, add_special_tokens=False)
    if len(encoded.ids) < 2:
        raise UserError(f"{text} has {len(encoded.ids)} tokens; at least two are needed to score one.")
    return np.array(encoded.ids), len(content[encoded.offsets[0][1] :].encode())
