"""Patches are found in what models and harnesses wrap around them, and blank lines between their parts mean nothing."""

import json

import pytest

from composer_jax.agent.patches.apply import apply_hunks
from composer_jax.agent.patches.envelope import outdent_headers, parse_patch
from composer_jax.tasks.patches import PatchError

FILE = "alpha\nbeta\n\ngamma\ndelta\n"
EDITED = "alpha\nBETA\n\ngamma\nDELTA\n"
ENVELOPE = "*** Begin Patch\n*** Update File: f\n@@\n-beta\n+BETA\n@@\n-delta\n+DELTA\n*** End Patch"
UNIFIED = "--- a/f\n+++ b/f\n@@ -1,3 +1,3 @@\n alpha\n-beta\n+BETA\n \n@@ -5 +5 @@\n-delta\n+DELTA"


def applied(text, before=FILE):
    [patch] = parse_patch(text)
    assert patch.path == "f"
    return apply_hunks(before, patch.hunks)


def wrappings(patch):
    quoted = patch.replace("'", "'\\''")
    escaped = patch.replace("\\", "\\\\").replace('"', '\\"')
    return {
        "nothing": patch,
        "a mark": f"\ufeff{patch}\n",
        "a fence": f"```diff\n{patch}\n```",
        "a fence in a mail": f"Here's the patch:\n\n~~~\n{patch}\n~~~\n\nIt isn't tested.\n",
        "a here-document": f"<<'PATCH-1'\n{patch}\nPATCH-1",
        "a command": f"cd src && apply_patch <<EOF\n{patch}\nEOF\n",
        "a word": f"apply_patch '{quoted}'",
        "a word of double quotes": f'apply_patch "{escaped}\n"\n',
        "a shell": f"bash -lc \"apply_patch <<'EOF'\n{escaped}\nEOF\n\"",
        "an assignment": f'PATCH="{escaped}"',
        "an option": f"apply_patch --patch '{quoted}'",
        "a call of Python": f'apply_patch(patch="""{patch}\n""")',
        "a string of Python": f"'''{patch}\n'''",
        "a block of YAML": "patch: |\n" + "\n".join(f"  {line}" for line in patch.split("\n")),
        "a tag": f"<patch>\n{patch}\n</patch>",
        "a substitution": f"apply_patch \"$(cat <<'EOF'\n{patch}\nEOF\n)\"",
        "a key": json.dumps({"input": f"{patch}\n"}),
        "a call": json.dumps({"name": "apply_patch", "arguments": {"patch": patch, "workdir": "."}}),
        "a command of an array": json.dumps({"command": ["bash", "-lc", f"apply_patch <<'EOF'\n{patch}\nEOF\n"]}),
        "a string without quotes": json.dumps(patch)[1:-1],
        "a string": json.dumps(patch),
        "indentation": "\n".join(f"    {line}" for line in patch.split("\n")),
        "an indented here-document": "apply_patch <<EOF\n" + "\n".join(f"  {li}" for li in patch.split("\n")) + "\nEOF",
        "CR LF": patch.replace("\n", "\r\n") + "\r\n",
        "CR": patch.replace("\n", "\r") + "\r",
    }


@pytest.mark.parametrize("name", wrappings(""))
@pytest.mark.parametrize("patch", [ENVELOPE, UNIFIED], ids=["envelope", "unified"])
def test_a_patch_is_found_in_its_wrapping(patch, name):
    assert applied(wrappings(patch)[name]) == EDITED
    odd = patch.replace("BETA", """it's "\\$x" `y`""")
    assert applied(wrappings(odd)[name]) == EDITED.replace("BETA", """it's "\\$x" `y`""")


@pytest.mark.parametrize(
    ("before", "after"), [("<patch>", "</patch>"), ('"""', '"""'), ("patch: ", "```"), ("", " ***")]
)
def test_an_envelope_within_its_first_and_last_line(before, after):
    patch = ENVELOPE.replace("Begin Patch", f"Begin Patch{after if after == ' ***' else ''}")
    assert applied(f"{before}{patch}{after}\n") == EDITED


