"""Scores against the Decoder's own logits in float64, on one device and on eight; windows; the entry points."""

import json
import math
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from composer_jax.checkpoint.huggingface import save_hf
from composer_jax.data.tokenizer import Tokenizer
from composer_jax.errors import UserError
from composer_jax.evals.score import CHUNK, score, windows
from composer_jax.models.model_def import ModelDef
from composer_jax.parallel.mesh import make_mesh
from tests.models.small import random_weights, small

ROOT = Path(__file__).parents[2]
CONFIG = small(vocab_size=290, max_context=600, n_mtp_modules=0, embedding_taps=0, dispatch="ring")
DEFINITION = ModelDef(CONFIG)
WEIGHTS = random_weights(CONFIG)
RNG = np.random.default_rng(0)


def one_device():
    return make_mesh(jax.devices()[:1])


def reference(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(logits, logprobs) of one row without padding."""

    @jax.jit
    def forward(params, bias, tokens):
        decoder = DEFINITION.bind(params, bias)
        positions = np.arange(tokens.shape[1])[None]
        return decoder.logits(decoder(tokens, positions, jax.numpy.ones_like(tokens)).last_BSD)

    logits = np.asarray(forward(*WEIGHTS, tokens[None]))[0].astype(np.float64)
    normal = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return logits, np.take_along_axis(normal[:-1], tokens[1:, None], 1)[:, 0]


@pytest.mark.parametrize("length", [2, CHUNK, CHUNK + 1, 2 * CHUNK + 7])
def test_scores_are_those_of_the_network(length):
    tokens = RNG.integers(0, CONFIG.vocab_size, (3, length))
    scores = score(DEFINITION, *WEIGHTS, tokens, mesh=one_device(), rows=2, logits=True)
    assert (scores.logprobs.shape, scores.logits.shape) == ((3, length - 1), (3, length, CONFIG.vocab_size))
    in_pieces = score(DEFINITION, *WEIGHTS, tokens, mesh=one_device(), rows=2)  # the vocabulary a piece at a time
    assert in_pieces.logits is None
    np.testing.assert_allclose(in_pieces.logprobs, scores.logprobs, atol=1e-5)
    for row, logprobs, logits in zip(tokens, *scores, strict=True):
        wanted_logits, wanted = reference(row)
        assert np.abs(logits - wanted_logits).max() < 1e-5
        assert np.abs(logprobs - wanted).max() < 1e-5


def test_padding_scores_nothing_and_changes_nothing():
    tokens = RNG.integers(0, CONFIG.vocab_size, (2, 20))
    short = tokens.copy()
    short[1, 12:] = -1
    whole, cut = (score(DEFINITION, *WEIGHTS, t, mesh=one_device(), rows=2).logprobs for t in (tokens, short))
    np.testing.assert_array_equal(cut[1, 11:], 0)
    np.testing.assert_allclose(cut[1, :11], whole[1, :11], atol=1e-5)
    np.testing.assert_allclose(cut[0], whole[0], atol=1e-5)


@pytest.mark.parametrize(
    "sizes", [{"replica": 8}, {"data": 2, "expert": 4}, {"data": 2, "context": 2, "tensor": 2}], ids=str
)
def test_eight_devices_score_as_one(sizes):
    mesh = make_mesh(**sizes)
    tokens = RNG.integers(0, CONFIG.vocab_size, (11, 15))  # neither the rows nor their length divide
    params, bias = jax.device_put(WEIGHTS, DEFINITION.shardings(mesh))
    scores = score(DEFINITION, params, bias, tokens, mesh=mesh).logprobs
    np.testing.assert_allclose(scores, score(DEFINITION, *WEIGHTS, tokens, mesh=one_device()).logprobs, atol=1e-5)


def test_windows_share_one_token_and_cover_all():
    ids = np.arange(23)
    rows = windows(ids, 8)
    np.testing.assert_array_equal(rows[:, 0], [0, 7, 14, 21])
    np.testing.assert_array_equal(np.sort(rows[:, 1:][rows[:, 1:] >= 0]), ids[1:])
    np.testing.assert_array_equal(windows(ids[:8], 8), ids[None, :8])


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (np.zeros((2, 3)), r"tokens are float64\[2, 3\]; rows of integers"),
        (np.zeros(3, int), r"tokens are int64\[3\]"),
        (np.zeros((0, 3), int), r"tokens are int64\[0, 3\]"),
        (np.zeros((2, 1), int), "rows of one token"),
        (np.zeros((1, 601), int), "rows of 601 tokens are longer than max_context=600"),
        (np.full((1, 3), 290), "token id 290 is beyond the vocabulary of 290"),
        (np.array([[1, -1, 2]]), "negative token ids are padding"),
        (np.array([[-1, -1]]), "negative token ids are padding"),
    ],
)
def test_tokens_that_cannot_be_scored(tokens, message):
    with pytest.raises(UserError, match=message):
        score(DEFINITION, *WEIGHTS, tokens, mesh=one_device())


def run(entry: str, *arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", f"launch.{entry}", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("score"))


def write_model(base: Path) -> Path:
    """A checkpoint of Hugging Face's form with a tokenizer, below a folder."""
    tokenizer = Tokenizer.train(["def add(a, b):\n    return a + b\n" * 40], CONFIG.vocab_size)
    assert tokenizer.vocab_size <= CONFIG.vocab_size
    (base / "data").mkdir()
    tokenizer.save(base / "data" / "tokenizer.json")
    save_hf(base / "hf", DEFINITION, *WEIGHTS, tokenizer=base / "data")
    return base / "hf"


def test_from_files_to_a_file_and_through_a_conversion(folder, tmp_path):
    tokens = RNG.integers(0, CONFIG.vocab_size, (2, 9))
    np.save(tmp_path / "tokens.npy", tokens)
    converted = run("convert", f"--source={folder}", f"--target={tmp_path / 'ours'}")
    assert converted.stdout == f"wrote {tmp_path / 'ours'}\n", converted.stderr
    files = []
    for name, address in (("hf", f"hf:{folder}"), ("ours", tmp_path / "ours")):
        out = tmp_path / f"{name}.npz"
        done = run(
            "score", f"--checkpoint={address}", f"--tokens={tmp_path / 'tokens.npy'}", f"--out={out}", "--logits"
        )
        assert done.returncode == 0, done.stderr
        files.append(dict(np.load(out)))
        logits, logprobs = zip(*map(reference, tokens), strict=True)
        assert np.abs(files[-1]["logits"] - np.stack(logits)).max() < 1e-5
        assert np.abs(files[-1]["logprobs"] - np.stack(logprobs)).max() < 1e-5
        assert files[-1]["logits"].dtype == files[-1]["logprobs"].dtype == np.float32
        summary = json.loads(done.stdout)
        assert summary["tokens"] == 16 and math.isclose(summary["nll"], -np.mean(logprobs), rel_tol=1e-5)
    np.testing.assert_equal(files[0], files[1])
    again = run("convert", f"--source={tmp_path / 'ours'}", f"--target={tmp_path / 'back'}")
    assert again.returncode == 0, again.stderr
    for file in folder.iterdir():
        assert file.read_bytes() == (tmp_path / "back" / file.name).read_bytes(), file.name


def test_a_text_in_bits_per_byte(folder, tmp_path):
    text = "def add(a, b):\r\n    return a + b  # größer\r\n" * 3
    (tmp_path / "text.py").write_bytes(text.encode())
    arguments = (f"--checkpoint=hf:{folder}", f"--text={tmp_path / 'text.py'}", f"--out={tmp_path / 'o.npz'}")
    done = run("score", *arguments, "--window=16")
    assert done.returncode == 0, done.stderr
    ids = np.array(Tokenizer.load(folder / "tokenizer.json").encode(text))
    total = -sum(reference(ids[start : start + 16])[1].sum() for start in range(0, len(ids) - 1, 15))
    summary = json.loads(done.stdout)
    assert summary["tokens"] == len(ids) - 1
    first = len(Tokenizer.load(folder / "tokenizer.json").decode(ids[:1].tolist()).encode())
    scored_bytes = len((tmp_path / "text.py").read_bytes()) - first
    assert math.isclose(summary["bits_per_byte"], total / math.log(2) / scored_bytes, rel_tol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--checkpoint is missing: Weights"),
        (["--checkpoint=hf:{0}", "--out={1}/o.npz"], "give either --tokens=FILE.npy or --text=FILE"),
        (["--checkpoint=hf:{0}", "--out={1}/o.npz", "--tokens={1}/none.npy"], "cannot read the tokens"),
        (["--checkpoint={1}", "--out={1}/o.npz", "--tokens=x"], "holds neither the steps of a native checkpoint"),
        (["--checkpoint=hf:{1}/none", "--out={1}/o.npz", "--tokens=x"], "there is no folder"),
        (["--checkpoint=hf:{0}", "--out=gs://b/o.npz", "--tokens=x"], "--out=gs://b/o.npz is a URL"),
        (
            ["--checkpoint=hf:{0}", "--out={1}/o.npz", "--text={0}/config.json", "--expert=3"],
            "do not divide over expert=3",
        ),
        (["--checkpoint=hf:{0}", "--out={1}/o.npz", "--text={0}/config.json", "--window=1"], "--window"),
        (["--checkpoint=hf:{0}", "--out={1}/o.npz", "--text=x", "--dtype=int8"], "dtype='int8'"),
        (["--checkpoint=hf:nope://x", "--out={1}/o.npz", "--text=x"], "neither a folder nor a readable URL"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(folder, tmp_path, arguments, message):
    done = run("score", *(argument.format(folder, tmp_path) for argument in arguments))
    assert done.returncode == 2 and message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1 and not (tmp_path / "o.npz").exists()
