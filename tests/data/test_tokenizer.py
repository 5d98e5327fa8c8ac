"""The tokenizer: exact round trips, words that look the same everywhere, control tokens out of reach."""

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from composer_jax.data.tokenizer import SMALLEST_VOCABULARY, SPECIAL, Tokenizer
from composer_jax.errors import UserError

TEXT = '''
def read_file(path, limit=10):
    """Reads at most limit lines of the file."""
    lines = []
    for number, line in enumerate(open(path)):
        if number == limit:
            break
        lines.append(line)
    return {"path": path, "lines": lines, "text": "\\n".join(lines)}
'''
SNIPPETS = st.sampled_from([*SPECIAL, "<|", "|>", "def ", "\n\n  ", "\\n", '{"path":"', "é", "日本", "\u2028", "😀"])
TEXTS = st.lists(st.one_of(st.text(), SNIPPETS), max_size=8).map("".join)


@pytest.fixture(scope="module")
def tok() -> Tokenizer:
    return Tokenizer.train([TEXT] * 4, vocab_size=400)


def test_control_tokens_are_the_first_ids(tok):
    ids = [tok.pad, tok.bos, tok.eod, tok.system, tok.user, tok.assistant, tok.tool, tok.call, tok.end]
    assert ids == list(range(9))
    assert [tok.decode([i]) for i in ids] == list(SPECIAL)
    assert [i for i in range(-1, 12) if tok.is_control(i)] == ids


@given(text=TEXTS)
def test_every_text_survives_and_reaches_no_control_token(tok, text):
    ids = tok.encode(text)
    assert tok.decode(ids) == text
    assert min(ids, default=len(SPECIAL)) >= len(SPECIAL)
    assert max(ids, default=0) < tok.vocab_size


@given(text=st.text())
def test_lone_surrogates_become_replacement_characters(tok, text):
    broken = "\ud800" + text + "x\udfff"
    assert tok.decode(tok.encode(broken)) == "\ufffd" + text + "x\ufffd"
    assert tok.decode(tok.encode("\ud83d\ude00")) == "😀"  # two halves that belong together


@given(ids=st.lists(st.integers(-5, 2000)))
def test_decode_is_total(tok, ids):
    assert isinstance(tok.decode(ids), str)


def test_half_a_character_is_joined_before_it_is_decoded(tok):
    ids = tok.encode("😀")
    assert len(ids) > 1
    assert "\ufffd" in tok.decode(ids[:-1])
    assert tok.decode(ids) == "😀"


@pytest.mark.parametrize("before", ["", " ", '"', "\n", "(", "_", "7", ".", '{"path":"', "a\\n", "    "])
def test_a_word_has_the_same_ids_everywhere(tok, before):
    start = len(tok.encode(before))
    for word in ["lines", "number", "umber", "unseenword", "x"]:
        alone = tok.encode(word)
        for after in ["", " ", '"', "\n", ")", "_", "7", ".py"]:
            assert tok.encode(before + word + after)[start : start + len(alone)] == alone


def test_digits_are_single_tokens(tok):
    assert [tok.decode([i]) for i in tok.encode("1047")] == ["1", "0", "4", "7"]


def test_a_batch_is_encode_for_each(tok):
    texts = [TEXT, "", "<|end|>", "a\ud800b"]
    assert tok.encode_batch(texts) == [tok.encode(text) for text in texts]


def test_training_is_deterministic_and_saved_whole(tok, tmp_path):
    again = Tokenizer.train([TEXT] * 4, vocab_size=400)
    assert again.fingerprint == tok.fingerprint != Tokenizer.train([TEXT] * 4, vocab_size=300).fingerprint
    path = tmp_path / "new" / "tokenizer.json"
    tok.save(path)
    loaded = Tokenizer.load(path)
    assert loaded.fingerprint == tok.fingerprint
    assert loaded.vocab_size == tok.vocab_size
    assert loaded.encode(TEXT + "<|end|>") == tok.encode(TEXT + "<|end|>")
    assert [p.name for p in path.parent.iterdir()] == ["tokenizer.json"]


def test_vocabulary_size_is_an_upper_bound():
    assert Tokenizer.train(["ab"], vocab_size=5000).vocab_size < 5000
    with pytest.raises(UserError, match=f"100 cannot hold .* {SMALLEST_VOCABULARY}"):
        Tokenizer.train([TEXT], vocab_size=100)


def test_load_refuses_what_is_not_a_tokenizer(tmp_path):
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(tmp_path / "other.json"))
    words = {
        "missing": "cannot read",
        "broken": "is not a tokenizer",
        "binary": "cannot read",
        "other": "control tokens",
    }
    for name, word in words.items():
        with pytest.raises(UserError, match=word):
            Tokenizer.load(tmp_path / f"{name}.json")
