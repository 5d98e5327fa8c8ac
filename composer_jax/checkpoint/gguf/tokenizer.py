"""The tokenizer of a GGUF file: tokenizer.json, tokenizer_config.json and generation_config.json from its metadata.

Of the rule that splits a text before byte-pair merges a GGUF file holds the name only. The rules here are those of the
tokenizer.json files of the models after which the names are called; the regular expressions are in llama.cpp's
src/llama-vocab.cpp, too.
"""

import json
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors

from composer_jax.checkpoint.gguf.container import GGUFContainer
from composer_jax.errors import UserError

_PREFIX = "tokenizer.ggml."
_CONTROL, _USER_DEFINED = 3, 4  # of tokenizer.ggml.token_type
_SPECIAL = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
"""The name in tokenizer.ggml.NAME_token_id -> that in tokenizer_config.json's NAME_token."""
_ENDS = ("eos", "eot", "eom")
"""Names of tokens that end a message: of the text, of the turn, of the message."""
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


PRE_TOKENIZERS = {
    **dict.fromkeys(("gpt-2", "phi-2"), PreTokenizer(None)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell"), PreTokenizer(None, single_digits=True)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3"), PreTokenizer(_LLAMA3, whole_words=True, bos=True)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), PreTokenizer(_QWEN2)),
}
"""By tokenizer.ggml.pre."""


def has_tokenizer(file: GGUFContainer) -> bool:
    """Whether the metadata holds a tokenizer."""
    return f"{_PREFIX}model" in file and f"{_PREFIX}tokens" in file


def tokenizer_texts(file: GGUFContainer) -> dict[str, str]:
    """Returns the tokenizer's files, name -> content: tokenizer.json, tokenizer_config.json, generation_config.json.

    Raises:
      UserError: the file has no tokenizer, one of another kind than byte-level BPE, or a damaged one.
    """
    if not has_tokenizer(file):
        raise UserError(f"{file.path} holds no tokenizer; convert the model from a file that does.")
    kind = file.value(f"{_PREFIX}model", str)
    if kind != "gpt2":
        raise UserError(
            f"{file.path} has a tokenizer of the kind {kind!r}; only byte-level BPE ('gpt2') is read from GGUF."
        )
    name = file.value(f"{_PREFIX}pre", str, None)
    if name not in PRE_TOKENIZERS:
        problem = "does not name its pre-tokenizer (tokenizer.ggml.pre)" if name is None else f"splits text by {name!r}"
        raise UserError(f"{file.path} {problem}; its tokenizer is not read. Supported are {', '.join(PRE_TOKENIZERS)}.")
    pre = PRE_TOKENIZERS[name]
    tokens = file.value(f"{_PREFIX}tokens", list)
    special = _special_tokens(file, tokens)
    bos = file.value(f"{_PREFIX}add_bos_token", bool, pre.bos)
    eos = file.value(f"{_PREFIX}add_eos_token", bool, False)
    backend = _backend(file, tokens, pre)
    before, after = special.get("bos") if bos else None, special.get("eos") if eos else None
    if before or after:
        backend.post_processor = _add_around(before, after, tokens)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": bos,
        "add_eos_token": eos,
        "clean_up_tokenization_spaces": False,
        "model_max_length": file.value(f"{file.value('general.architecture', str)}.context_length", int),
    }
    for name, key in _SPECIAL.items():
        if name in special:
            config[f"{key}_token"] = special[name]
    template = _chat_template(file)
    if template:
        config["chat_template"] = template
    return {
        "tokenizer.json": backend.to_str(pretty=False),
        "tokenizer_config.json": _json(config),
        "generation_config.json": _json(_generation_config(file, tokens)),
    }


def _backend(file: GGUFContainer, tokens: list[str], pre: PreTokenizer) -> tokenizers.Tokenizer:
    """Returns byte-level BPE whose ids are the positions of the tokens, control tokens included."""
    merges = file.value(f"{_PREFIX}merges", list)
    kinds = file.value(f"{_PREFIX}token_type", list, [1] * len(tokens))
    if len(kinds) != len(tokens):
        raise UserError(f"{file.path} has {len(tokens)} tokens and {len(kinds)} token types; the file is damaged.")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    if len(vocabulary) < len(tokens):
        twice = next(token for i, token in enumerate(tokens) if vocabulary[token] != i)
        raise UserError(f"{file.path} has the token {twice!r} twice; the file is damaged.")
    try:
        pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
        model = models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=pre.whole_words)
    except Exception as error:  # the backend raises plain Exception
        raise UserError(f"the merges of the tokenizer in {file.path} are damaged ({error}); fetch it again.") from error
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre.build()
    backend.decoder = decoders.ByteLevel()
    # In the order of their ids, as tokenizer.json lists them. User-defined tokens are matched whole, but are text.
    for kind, token in zip(kinds, tokens, strict=True):
        if kind in (_CONTROL, _USER_DEFINED):
            backend.add_tokens([AddedToken(token, special=kind == _CONTROL, normalized=False)])
    return backend


def _special_tokens(file: GGUFContainer, tokens: list[str]) -> dict[str, str]:
    """Returns the tokens that the metadata names by their ids: bos, eos, unknown, padding."""
    special = {}
    for name in _SPECIAL:
        i = _token_id(file, name, tokens)
        if i is not None:
            special[name] = tokens[i]
    return special


def _token_id(file: GGUFContainer, name: str, tokens: list[str]) -> int | None:
    """Returns the id of a token that the metadata names, or None. Raises a UserError if there is no such token."""
    i = file.value(f"{_PREFIX}{name}_token_id", int, None)
    if i is not None and not 0 <= i < len(tokens):
        raise UserError(f"{file.path} has {_PREFIX}{name}_token_id={i} and {len(tokens)} tokens; the file is damaged.")
    return i


def _generation_config(file: GGUFContainer, tokens: list[str]) -> dict[str, Any]:
    """Returns bos_token_id, pad_token_id and eos_token_id; several tokens that end a message are a list."""
    config: dict[str, Any] = {}
    for name, key in (("bos", "bos_token_id"), ("padding", "pad_token_id")):
        if (i := _token_id(file, name, tokens)) is not None:
            config[key] = i
    ends = list(dict.fromkeys(i for name in _ENDS if (i := _token_id(file, name, tokens)) is not None))
    if ends:
        config["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    return config


def _add_around(bos: str | None, eos: str | None, tokens: list[str]) -> processors.TemplateProcessing:
    """Returns the step that puts BOS before and EOS after a text that is encoded with special tokens."""
    around = [f"{bos}:{{}}"] * bool(bos), [f"{eos}:{{}}"] * bool(eos)

    def sequence(name: str, number: int) -> str:
        parts = [*around[0], f"${name}:{{}}", *around[1]]
        return " ".join(part.format(number) for part in parts)

    return processors.TemplateProcessing(
        single=sequence("A", 0),
        pair=f"{sequence('A', 0)} {sequence('B', 1)}",
        special_tokens=[(token, tokens.index(token)) for token in dict.fromkeys((bos, eos)) if token],
    )


def _chat_template(file: GGUFContainer) -> str | list[dict[str, str]]:
    """Returns the template, "" if there is none; several are a list as in tokenizer_config.json."""
    default = file.value("tokenizer.chat_template", str, "")
    named = [
        {"name": name, "template": file.value(f"tokenizer.chat_template.{name}", str)}
        for name in file.value("tokenizer.chat_templates", list, [])
        if f"tokenizer.chat_template.{name}" in file
    ]
    if not named:
        return default
    return [{"name": "default", "template": default}] * bool(default) + named


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
