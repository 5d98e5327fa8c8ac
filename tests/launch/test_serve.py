"""launch.serve as a user runs it: it says where it listens, ends at SIGTERM, and refuses bad input before it reads
weights."""

import contextlib
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import httpx2 as httpx
import pytest
import uvicorn

from composer_jax.sampler.sampler import Sampler
from composer_jax.serve.traffic.folder import TrafficFolder
from composer_jax.stages.serve import ServeOptions
from composer_jax.stages.serve import serve as serve_weights
from launch import flags, serve
from tests.opened_files import opened_files
from tests.parallel.test_processes import free_port
from tests.stages.base_model import write_base

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "launch.serve"]
SIZES = ["--port=0", "--slots=2", "--max_model_len=512"]
ASK = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 300, "temperature": 0.9}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("serve") / "small")


@contextlib.contextmanager
def served(folder, *options):
    """A server in a process of its own: (process, its address)."""
    command = [*COMMAND, f"--checkpoint=hf:{folder}", *SIZES, *options]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        said = ""
        while not (found := re.search(r"listens on (http://\S+?)/ ", said)):
            line = process.stderr.readline()
            assert line, f"the server ended: {said}"
            said += line
        yield process, found[1]
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


@pytest.mark.slow
def test_a_server_answers_and_ends_gracefully(folder, tmp_path):
    (tmp_path / "policy.json").write_text('{"consent_text": "We store this."}')
    traffic = [f"--traffic={tmp_path / 'traffic'}", f"--traffic_policy={tmp_path / 'policy.json'}"]
    with served(folder, "--api_key=secret", *traffic) as (process, url):
        headers = {"authorization": "Bearer secret", "X-Session-ID": "s", "X-Consent": "training"}
        client = httpx.Client(base_url=url, headers=headers, timeout=60)
        assert client.get("/v1/models").json()["data"][0]["id"] == "small"
        answers = []
        asking = threading.Thread(target=lambda: answers.append(client.post("/v1/chat/completions", json=ASK)))
        asking.start()
        while not httpx.get(f"{url}/stats").json()["running"] and not answers:
            continue
        process.send_signal(signal.SIGTERM)
        asking.join(60)
        assert answers[0].status_code == 200, "what ran has ended first"
        assert process.wait(60) in (0, 128 + signal.SIGTERM, 130, -signal.SIGTERM)
        (turn,) = TrafficFolder(tmp_path / "traffic").read("s").turns
        assert turn.answer == answers[0].json()["id"]
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")


@pytest.mark.slow
def test_two_processes_serve_together(folder):
    """Their answer is that of one; the one without the port ends when the server does."""
    ask = ASK | {"max_tokens": 12, "seed": 3, "temperature": 0}
    with served(folder, "--dtype=float32") as (_, url):
        expected = httpx.post(f"{url}/v1/chat/completions", json=ask, timeout=60).json()["choices"]
    hosts = [f"--coordinator=127.0.0.1:{free_port()}", "--processes=2"]
    other = subprocess.Popen(
        [*COMMAND, f"--checkpoint=hf:{folder}", "--dtype=float32", "--tensor=2", *SIZES, *hosts, "--process=1"],
        cwd=ROOT,
    )
    with served(folder, "--dtype=float32", "--tensor=2", "--control_key=k", *hosts, "--process=0") as (process, url):
        assert httpx.post(f"{url}/v1/chat/completions", json=ask, timeout=60).json()["choices"] == expected
        headers = {"authorization": "Bearer k"}
        said = httpx.post(f"{url}/update_weights", json={"checkpoint": f"hf:{folder}"}, headers=headers).json()
        assert (
            "a server over several processes takes other weights from a folder of versions" in said["error"]["message"]
        )
        other.send_signal(signal.SIGTERM)  # as a scheduler does, which stops all hosts
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        assert other.wait(60) is not None


