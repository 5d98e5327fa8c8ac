"""launch.score: of token files, one text and a folder, against one forward pass per token; and launch.convert."""

import json
import math

import numpy as np
import pytest

from composer_jax.checkpoint.huggingface import save_hf
from composer_jax.data.tokenizer import Tokenizer
from launch import convert, score
from tests.data.prepare.folders import write_files
from tests.evals.test_score import CONFIG, DEFINITION, RNG, WEIGHTS, reference
from tests.launch.in_process import run_here

FILES = {"b.py": "def add(a, b):\n    return a + b  # größer\n" * 3, "a.js": "let x = 1\n", "z/bad.py": b"\xff\xfe"}
TEXT = f"// a.js\n{FILES['a.js']}# b.py\n{FILES['b.py']}"
WINDOW, STRIDE = 24, 5


def run(capsys, entry, *arguments: object) -> tuple[int, str, str]:
    """The command in this process: (exit code, the last line of stdout, stderr)."""
    code, stdout, stderr = run_here(capsys, entry, *arguments)
    return code, stdout.splitlines()[-1] if stdout else "", stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint of Hugging Face's form with a tokenizer."""
    base = tmp_path_factory.mktemp("score")
    tokenizer = Tokenizer.train(["def add(a, b):\n    return a + b\n" * 40], CONFIG.vocab_size)
    assert tokenizer.vocab_size <= CONFIG.vocab_size
    (base / "data").mkdir()
    tokenizer.save(base / "data" / "tokenizer.json")
    save_hf(base / "hf", DEFINITION, *WEIGHTS, tokenizer=base / "data")
    return base / "hf"


@pytest.fixture
def code(tmp_path):
    return write_files(tmp_path / "code", FILES)


def test_each_token_has_the_loss_after_its_context(folder, code, tmp_path, capsys):
    out = tmp_path / "scores.npz"
    arguments = [f"--checkpoint=hf:{folder}", f"--text={code}", f"--out={out}", f"--window={WINDOW}"]
    status, stdout, stderr = run(capsys, score, *arguments, f"--stride={STRIDE}")
    assert status == 0, stderr
    summary, arrays = json.loads(stdout), dict(np.load(out))

    ids, starts = arrays["tokens"], range(0, len(arrays["tokens"]) - WINDOW + STRIDE, STRIDE)
    by_context = {}
    direct = np.zeros(len(ids) - 1)
    for start in reversed(starts):  # so that the earliest window that has a token counts
        logprobs = reference(ids[start : start + WINDOW])[1]
        for context, logprob in enumerate(logprobs, 1):
            direct[start + context - 1] = logprob
            by_context.setdefault(context.bit_length(), []).append(-logprob)
    np.testing.assert_allclose(arrays["logprobs"], direct, atol=2e-5)

    total, scored_bytes = -direct.sum(), len(TEXT.encode()) - 1  # the first token is a slash
    assert summary["tokens"] == len(direct) and (summary["window"], summary["stride"]) == (WINDOW, STRIDE)
    assert math.isclose(summary["nll"], total / len(direct), rel_tol=1e-5)
    assert math.isclose(summary["summed_nll"], total, rel_tol=1e-5)
    assert math.isclose(summary["bits_per_byte"], total / math.log(2) / scored_bytes, rel_tol=1e-5)
    assert [b["predictions"] for b in summary["nll_by_context"]] == [len(by_context[n]) for n in sorted(by_context)]
    means = [np.mean(by_context[n]) for n in sorted(by_context)]
    np.testing.assert_allclose([b["nll"] for b in summary["nll_by_context"]], means, rtol=1e-5)

    assert summary["files"] == 2 and summary["left_out"] == {"wrong encoding": ["z/bad.py"]}
    assert list(arrays["paths"]) == ["a.js", "b.py"] and arrays["file_tokens"].sum() == len(direct) - 1
    first = arrays["file_tokens"][0]
    by_file = [-direct[:first].mean(), -direct[first:-1].mean()]  # the last token ends the document
    np.testing.assert_allclose(arrays["file_nll"], by_file, rtol=1e-5)
    assert arrays["file_bytes"].sum() == len(TEXT.encode())
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_one_text_has_the_same_tokens_whatever_the_stride(folder, tmp_path, capsys):
    text = TEXT.replace("\n", "\r\n")
    (tmp_path / "text.py").write_bytes(text.encode())
    results = {}
    for name, more in (("default", []), ("rolling", [f"--stride={STRIDE}"])):
        out = tmp_path / f"{name}.npz"
        arguments = [f"--checkpoint=hf:{folder}", f"--text={tmp_path}/text.py", f"--out={out}", f"--window={WINDOW}"]
        status, stdout, stderr = run(capsys, score, *arguments, *more)
        assert status == 0, stderr
        results[name] = json.loads(stdout), np.load(out)["logprobs"]
    ids = np.array(Tokenizer.load(folder / "tokenizer.json").encode(text))
    total = -sum(reference(ids[start : start + WINDOW])[1].sum() for start in range(0, len(ids) - 1, WINDOW - 1))
    bits = total / math.log(2) / (len(text.encode()) - 1)  # the first token is a slash
    assert math.isclose(results["default"][0]["bits_per_byte"], bits, rel_tol=1e-5)
    summary, logprobs = results["rolling"]
    assert np.count_nonzero(logprobs) == summary["tokens"] == results["default"][0]["tokens"] == len(ids) - 1
    assert math.isclose(-logprobs.sum() / summary["tokens"], summary["nll"], rel_tol=1e-5)
    assert not list(tmp_path.glob("*.png"))


