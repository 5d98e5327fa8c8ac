"""launch.generate as a user runs it: the text and nothing else on stdout, one sentence for bad input."""

import subprocess
import sys
from pathlib import Path

import pytest

import composer_jax
from launch import generate
from tests.launch.in_process import run_here
from tests.parallel.test_processes import free_port
from tests.stages.small_model import CONFIG, TEXT, write_model

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("generate") / "hf")


@pytest.fixture(scope="module")
def model(folder):
    return composer_jax.load_hf(folder, dtype="float32")


def run(*arguments: object, stdin: bytes = b"") -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "launch.generate", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, input=stdin, timeout=300)


def test_only_the_answer_to_standard_input_is_on_stdout(folder, model):
    options = ["--chat", "--max_tokens=25", "--temperature=0.8", "--top_p=0.9", "--top_k=50", "--seed=7"]
    done = run(f"--checkpoint={folder}", "--dtype=float32", *options, stdin="größer?".encode())
    assert done.returncode == 0, done.stderr.decode()
    answer = model.chat("größer?", max_tokens=25, temperature=0.8, top_p=0.9, top_k=50, seed=7)
    assert done.stdout == answer.encode()


def test_a_reader_that_leaves_early_is_not_an_error(folder):
    command = [sys.executable, "-m", "launch.generate", f"--checkpoint={folder}", "--prompt=x", "--dtype=float32"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    errors = process.stderr.read()
    assert process.wait(300) == 0 and b"Traceback" not in errors and b"Exception ignored" not in errors, errors


@pytest.mark.slow
def test_two_processes_write_the_text_once(folder, model):
    """Process 1 gets the prompt from process 0: it has no standard input."""
    port, started = free_port(), []
    for process in range(2):
        command = [sys.executable, "-m", "launch.generate", f"--checkpoint=hf:{folder}", "--max_tokens=30"]
        command += ["--temperature=0", "--dtype=float32", "--tensor=2"]
        command += [f"--coordinator=127.0.0.1:{port}", "--processes=2", f"--process={process}"]
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        started.append(subprocess.Popen(command, cwd=ROOT, **pipes))
    (first, first_error), (second, second_error) = (
        process.communicate(text, timeout=300) for process, text in zip(started, [TEXT.encode(), b""], strict=True)
    )
    assert [process.returncode for process in started] == [0, 0], first_error + second_error
    assert b"".join(line for line in second.splitlines() if not line.startswith(b"[Gloo]")) == b""
    text = model.generate(TEXT, max_tokens=30, temperature=0).encode()
    assert first.endswith(text) and first.count(text) == 1


def test_a_prompt_from_a_file_and_stop_texts(folder, model, tmp_path, capsys):
    (tmp_path / "prompt.txt").write_text(TEXT)
    whole = model.generate(TEXT, max_tokens=30, temperature=0)
    arguments = [f"--checkpoint=hf:{folder}", f"--file={tmp_path}/prompt.txt", "--dtype=float32", "--temperature=0"]
    code, out, _ = run_here(
        capsys, generate, *arguments, "--max_tokens=30", "--stop=never written", f"--stop={whole[4:6]}"
    )
    assert (code, out) == (0, whole[: whole.index(whole[4:6]) + 2])


BAD = {
    "there is no folder": ["--checkpoint=hf:{0}/none", "--prompt=x"],
    "holds neither the steps of a native checkpoint": ["--checkpoint={1}", "--prompt=x"],
    "--checkpoint is missing": ["--prompt=x"],
    "the prompt is empty; give a text": ["--checkpoint={0}", "--prompt="],
    "the prompt is empty: a message": ["--checkpoint={0}", "--prompt=", "--chat"],
    "give either --prompt=TEXT or --file=FILE": ["--checkpoint={0}", "--prompt=x", "--file=y"],
    "cannot read the prompt {1}/none": ["--checkpoint={0}", "--file={1}/none"],
    "cannot read the prompt {1}/binary": ["--checkpoint={0}", "--file={1}/binary"],
    "tokens, and the context of {0} holds 640, the answer included": ["--checkpoint={0}", "--file={1}/long"],
    "max_tokens=0 leaves nothing to sample": ["--checkpoint={0}", "--prompt=x", "--max_tokens=0"],
    "temperature=-1.0 is not a temperature": ["--checkpoint={0}", "--prompt=x", "--temperature=-1"],
    "top_p=2.0 is not above 0": ["--checkpoint={0}", "--prompt=x", "--top_p=2"],
    "top_k=-3 is negative": ["--checkpoint={0}", "--prompt=x", "--top_k=-3"],
    "dtype='int8'": ["--checkpoint={0}", "--prompt=x", "--dtype=int8"],
    "Unknown command line flag 'temprature'": ["--checkpoint={0}", "--prompt=x", "--temprature=0"],
}


@pytest.mark.parametrize(("sentence", "arguments"), BAD.items(), ids=BAD)
def test_bad_input_ends_with_a_sentence_before_weights_are_read(
    folder, tmp_path, capsys, monkeypatch, sentence, arguments
):
    monkeypatch.setattr("composer_jax.checkpoint.checkpoint.load_hf", None)
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    (tmp_path / "long").write_text("a b " * CONFIG.max_context)
    code, out, err = run_here(capsys, generate, *(argument.format(folder, tmp_path) for argument in arguments))
    assert code == 2 and out == "" and sentence.format(folder, tmp_path) in err
    assert "Traceback" not in err and len(err.strip().splitlines()) <= 2
