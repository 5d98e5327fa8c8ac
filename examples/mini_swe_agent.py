"""Another project's agent, mini-swe-agent, with our server and our sandbox.

    python -m launch.serve --checkpoint=hf:DIR --name=agent --control_key=KEY
    pip install mini-swe-agent mcp
    python examples/mini_swe_agent.py --workspace=REPO --task="The test in test_calc.py fails. Repair calc.py."

The agent asks the server for messages and runs its commands with launch.sandbox, which writes their changes to the
workspace. The server records the token ids of the conversation as the session `mini-swe-agent`: GET
/sessions/mini-swe-agent with the control key gives what an RL algorithm needs. Prints the conversation, and as the last
line how it ended: ContextWindowExceededError if the conversation became longer than the model's context.
"""

import argparse
import contextlib
import shlex
import sys
from typing import Any

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--workspace", required=True, help="folder of the repository")
parser.add_argument("--task", required=True, help="what the agent shall do")
parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server (default: %(default)s)")
parser.add_argument("--model", default="agent", help="what the server calls the model (default: %(default)s)")
parser.add_argument("--key", default="none", help="API key")
parser.add_argument("--session", default="mini-swe-agent", help="what the conversation is recorded as (%(default)s)")
parser.add_argument("--consent", default="none", help="X-Consent, for a server that writes traffic (%(default)s)")
parser.add_argument("--steps", type=int, default=20, help="most messages of the model (default: %(default)s)")
parser.add_argument("--sandbox", default=f"{sys.executable} -m launch.sandbox", help="command that runs the sandbox")


def main() -> None:
    o = parser.parse_args()
    from litellm.exceptions import ContextWindowExceededError  # pyright: ignore[reportMissingImports]
    from minisweagent.agents.default import DefaultAgent  # pyright: ignore[reportMissingImports]
    from minisweagent.environments.local import LocalEnvironment  # pyright: ignore[reportMissingImports]
    from minisweagent.models.litellm_model import LitellmModel  # pyright: ignore[reportMissingImports]

    sandbox = f"{o.sandbox} --workspace={shlex.quote(o.workspace)} --write-back -- bash -c "

    class Sandboxed(LocalEnvironment):
        def execute(self, action: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
            return super().execute(action | {"command": sandbox + shlex.quote(action["command"])}, *args, **kwargs)

    headers = {"X-Session-ID": o.session, "X-Consent": o.consent}
    options = {"api_base": f"{o.url}/v1", "api_key": o.key, "extra_headers": headers}
    model = LitellmModel(model_name=f"openai/{o.model}", model_kwargs=options, cost_tracking="ignore_errors")
    instance = (
        "{{task}}\nThe repository is the current folder. Use the tool bash. When you are done, run "
        "`echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT`."
    )
    agent = DefaultAgent(
        model,
        Sandboxed(timeout=120),
        system_template="You are a software engineer.",
        instance_template=instance,
        step_limit=o.steps,
    )
    with contextlib.suppress(ContextWindowExceededError):
        agent.run(o.task)
    for message in agent.messages:
        calls = [call["function"]["arguments"] for call in message.get("tool_calls") or []]
        print(f"{message['role']}: {message.get('content') or ''}", *calls, sep="\n  ")
    print(agent.messages[-1]["extra"]["exit_status"])


if __name__ == "__main__":
    main()
