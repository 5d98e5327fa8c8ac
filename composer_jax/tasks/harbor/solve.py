"""Applies what solves a task: solve.py ORACLE WORKSPACE.

The oracle holds either an edit (path, old, new) or the whole files as they should be (gold: path -> text, null for a
file that should not be there).
"""

import json
import sys
from pathlib import Path


def main(oracle, workspace):
    know = json.loads(Path(oracle).read_text(encoding="utf-8"))
    if "gold" in know:
        for path, text in know["gold"].items():
            file = Path(workspace, path)
            if text is None:
                file.unlink()
            else:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(text.encode())
        return
    file = Path(workspace, know["path"])
    text = file.read_text(encoding="utf-8")
    if text.count(know["old"]) != 1:
        sys.exit(f"{know['old']!r} is not exactly once in {file}")
    file.write_text(text.replace(know["old"], know["new"]), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