def test_from_files_to_a_file_and_through_a_conversion(folder, tmp_path, capsys):
    tokens = RNG.integers(0, CONFIG.vocab_size, (2, 9))
    np.save(tmp_path / "tokens.npy", tokens)
    logits, logprobs = zip(*map(reference, tokens), strict=True)
    status, stdout, stderr = run(capsys, convert, f"--source={folder}", f"--target={tmp_path / 'ours'}")
    assert (status, stdout) == (0, f"wrote {tmp_path / 'ours'}"), stderr
    files = []
    for address in (f"hf:{folder}", tmp_path / "ours"):
        arguments = [f"--checkpoint={address}", f"--tokens={tmp_path / 'tokens.npy'}", f"--out={tmp_path / 'o.npz'}"]
        status, stdout, stderr = run(capsys, score, *arguments, "--logits")
        assert status == 0, stderr
        files.append(dict(np.load(tmp_path / "o.npz")))
        assert np.abs(files[-1]["logits"] - np.stack(logits)).max() < 1e-5
        assert np.abs(files[-1]["logprobs"] - np.stack(logprobs)).max() < 1e-5
        assert files[-1]["logits"].dtype == files[-1]["logprobs"].dtype == np.float32
        summary = json.loads(stdout)
        assert summary["tokens"] == 16 and math.isclose(summary["nll"], -np.mean(logprobs), rel_tol=1e-5)
    np.testing.assert_equal(files[0], files[1])
    status, _, stderr = run(capsys, convert, f"--source={tmp_path / 'ours'}", f"--target={tmp_path / 'back'}")
    assert status == 0, stderr
    for file in folder.iterdir():
        assert file.read_bytes() == (tmp_path / "back" / file.name).read_bytes(), file.name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text={0}", "--window=8", "--stride=8"], "--stride=8 is not below the 8"),
        (["--text={0}", "--stride=600"], "--stride=600 is not below the 600"),
        (["--text={0}", "--logits"], "--logits are those of"),
        (["--text={0}", "--out={1}/o.png"], "o.png is where the picture"),
        (["--text={0}", "--extensions=toml"], "holds no source file"),
        (["--text={0}/b.py", "--extensions=py,js"], "chooses files of a folder"),
        (["--tokens=x", "--stride=3"], "are about a --text"),
        ([], "either --tokens=FILE.npy or --text=FILE"),
        (["--tokens={1}/none.npy"], "cannot read the tokens"),
        (["--checkpoint={1}", "--tokens=x"], "neither the steps of a native checkpoint"),
        (["--checkpoint=hf:{1}/none", "--tokens=x"], "there is no folder"),
        (["--checkpoint=hf:nope://x", "--text=x"], "neither a folder nor a readable URL"),
        (["--out=gs://b/o.npz", "--tokens=x"], "--out=gs://b/o.npz is a URL"),
        (["--text={0}/b.py", "--expert=3"], "expert=3"),
        (["--text={0}/b.py", "--window=1"], "--window"),
        (["--text=x", "--dtype=int8"], "dtype='int8'"),
    ],
    ids=str,
)
def test_bad_input_is_refused_in_one_sentence(folder, code, tmp_path, capsys, arguments, message):
    defaults = [f"--checkpoint=hf:{folder}", f"--out={tmp_path}/o.npz"]
    status, _, stderr = run(capsys, score, *defaults, *(argument.format(code, tmp_path) for argument in arguments))
    assert status == 2 and message in stderr and len(stderr.strip().splitlines()) == 1
    assert not list(tmp_path.glob("o.*"))


def test_a_checkpoint_must_be_named(capsys):
    status, _, stderr = run(capsys, score)
    assert status == 2 and "--checkpoint is missing: Weights" in stderr