@pytest.mark.parametrize("quote", ["`", "'", '"'])
def test_quotes_around_a_path(quote):
    assert applied(ENVELOPE.replace("File: f", f"File: {quote}f{quote}")) == EDITED


def test_a_patch_in_an_envelope_or_two():
    assert applied(f"*** Begin Patch\n{UNIFIED}\n*** End Patch\n") == EDITED
    first, second = ENVELOPE.replace("@@\n-delta\n+DELTA\n", ""), ENVELOPE.replace("@@\n-beta\n+BETA\n", "")
    assert [patch.hunks[0].new for patch in parse_patch(f"{first}\n{second}")] == [("BETA\n",), ("DELTA\n",)]


def test_numbers_of_lines_in_an_envelope():
    twice = "*** Begin Patch\n*** Update File: f\n@@ -3,1 +3,1 @@ def g():\n-a\n+b\n*** End Patch"
    assert applied(twice, "a\n\na\n") == "a\n\nb\n"


@pytest.mark.parametrize("blank", ["", "\t", "  ", "\n\n"])
def test_blank_lines_between_parts_are_no_context(blank):
    for part in ("*** Update File", "@@", "-beta", "-delta", "*** End Patch"):
        assert applied(ENVELOPE.replace(part, f"{blank}\n{part}", 1)) == EDITED, part
    for part in ("@@ -1", "@@ -5") if not blank.strip("\n") else ():
        assert applied(UNIFIED.replace(part, f"{blank}\n{part}", 1)) == EDITED, part
    assert applied(UNIFIED.replace(" -1,3 +1,3 @@", "") + f"\n{blank}\n\n") == EDITED


def test_blank_lines_at_the_edge_of_a_hunk_are_context_where_the_file_has_them():
    twice = "a\nb\na\n\nb\n"
    assert applied("*** Begin Patch\n*** Update File: f\n@@\n-a\n+A\n\n*** End Patch", twice) == "a\nb\nA\n\nb\n"
    below = "*** Begin Patch\n*** Update File: f\n@@ def f():\n\n+    x\n*** End Patch"
    assert applied(below, "def f():\n\n    y\n") == "def f():\n\n    x\n    y\n"
    assert applied(below, "def f():\n    y\n\n    z\n") == "def f():\n    x\n    y\n\n    z\n"


def test_blank_lines_of_an_added_file():
    [patch] = parse_patch("*** Begin Patch\n*** Add File: f\n\n+a\n\n+b\n\n*** End Patch")
    assert apply_hunks("", patch.hunks) == "a\n\nb\n"


@pytest.mark.parametrize("blank", [" ", "\t", "   "])
def test_white_space_around_headers(blank):
    lines = ENVELOPE.replace("Update File:", f"Update  File :{blank}{blank}").split("\n")
    headers = [line for line in lines if line.startswith(("***", "@@"))]
    behind = "\n".join(line + blank if line in headers else line for line in lines)
    assert applied(behind) == EDITED
    before = "\n".join(blank + line if line in headers else line for line in lines)
    assert applied(outdent_headers(before)) == EDITED
    assert applied(ENVELOPE.replace("*** Begin Patch", f"***{blank}Begin{blank}Patch")) == EDITED
    headers = [line for line in UNIFIED.split("\n") if line.startswith(("---", "+++", "@@"))]
    before = "\n".join(blank + line if line in headers else line for line in UNIFIED.split("\n"))
    assert applied(outdent_headers(before)) == EDITED
    outer = "\n".join(blank + line if line in (lines[0], lines[-1]) else line for line in lines)
    assert applied(outer) == EDITED


