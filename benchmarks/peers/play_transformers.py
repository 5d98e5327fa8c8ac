"""The conversations with transformers' batched and padded `generate`: `python -m benchmarks.peers.play_transformers`.

--model is the Hugging Face folder of a model in float32. Each turn is one call for all conversations, whose contexts
are padded on the left. A call runs to the longest message of its turn, and each conversation takes as many tokens as
its message has. Nothing is cached between turns, since `generate` continues a batch only as a whole. The likeliest
token is taken, which costs least. The first turn is played once beforehand, so that nothing is allocated first.
"""

import time
from pathlib import Path
from typing import Any

from benchmarks.peers.arguments import Talks, parse_arguments, print_figures, read_talks


def load_model(folder: Path, threads: int) -> Any:
    """Returns the model of a folder, in float32, for inference."""
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(threads)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def generate(model: Any, contexts: list[list[int]], length: int) -> list[list[int]]:
    """Returns `length` tokens after each context."""
    import torch  # pyright: ignore[reportMissingImports]

    longest = max(map(len, contexts))
    tokens = torch.tensor([[0] * (longest - len(context)) + context for context in contexts])
    mask = torch.tensor([[0] * (longest - len(context)) + [1] * len(context) for context in contexts])
    with torch.inference_mode():
        out = model.generate(
            tokens,
            attention_mask=mask,
            min_new_tokens=length,
            max_new_tokens=length,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return out[:, longest:].tolist()


def play_turn(model: Any, contexts: list[list[int]], lengths: list[int]) -> list[list[int]]:
    """Returns the message of each conversation."""
    messages = generate(model, contexts, max(lengths))
    return [message[:length] for message, length in zip(messages, lengths, strict=True)]


def play(model: Any, talks: Talks) -> list[int]:
    """Plays all conversations; returns the first message of the first one."""
    contexts, first = [list(talk["prompt"]) for talk in talks], []
    for turn in range(len(talks[0]["lengths"])):
        messages = play_turn(model, contexts, [talk["lengths"][turn] for talk in talks])
        first = first or messages[0]
        for context, message, talk in zip(contexts, messages, talks, strict=True):
            context += message + (talk["observations"] + [[]])[turn]
    return first


def main() -> None:
    o = parse_arguments(__doc__)
    talks = read_talks(o.talks)
    model = load_model(o.model, o.threads)
    generate(model, [talk["prompt"] for talk in talks], 4)
    started = time.perf_counter()
    first = play(model, talks)
    print_figures(talks, time.perf_counter() - started, first)


if __name__ == "__main__":
    main()
