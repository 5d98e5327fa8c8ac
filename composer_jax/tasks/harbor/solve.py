"""Applies the solution of a task: solve.py ORACLE WORKSPACE.

The oracle holds an edit (path, old, new), several of them (bugs: a list), or the solved files (gold: path -> text, null
for a file to delete).
"""

import json
import sys
from pathlib import Path


def main(oracle_file, workspace):
    oracle = json.loads(Path(oracle_file).read_text(encoding="utf-8"))
    if "gold" in oracle:
        for path, text in oracle["gold"].items():
            file = Path(workspace, path)
            if text is None:
                file.unlink()
            else:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(text.encode())
        return
    for edit in oracle.get("bugs", [oracle]):
        file = Path(workspace, edit["path"])
        text = file.read_text(encoding="utf-8")
        if text.count(edit["old"]) != 1:
            sys.exit(f"{edit['old']!r} does not occur exactly once in {file}")
        file.write_text(text.replace(edit["old"], edit["new"]), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
