"""mini-swe-agent repairs a repository through our server and our sandbox; what it sampled is recorded.

It needs `pip install mini-swe-agent mcp`, whose packages are too many for the tests' environment.
"""

import os
import subprocess
import sys
from pathlib import Path

import httpx2 as httpx
import pytest

from composer_jax.data.chat.messages import ToolCall

pytest.importorskip("minisweagent", reason="mini-swe-agent is not installed")

ROOT = Path(__file__).parents[2]
COMMANDS = (
    "cat calc.py",
    "sed -i 's/ - 1)/)/' calc.py",
    "python -c 'import calc; assert calc.mean([2, 4, 6]) == 4; print(\"repaired\")'",
    "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT",
)


@pytest.mark.slow
def test_mini_swe_agent_repairs_a_repository(scripted, text, tmp_path):
    (tmp_path / "calc.py").write_text("def mean(values):\n    return sum(values) / (len(values) - 1)\n")
    chat = text.chat_format

    def write(context):
        turn = chat.tokenizer.decode(context).count("<|im_start|>assistant") - 1
        return chat.render_assistant(f"Step {turn}.", [ToolCall("bash", {"command": COMMANDS[turn]})])

    with scripted(write, control_key="control") as (url, engine):
        options = [f"--workspace={tmp_path}", "--task=Repair calc.py.", f"--url={url}", "--model=scripted"]
        done = subprocess.run(
            [sys.executable, "examples/mini_swe_agent.py", *options],
            cwd=ROOT,
            env=os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.stdout.splitlines()[-1] == "Submitted", done.stderr
        assert "repaired" in done.stdout
        assert (tmp_path / "calc.py").read_text() == "def mean(values):\n    return sum(values) / (len(values))\n"
        session = httpx.get(f"{url}/sessions/mini-swe-agent", headers={"authorization": "Bearer control"}).json()
        assert [turn["prompt_token_ids"] for turn in session["turns"]] == [list(r.tokens) for r in engine.requests]
        assert [turn["token_ids"] for turn in session["turns"]] == [write(r.tokens) for r in engine.requests]
        assert len(engine.requests) == len(COMMANDS)
