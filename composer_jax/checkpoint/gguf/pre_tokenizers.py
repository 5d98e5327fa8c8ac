"""How a text is split into pieces before byte-pair merges, by the name that tokenizer.ggml.pre gives to the rule.

A GGUF file holds the name only. The rules are those of the tokenizer.json files of the models after which the names are
called; the regular expressions are in llama.cpp's src/llama-vocab.cpp, too.
"""

from typing import NamedTuple

from tokenizers import Regex, pre_tokenizers

from composer_jax.errors import UserError

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"


class PreTokenizer(NamedTuple):
    """A rule of splitting, and what else llama.cpp derives from its name."""

    regex: str | None
    """Pieces that match; None: GPT-2's own expression."""
    single_digits: bool = False
    """Whether every digit is a piece of its own, before anything else is split."""
    whole_words: bool = False
    """Whether a piece that is a token is not merged from its parts (`ignore_merges`)."""
    bos: bool = False
    """Whether a text begins with the BOS token if the file does not say."""

    def build(self) -> pre_tokenizers.PreTokenizer:
        """Returns the pre-tokenizer, which ends with the step from bytes to the byte-level alphabet."""
        steps: list[pre_tokenizers.PreTokenizer] = []
        if self.single_digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        if self.regex is not None:
            steps.append(pre_tokenizers.Split(Regex(self.regex), "isolated"))
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.regex is None))
        return steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)


_GPT2 = PreTokenizer(None)
_DIGITS = PreTokenizer(None, single_digits=True)
_LLAMA = PreTokenizer(_LLAMA3, whole_words=True, bos=True)
_QWEN = PreTokenizer(_QWEN2)

PRE_TOKENIZERS = {
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "codeshell": _DIGITS,
    "llama-bpe": _LLAMA,
    "llama3": _LLAMA,
    "llama-v3": _LLAMA,
    "falcon3": _LLAMA,
    "qwen2": _QWEN,
    "deepseek-r1-qwen": _QWEN,
}


def find_pre_tokenizer(name: str | None, path: str) -> PreTokenizer:
    """Returns the rule of a name. Raises a UserError that names an unknown one and the file at `path`."""
    if name not in PRE_TOKENIZERS:
        problem = "does not name its pre-tokenizer (tokenizer.ggml.pre)" if name is None else f"splits text by {name!r}"
        raise UserError(f"{path} {problem}; its tokenizer is not read. Supported are {', '.join(PRE_TOKENIZERS)}.")
    return PRE_TOKENIZERS[name]
