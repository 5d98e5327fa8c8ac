"""Signatures estimate similarity, and of similar documents the first stays."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_jax.data.prepare.duplicates import (
    EXACT,
    FEWEST_SHINGLES,
    NEAR,
    SHINGLE_WORDS,
    UNIQUE,
    find_duplicates,
    make_signatures,
    shingle_hashes,
)

WORD = st.text("abcdefgé_019", min_size=1, max_size=8)


@given(st.lists(WORD, max_size=30), st.lists(WORD, max_size=5), st.sampled_from([" ", "\n\t", " += (", ";"]))
def test_shingles_are_those_of_the_words_wherever_they_are(words, before, separator):
    hashes = shingle_hashes(separator.join(words).encode())
    assert len(hashes) == max(0, len(words) - SHINGLE_WORDS + 1)
    expected = [tuple(words[i : i + SHINGLE_WORDS]) for i in range(len(hashes))]
    assert len(set(hashes.tolist())) == len(set(expected))
    moved = shingle_hashes(" ".join([*before, *words]).encode())
    assert set(hashes.tolist()) <= set(moved.tolist())


def words_of(seed: int, count: int = 400) -> list[str]:
    rng = random.Random(seed)
    return [f"w{rng.randrange(10**6)}" for _ in range(count)]


def jaccard(a: bytes, b: bytes) -> float:
    first, second = set(shingle_hashes(a).tolist()), set(shingle_hashes(b).tolist())
    return len(first & second) / len(first | second)


@pytest.mark.parametrize("changed", [0, 2, 10, 40, 400])
def test_signatures_agree_as_the_shingles_do(changed):
    errors = []
    for seed in range(20):
        words = words_of(seed)
        other = list(words)
        for place in random.Random(seed).sample(range(len(words)), changed):
            other[place] = f"other{place}"
        texts = [" ".join(words).encode(), " ".join(other).encode()]
        signed = make_signatures(texts)
        errors.append((signed[0] == signed[1]).mean() - jaccard(*texts))
    assert abs(np.mean(errors)) < 0.03 and np.max(np.abs(errors)) < 0.2


def test_short_texts_have_no_signature():
    long = " ".join(words_of(0, FEWEST_SHINGLES + SHINGLE_WORDS - 1)).encode()
    short = " ".join(words_of(0, FEWEST_SHINGLES + SHINGLE_WORDS - 2)).encode()
    assert make_signatures([short, b"", long]).any(axis=1).tolist() == [False, False, True]
    assert make_signatures([]).shape == (0, 128)


def verdicts(texts: list[str], heldout: list[bool] | None = None, threshold: float = 0.8) -> list[int]:
    data = [text.encode() for text in texts]
    digests = np.asarray([hash(text) & 0xFFFF_FFFF for text in data], np.uint64)
    return find_duplicates(
        digests, make_signatures(data), np.asarray(heldout or [False] * len(data), bool), threshold
    ).tolist()


def variant(words: list[str], place: int) -> str:
    return " ".join([*words[:place], "changed", *words[place + 1 :]])


def test_the_first_of_equal_and_similar_documents_stays():
    a, b = words_of(1), words_of(2)
    texts = [" ".join(a), " ".join(b), " ".join(a), variant(a, 100), variant(b, 5), "short", "short", "other"]
    assert verdicts(texts) == [UNIQUE, UNIQUE, EXACT, NEAR, NEAR, UNIQUE, EXACT, UNIQUE]
    assert verdicts(texts, threshold=0) == [UNIQUE, UNIQUE, EXACT, UNIQUE, UNIQUE, UNIQUE, EXACT, UNIQUE]


def test_held_out_documents_come_first():
    a = words_of(1)
    texts = [" ".join(a), variant(a, 100), " ".join(words_of(2)), " ".join(words_of(2))]
    assert verdicts(texts, [False, True, False, True]) == [NEAR, UNIQUE, EXACT, UNIQUE]


def test_a_document_is_compared_with_those_that_stay():
    """B is near A and C is near B, but C is not near A: B leaves, so C stays."""
    words = words_of(3)
    chain = [variant(words, 200).split()]
    for step in (1, 2):
        chain.append([*chain[0][: -20 * step], *words_of(10 + step, 20 * step)])
    a, b, c = (" ".join(text) for text in chain)
    signed = make_signatures([a.encode(), b.encode(), c.encode()])
    near = [(signed[i] == signed[j]).mean() for i, j in ((0, 1), (1, 2), (0, 2))]
    threshold = (near[2] + min(near[:2])) / 2
    assert near[2] < threshold < min(near[:2])
    assert verdicts([a, b, c], threshold=threshold) == [UNIQUE, NEAR, UNIQUE]


def test_nothing_and_many_copies():
    assert verdicts([]) == []
    words = words_of(4)
    many = [variant(words, place) for place in range(60)]
    assert verdicts(many) == [UNIQUE] + [NEAR] * 59
