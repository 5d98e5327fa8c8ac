"""Grades a workspace inside a Harbor container: verify_suite.py TESTS WORKSPACE LOGS writes LOGS/reward.json.

TESTS holds suite.json and repo/, the pristine tests and configuration, which are laid over the workspace; what else
is there of such files (see protected.py) is removed. In Harbor the tests arrive after the agent has left, but as the
container's user may be root, the referee of run_suite.py cannot hide from what it runs; the library's own grading
keeps them apart.
"""

import json
import os
import secrets
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import judge_suite  # noqa: E402  # beside this file in the task's tests/
import protected  # noqa: E402


def main(tests, workspace, logs):
    suite = json.loads(Path(tests, "suite.json").read_text(encoding="utf-8"))
    lay_over(Path(tests, "repo"), Path(workspace))
    asked = [*suite["fail_to_pass"], *suite["pass_to_pass"]]
    secret = secrets.token_hex(16)
    order = {
        "arguments": suite["arguments"],
        "files": sorted({test.partition("::")[0] for test in asked}),
        "ids": asked,
        "secret": secret,
        "decoys": suite["decoys"],
        "tracer": None,
    }
    try:
        done = subprocess.run(
            [sys.executable, str(Path(tests, "run_suite.py").resolve())],
            input=json.dumps(order),
            stdout=subprocess.PIPE,
            text=True,
            errors="replace",
            cwd=workspace,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
            timeout=suite["timeout_s"],
        )
        judged = judge_suite.judge_report(done.stdout, secret)
    except subprocess.TimeoutExpired:
        judged = judge_suite.judge_report("", secret, "timeout")
    repaired, kept, line = judge_suite.summarize(judged, suite["fail_to_pass"], suite["pass_to_pass"])
    print(line)
    reward = judge_suite.compute_reward(repaired, kept, suite["partial"])
    Path(logs).mkdir(parents=True, exist_ok=True)
    Path(logs, "reward.json").write_text(json.dumps({"reward": reward, "f2p": repaired, "p2p": kept}), encoding="utf-8")


def lay_over(pristine, workspace):
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
