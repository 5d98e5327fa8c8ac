"""launch.score of a folder: losses against one forward pass per token, by file, by context, in bits per byte."""

import json
import math

import numpy as np
import pytest

from launch import flags
from launch import score as launch_score
from tests.data.prepare.folders import write_files
from tests.evals.test_score import reference, write_model

FILES = {"b.py": "def add(a, b):\n    return a + b  # größer\n" * 3, "a.js": "let x = 1\n", "z/bad.py": b"\xff\xfe"}
TEXT = f"// a.js\n{FILES['a.js']}# b.py\n{FILES['b.py']}"
WINDOW, STRIDE = 24, 5


def run(capsys, *arguments: object) -> tuple[int, str, str]:
    """The command in this process: (exit code, stdout, stderr)."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        flags.run(launch_score.main, ["launch.score", *map(str, arguments)], define=launch_score.define)
    return end.value.code, *capsys.readouterr()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("score"))


@pytest.fixture
def code(tmp_path):
    return write_files(tmp_path / "code", FILES)


def test_each_token_has_the_loss_after_its_context(folder, code, tmp_path, capsys):
    out = tmp_path / "scores.npz"
    arguments = [f"--checkpoint=hf:{folder}", f"--text={code}", f"--out={out}", f"--window={WINDOW}"]
    status, stdout, stderr = run(capsys, *arguments, f"--stride={STRIDE}")
    assert status == 0, stderr
    summary, arrays = json.loads(stdout.splitlines()[-1]), dict(np.load(out))

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


def test_a_file_keeps_its_rows_whatever_the_stride(folder, tmp_path, capsys):
    (tmp_path / "text.py").write_text(TEXT)
    results = {}
    for name, more in (("default", []), ("widest", [f"--stride={WINDOW - 1}"]), ("rolling", [f"--stride={STRIDE}"])):
        out = tmp_path / f"{name}.npz"
        arguments = [f"--checkpoint=hf:{folder}", f"--text={tmp_path}/text.py", f"--out={out}", f"--window={WINDOW}"]
        status, stdout, stderr = run(capsys, *arguments, *more)
        assert status == 0, stderr
        results[name] = json.loads(stdout.splitlines()[-1]), np.load(out)["logprobs"]
    assert results["default"][0] == results["widest"][0]
    np.testing.assert_array_equal(results["default"][1], results["widest"][1])
    summary, logprobs = results["rolling"]
    assert np.count_nonzero(logprobs) == summary["tokens"] == results["default"][0]["tokens"]
    assert math.isclose(-logprobs.sum() / summary["tokens"], summary["nll"], rel_tol=1e-5)
    assert not list(tmp_path.glob("*.png"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text={0}", "--window=8", "--stride=8"], "--stride=8 is not below the 8 tokens of a window"),
        (["--text={0}", "--stride=600"], "--stride=600 is not below the 600 tokens of a window"),
        (["--text={0}", "--logits"], "--logits are those of --tokens or of one file"),
        (["--text={0}", "--out={1}/o.png"], "o.png is where the picture would be written"),
        (["--text={0}", "--extensions=toml"], "holds no source file that can be read; name another folder"),
        (["--text={0}/b.py", "--extensions=py,js"], "--extensions=py,js chooses files of a folder"),
        (["--tokens=x", "--stride=3"], "--stride and --extensions are about a --text"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(folder, code, tmp_path, capsys, arguments, message):
    defaults = [f"--checkpoint=hf:{folder}", f"--out={tmp_path}/o.npz"]
    status, _, stderr = run(capsys, *defaults, *(argument.format(code, tmp_path) for argument in arguments))
    assert status == 2 and message in stderr and len(stderr.strip().splitlines()) == 1
    assert not list(tmp_path.glob("o.*"))
