"""Scoring from files to a file: what `launch.score` does."""

import io
import json
import math
from pathlib import Path

import jax
import numpy as np
import tokenizers

from composer_jax.checkpoint.address import find_weights, load_weights, tokenizer_folder
from composer_jax.checkpoint.huggingface.files import Folder
from composer_jax.errors import UserError
from composer_jax.evals.score import score, windows
from composer_jax.observe.atomic import write_atomically
from composer_jax.parallel.mesh import make_mesh
from composer_jax.parallel.platform import use_compilation_cache


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
    data: int,
    expert: int,
) -> dict[str, float]:
    """Scores a .npy file of tokens or a text file; writes an .npz file, prints one JSON line and returns its content.

    Raises:
      UserError: neither or both of tokens and text; files or weights that cannot be read; as `score`.
    """
    use_compilation_cache()
    if (tokens is None) == (text is None):
        raise UserError("give either --tokens=FILE.npy or --text=FILE.")
    address = find_weights(checkpoint)
    written = None if text is None else _read(text)
    ids = _load(tokens) if text is None else np.array(_encode(address, written), np.int64)
    devices = jax.devices()
    if len(devices) % (data * expert):
        raise UserError(f"{len(devices)} devices do not divide over data={data} x expert={expert}.")
    mesh = make_mesh(devices, replica=len(devices) // (data * expert), data=data, expert=expert)
    definition, params, bias = load_weights(address, mesh, dtype)
    if text is not None:
        if len(ids) < 2:
            raise UserError(f"{text} has {len(ids)} tokens; at least two are needed to score one.")
        ids = windows(ids, min(window, definition.config.max_context, len(ids)))
    scores = score(definition, params, bias, ids, mesh=mesh, rows=rows, logits=logits)

    arrays = {"logprobs": scores.logprobs} | ({"logits": scores.logits} if logits else {})
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    write_atomically(Path(out), buffer.getvalue())
    count = int((ids[:, 1:] >= 0).sum())
    total = -float(scores.logprobs.sum(dtype=np.float64))
    found = {"tokens": count, "nll": total / count}
    if written is not None:
        found["bits_per_byte"] = total / math.log(2) / len(written.encode())
    print(json.dumps(found))
    return found


def _read(text: str) -> str:
    try:
        return Path(text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the text {text}: {error}") from error


def _load(tokens: str) -> np.ndarray:
    try:
        return np.load(tokens, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"cannot read the tokens {tokens}: {error}; an array saved by numpy.save is needed.") from error


def _encode(address, text: str) -> list[int]:
    folder = tokenizer_folder(address)
    if folder is None:
        raise UserError(f"{address} has no tokenizer.json; give --tokens instead of --text.")
    found = Folder(folder)
    tokenizer = tokenizers.Tokenizer.from_buffer(found.fs.cat_file(found.path("tokenizer.json")))
    tokenizer.encode_special_tokens = True  # the characters of a control token in a text are characters
    return tokenizer.encode(text, add_special_tokens=False).ids
