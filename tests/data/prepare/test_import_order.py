"""What a file imports comes before it."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_jax.data.prepare.layout import import_order, repository_documents

TREES = {
    "python": {
        "a/main.py": "from a.z import thing\nimport a.y as y\n",
        "a/y.py": "from . import z\n",
        "a/z.py": "import os\n",
    },
    "python, below src and relative to a parent": {
        "src/p/a/m.py": "from ..z import x\nfrom p.y import (\n    q,\n    r)\n",
        "src/p/y.py": "",
        "src/p/z.py": "",
    },
    "typescript": {
        "app.ts": 'import { x } from "./lib";\nconst y = require("./z/y");\n',
        "lib/index.ts": "export * from '../z/y'\n",
        "z/y.js": "",
    },
    "c": {"a.c": '#include <stdio.h>\n#include "inner/z.h"\n', "include/inner/z.h": '#include "q.h"\n', "x/q.h": ""},
    "java": {"A.java": "import static org.x.B.C;\nimport org.x.Z;\n", "src/main/java/org/x/Z.java": ""},
}
AFTER = {
    "python": ["a/z.py", "a/y.py", "a/main.py"],
    "python, below src and relative to a parent": ["src/p/y.py", "src/p/z.py", "src/p/a/m.py"],
    "typescript": ["z/y.js", "lib/index.ts", "app.ts"],
    "c": ["include/inner/z.h", "a.c", "x/q.h"],
    "java": ["src/main/java/org/x/Z.java", "A.java"],
}


@pytest.mark.parametrize("kind", TREES)
def test_imports_come_first(kind):
    assert import_order(TREES[kind]) == AFTER[kind]


def test_a_sibling_of_the_importer_is_preferred():
    files = {"one/a.py": "import b", "one/b.py": "", "two/b.py": ""}
    assert import_order(files) == ["one/b.py", "one/a.py", "two/b.py"]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=30), st.randoms(use_true_random=False))
def test_every_file_once_and_no_import_later_without_a_cycle(edges, rng):
    imports = {i: sorted({b for a, b in edges if a == i and b < a}) for i in range(10)}  # without cycles
    files = {f"p/m{i}.py": "".join(f"from p import m{b}\n" for b in imports[i]) for i in range(10)}
    order = import_order(files)
    assert sorted(order) == sorted(files)
    place = {path: n for n, path in enumerate(order)}
    assert all(place[f"p/m{b}.py"] < place[f"p/m{a}.py"] for a in imports for b in imports[a])
    shuffled = list(files.items())
    rng.shuffle(shuffled)
    assert import_order(dict(shuffled)) == order


def test_cycles_and_long_chains():
    cycle = {"p/a.py": "from p import b", "p/b.py": "from p import c", "p/c.py": "from p import a"}
    assert import_order(cycle) == ["p/c.py", "p/b.py", "p/a.py"]
    chain = {f"p/m{i:05d}.py": f"from p import m{i + 1:05d}" for i in range(1500)}
    assert import_order(chain) == sorted(chain, reverse=True)


def test_documents_of_a_repository_have_headers_and_a_size():
    rng = random.Random(0)
    files = {f"p/m{i}.py": f"x = {rng.randrange(10**9)}\n" * 20 for i in range(10)} | {
        "style.css": "a {}",
        "z.md": "# Z",
    }
    documents = list(repository_documents(files, 1200))
    texts = [document.context + document.last for document in documents]
    assert len(texts) > 2 and all(len(text.encode()) <= 1200 for text in texts)
    assert [document.name for document in documents][-1] == "z.md"
    joined = "".join(texts)
    assert "# p/m0.py\nx = " in joined and "/* style.css */\na {}\n<!-- z.md -->\n# Z\n" in joined
    assert all(text in joined for text in files.values())
    assert len(list(repository_documents(files, 10))) == len(files)


@pytest.mark.parametrize(
    ("path", "header"),
    [
        ("new\nline.py", "# new\\nline.py\n"),
        ("a\r\x1b\u2028b.go", "// a\\r\\x1b\\u2028b.go\n"),
        ("a-->b.html", "<!-- a- - >b.html -->\n"),
        ("a*/b.css", "/* a* /b.css */\n"),
        ("a*)b.ml", "(* a* )b.ml *)\n"),
        ("caf\udce9.py", "# caf\ufffd.py\n"),
        ("\u00e9 b\\n.md", "<!-- \u00e9 b\\n.md -->\n"),
    ],
)
def test_a_path_stays_in_the_comment_line_before_its_file(path, header):
    (document,) = repository_documents({path: "text\n"}, 1000)
    assert document.context + document.last == header + "text\n"
