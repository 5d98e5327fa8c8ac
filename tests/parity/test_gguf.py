"""GGUF files against transformers' own reading of them: small files that the test writes, float32 on the CPU."""

import dataclasses
import json

import numpy as np
import pytest

from composer_jax.checkpoint.checkpoint import open_checkpoint
from composer_jax.checkpoint.convert import convert
from composer_jax.checkpoint.gguf import open_gguf
from tests.checkpoint.gguf.small_gguf import HEAD, TOKENS, write_small
from tests.parity.decoder import TOLERANCE, forward

pytestmark = pytest.mark.parity

CASES = {
    "llama": ("llama", True),
    "llama_untied": ("llama", False),
    "qwen2": ("qwen2", False),
    "qwen3": ("qwen3", True),
}
ODD = [
    "def f(x):\n    return x[1:234] * 3.14159  # the Ünïcode ３٤½ 漢字 \U0001f600\r\n\t\x00",
    "  12 34567 's 'LL I'd\n\n\n   \n the in x<|im_end|><think>the</think> <|im_start|>",
    "a\u0301 e\u0308 \u200b\u00a0\u2003  \ufeff",
]


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    """(folder, its GGUF file, the model that transformers reads from it)."""
    from transformers import AutoConfig, AutoModelForCausalLM

    arch, tied = CASES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    path = write_small(folder / "a.gguf", arch, tied=tied, tokenizer__ggml__pre="qwen2")
    config = AutoConfig.from_pretrained(folder, gguf_file="a.gguf")
    config.head_dim = HEAD  # transformers does not read qwen3's from the file
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file="a.gguf", config=config, dtype="float32")
    return folder, path, model.eval()


def tokens_of(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, len(TOKENS), (2, 24))


def logits_of(model, tokens: np.ndarray) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model(torch.from_numpy(tokens)).logits.numpy()


def test_config_json_and_tensors_are_what_transformers_reads(case):
    _, path, model = case
    file = open_gguf(path)
    theirs = model.config.to_dict()
    assert file.config["rope_theta"] == theirs["rope_parameters"]["rope_theta"]
    for key, value in file.config.items():
        if key in theirs and key not in ("rope_scaling", "torch_dtype", "architectures"):
            assert theirs[key] == pytest.approx(value), key
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    if file.config["tie_word_embeddings"]:
        state.pop("lm_head.weight", None)
    assert file.tensors.shapes == {name: array.shape for name, array in state.items()}
    for name, array in state.items():
        np.testing.assert_array_equal(file.tensors.read(name), array, err_msg=name)


def test_logits_are_those_of_transformers(case):
    _, path, model = case
    definition, params, bias = open_checkpoint(f"gguf:{path}").load()
    tokens = tokens_of(0)
    expected = logits_of(model, tokens)
    assert expected.std() > 0.3
    assert definition.config.param_dtype == "float32"
    actual, _ = forward(dataclasses.replace(definition.config, compute_dtype="float32"), params, bias, tokens)
    np.testing.assert_allclose(actual, expected, atol=TOLERANCE, rtol=0)


def test_transformers_loads_the_converted_folder(case, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    _, path, model = case
    convert(f"gguf:{path}", f"hf:{tmp_path / 'hf'}")
    tokens = tokens_of(1)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="float32").eval()
    np.testing.assert_allclose(logits_of(again, tokens), logits_of(model, tokens), atol=1e-5, rtol=0)
    assert GenerationConfig.from_pretrained(tmp_path / "hf").eos_token_id == 2
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    messages = [{"role": "user", "content": "in the x"}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    assert rendered == "<|im_start|>user\nin the x<|im_end|>\n"


@pytest.mark.parametrize("pre", ["gpt-2", "qwen2", "llama-bpe", "deepseek-r1-qwen"])
def test_ids_are_those_of_transformers(tmp_path, pre):
    import tokenizers
    from transformers import AutoTokenizer

    path = write_small(tmp_path / "a.gguf", tokenizer__ggml__pre=pre)
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="a.gguf")
    ours = tokenizers.Tokenizer.from_str(open_gguf(path).texts["tokenizer.json"])
    for text in ODD:
        assert ours.encode(text).ids == theirs.encode(text), text


def test_the_exported_tokenizer_is_ours(tmp_path):
    import tokenizers
    from transformers import AutoTokenizer

    files = open_gguf(write_small(tmp_path / "a.gguf", tokenizer__ggml__add_bos_token=True)).texts
    (tmp_path / "hf").mkdir()
    for name, text in files.items():
        (tmp_path / "hf" / name).write_text(text, encoding="utf-8")
    (tmp_path / "hf" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    theirs = AutoTokenizer.from_pretrained(tmp_path / "hf")
    ours = tokenizers.Tokenizer.from_str(files["tokenizer.json"])
    for text in ODD:
        assert theirs.encode(text) == ours.encode(text).ids
        assert theirs.encode(text)[0] == 1
        assert theirs.decode(theirs.encode(text)[1:]) == text
