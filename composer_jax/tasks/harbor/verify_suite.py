"""Grades a workspace inside a Harbor container: verify_suite.py TESTS WORKSPACE LOGS writes LOGS/reward.json.

TESTS holds suite.json and repo/, the pristine tests and configuration, which replace all protected files of the
workspace (see protected.py). Harbor adds the tests after the agent has finished, but the container's user may be
root, so the referee of run_suite.py cannot hide from the tested code; the library's own grading keeps them apart.
"""

import json
import os
import secrets
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import judge_suite  # noqa: E402  # pyright: ignore[reportMissingImports]  # beside this file in the task's tests/
import protected  # noqa: E402  # pyright: ignore[reportMissingImports]


def main(tests, workspace, logs):
    suite = json.loads(Path(tests, "suite.json").read_text(encoding="utf-8"))
    restore_tests(Path(tests, "repo"), Path(workspace))
    ids = [*suite["fail_to_pass"], *suite["pass_to_pass"]]
    secret = secrets.token_hex(16)
    order = {
        "arguments": suite["arguments"],
        "files": sorted({test.partition("::")[0] for test in ids}),
        "ids": ids,
        "prefixes": list(filter(judge_suite.is_truncated, ids)),
        "secret": secret,
        "decoys": suite["decoys"],
        "test_folders": protected.FOLDERS,
        "tracer": None,
    }
    try:
        process = subprocess.run(
            [sys.executable, str(Path(tests, "run_suite.py").resolve())],
            input=json.dumps(order),
            stdout=subprocess.PIPE,
            text=True,
            errors="replace",
            cwd=workspace,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
            timeout=suite["timeout_s"],
        )
        judged = judge_suite.judge_report(process.stdout, secret, protected.is_protected)
    except subprocess.TimeoutExpired:
        judged = judge_suite.judge_report("", secret, protected.is_protected, "timeout")
    repaired, kept, line = judge_suite.summarize(judged, suite["fail_to_pass"], suite["pass_to_pass"])
    print(line)
    reward = judge_suite.compute_reward(repaired, kept, suite["partial"])
    Path(logs).mkdir(parents=True, exist_ok=True)
    Path(logs, "reward.json").write_text(json.dumps({"reward": reward, "f2p": repaired, "p2p": kept}), encoding="utf-8")


def restore_tests(pristine, workspace):
    for path in protected.protected_files(workspace):
        (workspace / path).unlink()
    for path in sorted(pristine.rglob("*")):
        target = workspace / path.relative_to(pristine)
        if path.is_dir() and not path.is_symlink():
            target.mkdir(parents=True, exist_ok=True)
        else:
            shutil.copy2(path, target, follow_symlinks=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
