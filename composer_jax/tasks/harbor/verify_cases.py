"""Grades a workspace inside a Harbor container: verify.py TESTS WORKSPACE LOGS writes LOGS/reward.json.

Harbor adds the tests after the agent has finished, but the submission and the expected values then share one container;
the library's own grading keeps them apart.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import judge  # noqa: E402  # pyright: ignore[reportMissingImports]  # beside this file in the task's tests/


def main(tests, workspace, logs):
    grader = json.loads(Path(tests, "cases.json").read_text(encoding="utf-8"))
    calls = json.dumps([case["call"] for case in grader["cases"]])
    command = [sys.executable, str(Path(tests, "call_cases.py"))]
    environment = {**os.environ, "PYTHONPATH": workspace, "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        process = subprocess.run(
            command,
            input=calls,
            stdout=subprocess.PIPE,
            text=True,
            errors="replace",
            cwd=workspace,
            env=environment,
            timeout=grader["timeout_s"],
        )
        report, outcome = process.stdout, "ok" if process.returncode == 0 else "nonzero"
    except subprocess.TimeoutExpired:
        report, outcome = "", "timeout"
    failures = judge.failures(grader["cases"], report, outcome)
    print("\n".join(failures) or f"all {len(grader['cases'])} hidden cases pass")
    total = len(grader["cases"])
    Path(logs).mkdir(parents=True, exist_ok=True)
    reward = {"reward": 0.0 if failures else 1.0, "hidden": 1 - len(failures) / total}
    Path(logs, "reward.json").write_text(json.dumps(reward), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
