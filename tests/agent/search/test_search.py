"""Search: words and chunks of code, BM25 against its formula, changes against a new index."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_jax.agent.search.chunks import LONG, MAX_BYTES, STEP, WINDOW, split_chunks
from composer_jax.agent.search.index import K1, B, SearchIndex, search
from composer_jax.agent.search.words import split_words

EMPTY = SearchIndex(())


def index_of(files):
    sizes = {path: len(text) for path, text in files.items()}
    return SearchIndex.of(sizes, lambda path: files[path].encode())


def paths_of(query, files, **options):
    return [hit.chunk.path for hit in search(query, index_of(files), (), EMPTY, **options)]


def test_words_are_identifiers_and_their_parts():
    assert split_words("readHTTPHeader_v2(fileNames)") == (
        ["read", "http", "header", "v", "2", "readhttpheader_v2", "file", "name", "filenames"]
    )
    assert split_words("the status of a class") == ["status"]
    assert split_words("größe ΔX " + "x" * 100) == ["gr", "öß", "e", "größe", "δ", "x", "δx"]


def test_python_is_chunked_at_functions_and_classes():
    text = (
        '"""Doc."""\n\nimport os\n\n\nclass A:\n    x = 1\n\n    @property\n    def f(self):\n        return 1\n\n'
        "    async def g(self):\n        return 2\n\n\n@cache\ndef h():\n    def inner():\n        pass\n\n\nprint(1)\n"
    )
    spans = [(chunk.start, chunk.end, chunk.name) for chunk in split_chunks("a.py", text.encode())]
    assert spans == [(1, 5, ""), (6, 8, "A"), (9, 11, "A.f"), (13, 14, "A.g"), (17, 20, "h"), (21, 24, "")]


def test_other_text_is_chunked_in_overlapping_windows():
    lines = [f"line {number}" for number in range(1, 101)]
    spans = [(chunk.start, chunk.end) for chunk in split_chunks("a.txt", "\n".join(lines).encode())]
    assert spans[0] == (1, WINDOW) and spans[1] == (1 + STEP, WINDOW + STEP) and spans[-1][1] == 100
    long = "def f():\n" + "    x = 1\n" * LONG
    chunks = split_chunks("a.py", long.encode())
    assert [(c.start, c.end, c.name) for c in chunks] == [(1, 40, "f"), (31, LONG + 1, "f")]


@pytest.mark.parametrize(
    "data", [b"", b"\0binary", b"x" * (MAX_BYTES + 1), b"\n\n  \n"], ids=["empty", "binary", "large", "blank"]
)
def test_binary_empty_and_large_files_have_no_chunks(data):
    assert split_chunks("a.py", data) == []


@pytest.mark.filterwarnings("ignore:invalid escape")
@pytest.mark.parametrize("text", ["def f(:\n", "x = '\\d'\n", "(" * 300, "-" * 100_000, "a\r" * 50 + "def f(): pass\r"])
def test_python_that_cannot_be_parsed_is_chunked_in_windows(text):
    assert "".join(c.text for c in split_chunks("a.py", text.encode())).startswith(text[:5].rstrip("\n"))


@given(st.text(alphabet="ab \n\r:()def@'\"\t\f", max_size=200))
def test_every_line_with_something_on_it_is_in_a_chunk(text):
    covered = set()
    for chunk in split_chunks("a.py", text.encode()):
        assert chunk.start <= chunk.end
        covered |= set(range(chunk.start, chunk.end + 1))
    wanted = {number for number, line in enumerate(text.split("\n"), 1) if line.strip()}
    assert wanted <= covered


def test_scores_are_those_of_the_formula():
    files = {"a.txt": "rate rate money", "b.txt": "money money money sky", "c.txt": "sky"}
    index = index_of(files)
    hits = {hit.chunk.path: hit.score for hit in search("rate money", index, (), EMPTY)}
    bags = {path: split_words(f"{path} \n{text}") for path, text in files.items()}
    mean = sum(map(len, bags.values())) / 3

    def score(path):
        total = 0.0
        for word in ("rate", "money"):
            having = sum(word in bag for bag in bags.values())
            count, length = bags[path].count(word), len(bags[path])
            rarity = math.log(1 + (3 - having + 0.5) / (having + 0.5))
            total += rarity * count * (K1 + 1) / (count + K1 * (1 - B + B * length / mean))
        return total

    assert hits == pytest.approx({"a.txt": score("a.txt"), "b.txt": score("b.txt")})


FILES = {
    "money.py": "class RateTable:\n    def convert_amount(self, amount, currency):\n        return amount * rate\n",
    "web/http.py": "def parse_header(line):\n    name, _, value = line.partition(':')\n    return name, value\n",
    "web/server.py": "def serve(port):\n    while True:\n        handle(accept(port))\n",
    "README.md": "How to convert money between currencies.\n",
}


def test_the_right_function_comes_first():
    assert paths_of("where is an amount of money converted to a currency, convertAmount", FILES)[0] == "money.py"
    assert paths_of("parse http headers", FILES)[0] == "web/http.py"
    assert paths_of("port", FILES) == ["web/server.py"]
    assert paths_of("zebra", FILES) == paths_of("", FILES) == paths_of("the of a", FILES) == []
    assert paths_of("parse port", FILES, under="web/server.py") == ["web/server.py"]
    assert set(paths_of("parse port amount", FILES, under="web")) == {"web/http.py", "web/server.py"}
    assert len(paths_of("parse port amount", FILES, limit=1)) == 1


WORDS = st.lists(st.sampled_from(["rate", "money", "sky", "port", "def f():"]), max_size=8).map("\n".join)
TREES = st.dictionaries(st.sampled_from(["a.py", "b.txt", "c/d.py", "c/e.txt"]), WORDS)


@given(TREES, TREES, st.sets(st.sampled_from(["a.py", "b.txt", "c/d.py"])))
def test_a_search_with_changes_scores_as_a_new_index_of_all_files(files, changed, gone):
    hidden = set(changed) | gone
    now = {path: text for path, text in {**files, **changed}.items() if path in changed or path not in gone}

    def scores_of(hits):
        return [(hit.chunk, round(hit.score, 6)) for hit in hits]

    parts = search("rate sky", index_of(files), hidden, index_of(changed))
    assert scores_of(parts) == scores_of(search("rate sky", index_of(now), (), EMPTY))