def refusal(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        flags.run(serve.main, ["launch/serve.py", *arguments], define=serve.define)
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_bad_input_is_a_sentence_before_weights_are_read(folder, tmp_path, capsys):
    assert "tmp/none" in refusal(capsys, "--checkpoint=hf:/tmp/none")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = refusal(capsys, f"--checkpoint=hf:{folder}", f"--port={port}")
        assert f"cannot listen on 127.0.0.1:{port}" in said and "use another --port" in said
    assert "cannot listen on 127.0.0.1:99999" in refusal(capsys, f"--checkpoint=hf:{folder}", "--port=99999")
    said = refusal(capsys, f"--checkpoint=hf:{folder}", "--port=0", "--max_model_len=5000")
    assert "--max_model_len=5000 exceeds the model's context of 4096 tokens" in said
    assert "the key '' is empty" in refusal(capsys, f"--checkpoint=hf:{folder}", "--api_key=")
    assert "the key '' is empty" in refusal(capsys, f"--checkpoint=hf:{folder}", "--control_key=")
    said = refusal(capsys, f"--checkpoint=hf:{folder}", "--api_key=a", "--control_key=a")
    assert "--control_key is also an --api_key" in said
    said = refusal(capsys, f"--checkpoint=hf:{folder}", "--port=0", f"--traffic={tmp_path / 'traffic'}")
    assert "has no consent text" in said and "--traffic_policy" in said
    said = refusal(capsys, f"--checkpoint=hf:{folder}", "--port=0", "--traffic_policy=x")
    assert "give --traffic, too" in said


def test_an_engine_port_needs_a_token_and_a_folder_to_follow(folder, tmp_path, capsys):
    here = f"--checkpoint=hf:{folder}"
    assert "--token_file is the secret of --engine_port" in refusal(capsys, here, "--token_file=t")
    assert "--engine_port needs --token_file" in refusal(capsys, here, "--engine_port=0", f"--follow={tmp_path}")
    (token := tmp_path / "token").write_text("a token of the tests")
    said = refusal(capsys, here, "--engine_port=0", f"--token_file={token}")
    assert "--engine_port=0 serves a learner" in said and "--follow=FOLDER" in said
    follow = [here, f"--token_file={token}", f"--follow={tmp_path}"]
    assert "cannot listen on 127.0.0.1:99999" in refusal(capsys, *follow, "--engine_port=99999")
    token.write_text("short")
    assert "a token of 5 characters" in refusal(capsys, *follow, "--engine_port=0")


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", None),
        ("tokenizer.json", "{"),
        ("tokenizer_config.json", "[]"),
        ("generation_config.json", '{"temperature": "warm"}'),
        ("generation_config.json", '{"eos_token_id": "end"}'),
    ],
)
def test_who_starts_a_server_reads_where_the_file_is_that_cannot_be_used(tmp_path, capsys, file, content):
    broken = write_base(tmp_path / "hidden-place" / "small")
    (broken / file).unlink(missing_ok=True)
    if content is not None:
        (broken / file).write_text(content)
    said = refusal(capsys, f"--checkpoint=hf:{broken}", "--name=agent", "--port=0")
    assert str(broken) in said and "agent" not in said


@pytest.mark.parametrize(("dtype", "computed"), [(None, "float32"), ("bfloat16", "bfloat16"), ("float32", "float32")])
def test_a_cpu_serves_bfloat16_in_float32_unless_asked_for_it(folder, tmp_path, monkeypatch, caplog, dtype, computed):
    stored = shutil.copytree(folder, tmp_path / "stored")
    config = json.loads((stored / "config.json").read_text()) | {"torch_dtype": "bfloat16"}
    (stored / "config.json").write_text(json.dumps(config))
    samplers = []
    monkeypatch.setattr(uvicorn.Server, "run", lambda server, sockets: sockets[0].close())
    monkeypatch.setattr(Sampler, "warm_up", lambda sampler, **_: samplers.append(sampler))
    serve_weights(f"hf:{stored}", ServeOptions(port=0, slots=2, max_model_len=512, dtype=dtype))
    network = samplers[0].definition.config
    assert (network.param_dtype, network.compute_dtype) == (dtype or "bfloat16", computed)
    said = [record.getMessage() for record in caplog.records if "multiplies bfloat16" in record.getMessage()]
    assert len(said) == (dtype is None) and all("--dtype=float32" in sentence for sentence in said)


def test_a_server_opens_each_file_of_its_model_once(folder, monkeypatch):
    started = []
    monkeypatch.setattr(uvicorn.Server, "run", lambda server, sockets: started.append(sockets[0].close()))
    monkeypatch.setattr(Sampler, "warm_up", lambda *_, **__: None)
    with opened_files(folder) as counts:
        serve_weights(f"hf:{folder}", ServeOptions(port=0, slots=2, max_model_len=512))
    assert started, "the server came as far as to listen"
    described = {file.name for file in folder.iterdir() if file.suffix != ".safetensors"}
    assert {name: counts[name] for name in described} == dict.fromkeys(described, 1)
