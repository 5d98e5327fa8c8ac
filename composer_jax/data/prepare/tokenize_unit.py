"""The last step of a unit: unique texts become documents (some to fill in the middle), token ids and shards."""

import functools
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from composer_jax.data.chat.load_chat_format import load_tokenizer
from composer_jax.data.model_tokenizer import FIM_TOKENS, ModelTokenizer
from composer_jax.data.prepare.candidates import DocumentCandidate, read_candidates
from composer_jax.data.prepare.config import PrepareConfig
from composer_jax.data.prepare.duplicates import DUPLICATE_REASONS, UNIQUE
from composer_jax.data.prepare.filter_unit import FilteredUnit, text_digest
from composer_jax.data.prepare.filters import filter_text
from composer_jax.data.prepare.layout import TextDocument, repository_documents
from composer_jax.data.prepare.plan import Part, WorkUnit
from composer_jax.data.prepare.shards import token_dtype, write_shard
from composer_jax.data.prepare.statistics import Tally
from composer_jax.data.text_tokenizer import TextTokenizer
from composer_jax.errors import UserError

SPLITS = ("train", "heldout")
_BATCH_CHARACTERS = 1_000_000  # that are encoded at once

cached_tokenizer = functools.cache(load_tokenizer)
"""`load_tokenizer`, once per process."""

FimIds = tuple[int, int, int]
"""The ids of the tokens before prefix, suffix and middle."""


def tokenize_unit(
    unit: WorkUnit, filtered: FilteredUnit, verdicts: np.ndarray, tokenizer: str, config: PrepareConfig, out: Path
) -> dict[str, Any]:
    """Writes the shards of a unit below `out`.

    Args:
      filtered: what `filter_unit` returned for it.
      verdicts: uint8[n], those of `find_duplicates` for its candidates.
      tokenizer: folder of the tokenizer.

    Returns:
      {"train" and "heldout": what `write_shard` returned, and "sources", the source of each document, or None without
      documents; "tally": tables of a Tally}, for JSON.

    Raises UserError when a source has changed since it was filtered, or the disk is full.
    """
    tok = cached_tokenizer(tokenizer)
    tally = Tally()
    documents: dict[str, list[tuple[Part, TextDocument]]] = {split: [] for split in SPLITS}
    for part, files in _kept_files(unit, filtered, verdicts, config, tally):
        for split in SPLITS:
            chosen = {path: text for (heldout, path), text in files.items() if heldout == (split == "heldout")}
            documents[split] += [(part, document) for document in _documents(part, chosen, config)]
    result: dict[str, Any] = {}
    for split in SPLITS:
        encoded = _encode(documents[split], split, tok, config, tally)
        path = out / f"{split}-{unit.number:05d}.array_record"
        sources = [part.source for part, _ in documents[split]]
        result[split] = write_shard(path, encoded) | {"sources": sources} if sources else None
    return result | {"tally": tally.tables}


def _kept_files(
    unit: WorkUnit, filtered: FilteredUnit, verdicts: np.ndarray, config: PrepareConfig, tally: Tally
) -> Iterator[tuple[Part, dict[tuple[bool, str], str]]]:
    """Yields each part with its kept files: (held out, path) -> text."""
    place = {int(ordinal): i for i, ordinal in enumerate(filtered.ordinals)}
    part: Part | None = None
    files: dict[tuple[bool, str], str] = {}
    for candidate in read_candidates(unit, config):
        index = place.get(candidate.ordinal)
        if index is None:
            continue
        if verdicts[index] != UNIQUE:
            tally.add("left out", str(DUPLICATE_REASONS[verdicts[index]]), candidate.num_bytes)
            continue
        if candidate.part is not part:
            if part is not None:
                yield part, files
            part, files = candidate.part, {}
        files[candidate.heldout, _unique_path(candidate, files)] = _read(candidate, int(filtered.digests[index]))
        tally.add("languages", candidate.language.name, candidate.num_bytes)
    if part is not None:
        yield part, files


def _unique_path(candidate: DocumentCandidate, files: dict[tuple[bool, str], str]) -> str:
    """The path; for a row whose path another row has, too, the path and its place."""
    taken = (candidate.heldout, candidate.path) in files
    return f"{candidate.path}#{candidate.ordinal}" if taken else candidate.path


