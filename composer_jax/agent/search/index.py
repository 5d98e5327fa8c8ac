"""BM25 over chunks of code.

An index is immutable. A repository has one index, and the changed files of an episode have a small one of their own.
A search over both, without the files of the first that have changed, scores as one index of all files would.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from composer_jax.agent.search import words
from composer_jax.agent.search.chunks import MAX_BYTES, CodeChunk, split_chunks

K1, B = 1.2, 0.75  # Robertson and Zaragoza, The Probabilistic Relevance Framework: BM25 and Beyond (2009), section 3.2


@dataclass(frozen=True)
class Hit:
    """A matching chunk and its score; higher is better, comparable within one search only."""

    chunk: CodeChunk
    score: float


class SearchIndex:
    """Chunks and their words.

    numbers: path -> the numbers of the file's chunks. postings: word -> (numbers of the chunks with it, its count in
    each).
    """

    def __init__(self, chunks: Iterable[CodeChunk]):
        self.chunks = list(chunks)
        self.numbers: dict[str, list[int]] = defaultdict(list)
        postings: dict[str, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
        lengths = []
        for number, chunk in enumerate(self.chunks):
            self.numbers[chunk.path].append(number)
            counted = words.count_words(f"{chunk.path} {chunk.name}\n{chunk.text}")
            lengths.append(counted.total())
            for word, count in counted.items():
                numbers, counts = postings[word]
                numbers.append(number)
                counts.append(count)
        self.lengths = np.array(lengths, np.float64)
        self.postings = {
            word: (np.array(numbers, np.int32), np.array(counts, np.int32))
            for word, (numbers, counts) in postings.items()
        }

    @classmethod
    def of(cls, sizes: Mapping[str, int], read: Callable[[str], bytes]) -> "SearchIndex":
        """The index of files by their sizes in bytes; files over MAX_BYTES are not read."""
        paths = sorted(path for path, size in sizes.items() if size <= MAX_BYTES)
        return cls(chunk for path in paths for chunk in split_chunks(path, read(path)))


_NOWHERE = (np.zeros(0, np.int32), np.zeros(0, np.int32))


def search(
    query: str,
    base: SearchIndex,
    hidden: Collection[str],
    changed: SearchIndex,
    *,
    under: str = "",
    limit: int = 10,
) -> list[Hit]:
    """The best chunks of `base`, without the files in `hidden`, and of `changed`.

    under: restricts the search to this file, or to files below this folder.
    """
    alive = np.ones(len(base.chunks), bool)
    for path in hidden:
        alive[base.numbers.get(path, [])] = False
    masks = (alive, np.ones(len(changed.chunks), bool))
    pool = base.chunks + changed.chunks
    allowed = np.concatenate(masks)
    if under:
        allowed &= np.array([c.path == under or c.path.startswith(f"{under}/") for c in pool], bool)

    scores = np.where(allowed, np.concatenate(_bm25(words.split_words(query), (base, changed), masks)), 0.0)
    return [Hit(pool[number], float(scores[number])) for number in _ranked(scores, pool)[:limit]]


def _bm25(query: list[str], parts: Sequence[SearchIndex], masks: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The scores of the chunks of each part, with the statistics of all unmasked chunks together."""
    scores = [np.zeros(len(part.chunks)) for part in parts]
    total = sum(int(mask.sum()) for mask in masks)
    if not total:
        return scores
    mean = sum(float(part.lengths[mask].sum()) for part, mask in zip(parts, masks, strict=True)) / total
    for word, repeats in Counter(query).items():
        postings = [part.postings.get(word, _NOWHERE) for part in parts]
        having = sum(int(mask[numbers].sum()) for mask, (numbers, _) in zip(masks, postings, strict=True))
        rarity = np.log(1 + (total - having + 0.5) / (having + 0.5))
        for part, score, (numbers, counts) in zip(parts, scores, postings, strict=True):
            norm = K1 * (1 - B + B * part.lengths[numbers] / max(mean, 1.0))
            score[numbers] += repeats * rarity * counts * (K1 + 1) / (counts + norm)
    return scores


def _ranked(scores: np.ndarray, pool: Sequence[CodeChunk]) -> list[int]:
    """Numbers of the chunks with a score above zero, best first; ties by path and line."""
    positive = np.flatnonzero(scores > 0)
    return sorted(
        positive.tolist(), key=lambda number: (-round(scores[number], 9), pool[number].path, pool[number].start)
    )
