"""launch.generate, greedy, against transformers' generate: the same text from the same folder."""

import subprocess
import sys
from pathlib import Path

import pytest

import composer_jax
from tests.data.model_folders import QWEN, QWEN_TOKENS, tokenizer_json, write_folder

pytestmark = pytest.mark.parity

ROOT = Path(__file__).parents[2]
PROMPTS = ("user assistant", "read: a.py", '{"name": "read"')
NEW = 24


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """(folder of transformers' files, model, tokenizer of transformers)."""
    from transformers import PreTrainedTokenizerFast

    from tests.parity import theirs
    from tests.parity.test_families import QWEN as SIZES

    folder = write_folder(tmp_path_factory.mktemp("generate") / "hf", tokenizer_json(QWEN_TOKENS, vocab_size=300), QWEN)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), chat_template=QWEN, eos_token="<|im_end|>"
    )
    model = theirs.make_model(SIZES | {"vocab_size": len(tokenizer), "max_position_embeddings": 128}, 5)
    model.save_pretrained(folder)
    return folder, model, tokenizer


def their_text(case, ids: list[int]) -> str:
    import torch

    _, model, tokenizer = case
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    out = model.generate(
        torch.tensor([ids]), do_sample=False, max_new_tokens=NEW, eos_token_id=end, pad_token_id=end, use_cache=True
    )
    new = [i for i in out[0, len(ids) :].tolist() if i != end]
    return tokenizer.decode(new, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def test_greedy_text_is_that_of_transformers(case):
    folder, _, tokenizer = case
    model = composer_jax.load_hf(folder, dtype="float32")
    for prompt in PROMPTS:
        ids = tokenizer(prompt)["input_ids"]
        assert model.text.encode_prompt(prompt) == ids
        assert model.generate(prompt, max_tokens=NEW, temperature=0) == their_text(case, ids)
        conversation = [{"role": "user", "content": prompt}]
        rendered = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False)
        assert model.text.encode_chat(conversation) == rendered


def test_the_command_prints_the_text_of_transformers(case):
    folder, _, tokenizer = case
    flags = [f"--checkpoint=hf:{folder}", f"--prompt={PROMPTS[0]}", f"--max_tokens={NEW}", "--temperature=0"]
    command = [sys.executable, "-m", "launch.generate", "--dtype=float32", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode() == their_text(case, tokenizer(PROMPTS[0])["input_ids"]) != ""