def _read(candidate: DocumentCandidate, digest: int) -> str:
    """The candidate's text, which must be what was filtered."""
    where = Path(candidate.part.root, candidate.path)
    try:
        text, reason = filter_text(candidate.load(), candidate.language, candidate.path)
    except OSError as error:
        raise UserError(f"{where} can no longer be read ({error}); prepare the data in a new folder") from error
    if reason is not None or text_digest(text.encode()) != digest:
        raise UserError(f"{where} has changed since it was filtered; prepare the data in a new folder")
    return text


def _documents(part: Part, files: dict[str, str], config: PrepareConfig) -> Iterator[TextDocument]:
    if config.documents == "repository" and part.kind in ("folder", "git"):
        yield from repository_documents(files, config.repository_bytes)
    else:
        yield from (TextDocument(path, "", text) for path, text in files.items())


def _encode(
    documents: Sequence[tuple[Part, TextDocument]], split: str, tok: TextTokenizer, config: PrepareConfig, tally: Tally
) -> Iterator[np.ndarray]:
    """Yields the ids of each document, and counts them."""
    share = config.fim_share if split == "train" else 0.0
    fim_ids = find_fim_ids(tok, "of the config") if share > 0 else None
    dtype = token_dtype(tok.vocab_size)
    waiting: list[tuple[Part, list[str | int]]] = []
    characters = 0

    def flush() -> Iterator[np.ndarray]:
        texts = [segment for _, segments in waiting for segment in segments if isinstance(segment, str)]
        encoded = iter(tok.encode_batch(texts))
        for part, segments in waiting:
            pieces = [next(encoded) if isinstance(segment, str) else [segment] for segment in segments]
            ids = np.concatenate([np.asarray(piece, dtype) for piece in pieces])
            tally.add(split, part.source, len(ids))
            if len(segments) > 1:
                tally.add("fill in the middle", part.source, len(ids))
            yield ids
        waiting.clear()

    for part, document in documents:
        cut = cut_for_fim(document.last, f"{part.name}/{document.name}", config.seed, share)
        if cut is None or fim_ids is None:
            segments: list[str | int] = [document.context + document.last]
        else:
            segments = [document.context, *fim_segments(cut, fim_ids)]
        waiting.append((part, segments))
        characters += len(document.context) + len(document.last)
        if characters >= _BATCH_CHARACTERS:
            yield from flush()
            characters = 0
    yield from flush()


def find_fim_ids(tok: TextTokenizer, name: str) -> FimIds:
    """Returns the tokenizer's ids for filling in the middle. Raises UserError if it has none.

    name: where the tokenizer comes from, for the error.
    """
    control = tok.control if isinstance(tok, ModelTokenizer) else {}
    for tokens in FIM_TOKENS:
        if all(text in control for text in tokens):
            return control[tokens.prefix].id, control[tokens.suffix].id, control[tokens.middle].id
    raise UserError(
        f"the tokenizer {name} has no tokens for filling in the middle, such as {' '.join(FIM_TOKENS[0])}; use "
        "--fim_share=0, or a tokenizer that has them"
    )


def cut_for_fim(text: str, name: str, seed: int, share: float) -> tuple[str, str, str] | None:
    """Returns (prefix, middle, suffix) of a text to learn inserting (arXiv:2207.14255); None outside the chosen share.

    A hash of `seed` and `name` chooses, and cuts at two characters with equal probability for each.
    """
    digest = hashlib.sha256(f"{seed}\0{name}".encode("utf-8", errors="surrogateescape")).digest()
    chosen, *places = (int.from_bytes(digest[i : i + 8], "little") for i in (0, 8, 16))
    if chosen / 2**64 >= share:
        return None
    start, end = sorted(place % (len(text) + 1) for place in places)
    return text[:start], text[start:end], text[end:]


def fim_segments(cut: tuple[str, str, str], ids: FimIds) -> list[str | int]:
    """Returns texts and token ids in the order prefix, suffix, middle."""
    prefix, middle, suffix = cut
    return [ids[0], prefix, ids[1], suffix, ids[2], middle]