def test_what_looks_like_a_wrapping_is_none():
    ends = "  --- a/f\n  +++ b/f\n  @@ -2 +2 @@\n  -beta\n  +BETA \r\n"
    assert applied(ends) == FILE.replace("beta\n", "BETA \r\n")
    assert applied(f" {ENVELOPE}\n") == EDITED, "only the first line is indented"
    quoted = UNIFIED.replace("BETA", '"BETA').replace("DELTA", 'DELTA"')
    for mail in ('Fix f("a") and sh -c "b"\n', "Call it with x='a'\n", "apply_patch 'x'\n"):
        assert applied(f"{mail}{quoted}") == EDITED.replace("BETA", '"BETA').replace("DELTA", 'DELTA"'), mail
    indented = "".join(f"  {line}\n" for line in UNIFIED.split("\n"))
    with pytest.raises(PatchError):
        parse_patch(f"{indented}--- a/g\n+++ b/g\n@@ -1 +1 @@\n-a\n+b\n")


def test_headers_that_are_lines_of_a_file():
    text = "*** Update File: f\n*** End Patch\n*** Begin Patch\n"
    lines = " *** Update File: f\n *** End Patch\n+x\n *** Begin Patch"
    patch = f"*** Begin Patch\n*** Update File: f\n@@\n{lines}\n*** End Patch"
    assert applied(patch, text) == "*** Update File: f\n*** End Patch\nx\n*** Begin Patch\n"
    later = "*** Begin Patch\n*** Update File: f\n@@\n-a\n *** End Patch\n*** Delete File: g\n*** End Patch"
    assert outdent_headers(later) == later, "the patch would end there"
    context = "*** Begin Patch\n*** Update File: f\n a\n @@ -1 +1 @@\n-b\n*** End Patch"
    assert outdent_headers(context) == context, "the context would end there"
    diff = "--- a/f\n+++ b/f\n@@ -1,3 +1,3 @@\n *** Update File: f\n-*** End Patch\n+x\n *** Begin Patch\n"
    assert applied(diff, text) == "*** Update File: f\nx\n*** Begin Patch\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("*** Update File: f\n@@\n-a\n+b\n", "must start with *** Begin Patch and end with *** End Patch"),
        (ENVELOPE.removesuffix("*** End Patch"), "must start with"),
        (f"{ENVELOPE}\n*** Delete File: g\n", "'*** Delete File: g' is not between"),
        (f"*** Add File: g\n+a\n{ENVELOPE}\n", "'*** Add File: g' is not between"),
        (f"{ENVELOPE}\n  *** Delete File: g\n", "'*** Delete File: g' is not between"),
        (f"{ENVELOPE}\n*** Begin  Patch\n  *** Delete File: g\n*** End Patch\n", "line 2 of the patch is not a header"),
        (f"{ENVELOPE}\n  *** Begin Patch\n  *** Delete File: g\n  *** End Patch\n", "line 2 of the patch is not a"),
        (f"{ENVELOPE}\n{UNIFIED}\n", "'--- a/f' is not between"),
        (f"{ENVELOPE}\n  --- a/f\n  +++ b/f\n  @@ -1 +1 @@\n  -a\n  +b\n", "'--- a/f' is not between"),
        (f"{UNIFIED}\n\n\n *** Begin Patch\n *** Delete File: g\n *** End Patch", "' *** Delete File: g' is in a"),
        (f"{ENVELOPE}\nAnd:\ndiff --git a/g b/g\nnew file mode 100644\n", "'diff --git a/g b/g' is not between"),
        (f"{UNIFIED}\n{ENVELOPE.partition('@@')[0]}-a\n+b\n*** End Patch", "'*** Update File: f' is in a unified diff"),
        (f"*** Begin Patch\n{UNIFIED}\n*** Delete File: g\n*** End Patch", "'*** Delete File: g' is in a unified diff"),
        (json.dumps({"a": ENVELOPE, "b": ENVELOPE}), "this is no patch"),
        (json.dumps({"input": "x"}), "this is no patch"),
        ("apply_patch 'x", "this is no patch"),
        (UNIFIED.replace("@@ -5 +5 @@", "@ -5 +5 @"), "line 8 of the patch is not a header of a hunk like"),
        ("*** Begin Patch\n*** Update File: f\n*** Move to:\n*** End Patch", "does not say where f is moved to"),
    ],
)
def test_what_is_no_whole_patch_is_refused(text, words):
    with pytest.raises(PatchError, match=words.replace("*", "[*]")):
        parse_patch(text)
