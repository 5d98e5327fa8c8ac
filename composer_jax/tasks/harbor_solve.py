"""Applies the oracle edit of a task: solve.py ORACLE WORKSPACE."""

import json
import sys
from pathlib import Path


def main(oracle, workspace):
    know = json.loads(Path(oracle).read_text(encoding="utf-8"))
    file = Path(workspace, know["path"])
    text = file.read_text(encoding="utf-8")
    if text.count(know["old"]) != 1:
        sys.exit(f"{know['old']!r} is not exactly once in {file}")
    file.write_text(text.replace(know["old"], know["new"]), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
