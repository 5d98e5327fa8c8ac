"""Codex and qwen-code repair a repository through our server, each in its own protocol, with a scripted policy.

They need Node and `npm install -g @openai/codex @qwen-code/qwen-code`. Their prompts are longer than the context of any
model of the tests, so a function writes the messages.
"""

import dataclasses
import os
import shutil
import subprocess

import httpx2 as httpx
import pytest

from composer_jax.data.chat.messages import ToolCall
from composer_jax.data.chat.text_processor import TextProcessor
from composer_jax.serve.app import new_app
from composer_jax.serve.service import ServerLimits, Service
from tests.serve.conftest import running
from tests.serve.scripted_engine import ScriptedEngine

WIDE = 1 << 20
WRONG, RIGHT = "(len(values) - 1)", "len(values)"
LINES = f"-    return sum(values) / {WRONG}\n+    return sum(values) / {RIGHT}"
PATCH = f"*** Begin Patch\n*** Update File: calc.py\n@@\n{LINES}\n*** End Patch"
PROVIDER = """
model_provider = "local"
model_context_window = 200000
[model_providers.local]
name = "local"
base_url = "URL/v1"
wire_api = "responses"
http_headers = { "X-Session-ID" = "harness" }
"""


def codex_turn(said, folder):
    """The calls of the next message, by what the prompt says."""
    run = lambda command: ToolCall("exec_command", {"cmd": command})  # noqa: E731
    edits = '"name": "apply_patch"' in said
    edit = ToolCall("apply_patch", {"input": PATCH}) if edits else run(f"sed -i 's/{WRONG}/{RIGHT}/' calc.py")
    return [[run("cat calc.py")], [edit], [run("python3 -c 'import calc; print(calc.mean([2, 4, 6]))' > checked")]]


def qwen_turn(said, folder):
    run = lambda command: ToolCall("run_shell_command", {"command": command, "is_background": False})  # noqa: E731
    path = str(folder / "calc.py")
    edit = ToolCall("edit", {"file_path": path, "old_string": WRONG, "new_string": RIGHT})
    read = [ToolCall("read_file", {"file_path": path}), run("ls")]
    return [read, [edit], [run("python3 -c 'import calc; print(calc.mean([2, 4, 6]))' > checked")]]


@pytest.fixture
def repository(tmp_path):
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / "calc.py").write_text(f"def mean(values):\n    return sum(values) / {WRONG}\n")
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    return folder


@pytest.fixture
def serve(text, repository):
    """(turns, name) -> context manager of (url, engine): a server whose model thinks and makes the turns' calls."""
    chat = text.chat_format

    def start(turns, name):
        def write(context):
            said = chat.tokenizer.decode(context)
            done = said.count("<|im_start|>assistant\n<think>")
            calls = [*turns(said, repository), []][done]
            return chat.render_assistant(f"<think>\nTurn {done}.\n</think>\n\nStep {done}.", calls)

        wide = TextProcessor(text.files, dataclasses.replace(text.config, max_context=WIDE), name)
        engine = ScriptedEngine(write, text.end_tokens, max_model_len=WIDE)
        return running(new_app(Service(engine, wide, ServerLimits()), (), "control")), engine

    return start


def run_in(folder, command, **environment):
    """Runs a harness without the user's own settings and without a network but this machine's."""
    home = folder.parent / "home"
    home.mkdir(exist_ok=True)
    return subprocess.run(
        command,
        cwd=folder,
        env={"PATH": os.environ["PATH"], "HOME": str(home), "NO_PROXY": "127.0.0.1", **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )


def assert_repaired(repository, done, engine):
    assert (repository / "calc.py").read_text() == f"def mean(values):\n    return sum(values) / {RIGHT}\n", done.stderr
    assert (repository / "checked").read_text() == "4.0\n", done.stderr
    assert done.returncode == 0 and "Step 3." in done.stdout, done.stderr
    for earlier, later in zip(engine.requests, engine.requests[1:], strict=False):
        sampled = [*earlier.tokens, *engine.write(list(earlier.tokens))]
        assert list(later.tokens[: len(sampled)]) == sampled, "the conversation is what was sampled"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("codex") is None, reason="Codex is not installed (npm install -g @openai/codex)")
@pytest.mark.parametrize("name", ["scripted", "gpt-5.5"])  # of a model that Codex knows, it declares a custom tool
def test_codex_repairs_a_repository(serve, repository, name):
    server, engine = serve(codex_turn, name)
    with server as url:
        home = repository.parent / "codex"
        home.mkdir()
        (home / "config.toml").write_text(PROVIDER.replace("URL", url))
        command = ["codex", "exec", "-m", name, "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
        done = run_in(repository, [*command, "Repair calc.py."], CODEX_HOME=str(home))
        session = httpx.get(f"{url}/sessions/harness", headers={"authorization": "Bearer control"}).json()
    assert_repaired(repository, done, engine)
    assert [turn["prompt_token_ids"] for turn in session["turns"]] == [list(r.tokens) for r in engine.requests]


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("qwen") is None, reason="qwen-code is not installed (npm install -g @qwen-code/qwen-code)"
)
def test_qwen_code_repairs_a_repository(serve, repository):
    server, engine = serve(qwen_turn, "scripted")
    with server as url:
        options = {"OPENAI_API_KEY": "none", "OPENAI_BASE_URL": f"{url}/v1", "OPENAI_MODEL": "scripted"}
        done = run_in(repository, ["qwen", "--auth-type", "openai", "--yolo", "-p", "Repair calc.py."], **options)
    assert_repaired(repository, done, engine)
