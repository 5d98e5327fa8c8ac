"""The conversations with google-tunix's sampler: `python -m benchmarks.peers.play_tunix`.

--model is a JSON file with the fields of its Llama network (benchmarks/peers/equal_cost.py), whose weights are random
and float32. The sampler keeps nothing between calls, so each turn samples all conversations from their whole contexts
in one call, which runs to the longest message of the turn. Each turn has a sampler whose shapes are exactly the
turn's: its longest context, its longest message and the cache for both. All conversations are played once
beforehand, which compiles every shape. The likeliest token is taken, which costs least.
"""

import json
import time
import warnings
from pathlib import Path
from typing import Any

from benchmarks.peers.arguments import Talks, parse_arguments, print_figures, read_talks


class NumberTokenizer:
    """A tokenizer whose texts are token ids in decimal, separated by spaces."""

    def __init__(self, vocab_size: int):
        self._end = vocab_size

    def encode(self, text: str) -> list[int]:
        return [int(number) for number in text.split()]

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))

    def bos_id(self) -> int:
        """Returns 0, with which the sampler adds no token at the beginning."""
        return 0

    def eos_id(self) -> int:
        """Returns an id that is never sampled, so that messages end at their lengths."""
        return self._end

    def pad_id(self) -> int:
        """Returns 0, which no prompt and no observation contains."""
        return 0


def load_model(file: Path) -> Any:
    """Returns the network of a JSON file with random weights."""
    from flax import nnx
    from tunix.models.llama3 import model as llama3  # pyright: ignore[reportMissingImports]

    return llama3.Llama3(llama3.ModelConfig(**json.loads(file.read_text(encoding="utf-8"))), rngs=nnx.Rngs(0))


class TurnSampler:
    """A sampler for one turn of all conversations."""

    def __init__(self, model: Any, longest_context: int, longest_message: int):
        from tunix.generate import sampler  # pyright: ignore[reportMissingImports]

        self._longest_context, self._longest_message = longest_context, longest_message
        config = model.config
        cache = sampler.CacheConfig(
            cache_size=longest_context + longest_message,
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
        )
        self._sampler = sampler.Sampler(model, NumberTokenizer(config.vocab_size), cache)

    def sample(self, contexts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        """Returns the message of each conversation."""
        texts = [" ".join(map(str, context)) for context in contexts]
        out = self._sampler(texts, self._longest_message, max_prompt_length=self._longest_context)
        # A sampled 0 would read as padding in the next turn.
        return [[int(t) or 1 for t in tokens[:n]] for tokens, n in zip(out.tokens, lengths, strict=True)]


def make_samplers(model: Any, talks: Talks) -> list[TurnSampler]:
    """Returns the sampler of each turn."""
    lengths, samplers = [len(talk["prompt"]) for talk in talks], []
    for turn in range(len(talks[0]["lengths"])):
        messages = [talk["lengths"][turn] for talk in talks]
        samplers.append(TurnSampler(model, max(lengths), max(messages)))
        observations = [len((talk["observations"] + [[]])[turn]) for talk in talks]
        lengths = [sum(parts) for parts in zip(lengths, messages, observations, strict=True)]
    return samplers


def play(samplers: list[TurnSampler], talks: Talks) -> list[int]:
    """Plays all conversations; returns the first message of the first one."""
    contexts, first = [list(talk["prompt"]) for talk in talks], []
    for turn, sampler in enumerate(samplers):
        messages = sampler.sample(contexts, lengths := [talk["lengths"][turn] for talk in talks])
        assert [len(message) for message in messages] == lengths
        first = first or messages[0]
        for context, message, talk in zip(contexts, messages, talks, strict=True):
            context += message + (talk["observations"] + [[]])[turn]
    return first


def main() -> None:
    o = parse_arguments(__doc__)
    talks = read_talks(o.talks)
    warnings.simplefilter("ignore", DeprecationWarning)
    samplers = make_samplers(load_model(o.model), talks)
    play(samplers, talks)  # compiles
    started = time.perf_counter()
    first = play(samplers, talks)
    print_figures(talks, time.perf_counter() - started, first)


if __name__ == "__main__":
    main()
