"""The conversations with llama.cpp's `llama_decode`: `python -m benchmarks.peers.play_llama_cpp`.

--model is the Hugging Face folder of a Llama network in float32, which becomes a GGUF file first. Each conversation is
a sequence of one context, whose keys and values stay between turns. A prompt is computed once for all conversations
that begin with it. Every call of `llama_decode` takes the tokens that all conversations wait for: the next token of a
message, or an observation. The likeliest token is taken, which costs least.
"""

import ctypes
import dataclasses
import itertools
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.arguments import Talks, parse_arguments, print_figures, read_talks
from benchmarks.peers.gguf_file import write_gguf

BATCH = 2048
"""Most tokens of one call."""


@dataclasses.dataclass
class Conversation:
    """How far a conversation is."""

    sequence: int
    observations: list[list[int]]
    lengths: list[int]
    new_tokens: list[int] = dataclasses.field(default_factory=list)
    """Tokens of the context that are not computed."""
    computed: int = 0
    """Tokens of the context that are."""
    messages: list[list[int]] = dataclasses.field(default_factory=lambda: [[]])

    def add_sampled(self, token: int) -> None:
        """Takes a token, and the next observation where it ends the message."""
        message, turn = self.messages[-1], len(self.messages) - 1
        message.append(token)
        self.new_tokens = [token]
        if len(message) == self.lengths[turn]:
            self.messages.append([])
            self.new_tokens += (self.observations + [[]])[turn]

    @property
    def is_done(self) -> bool:
        return len(self.messages) > len(self.lengths)


class Context:
    """A context of llama.cpp whose sequences each have cache of their own."""

    def __init__(self, file: Path, sequences: int, capacity: int, threads: int):
        import llama_cpp  # pyright: ignore[reportMissingImports]

        self.library: Any = llama_cpp
        quiet = llama_cpp.llama_log_callback(lambda level, text, user_data: None)
        llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
        self._kept = quiet  # as long as the library may call it
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(str(file).encode(), llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = sequences * capacity
        params.n_seq_max = sequences
        params.n_batch = BATCH
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = False
        self.handle = llama_cpp.llama_init_from_model(self._model, params)
        if not self.handle:
            raise RuntimeError(f"llama.cpp makes no context of {sequences} sequences of {capacity} tokens")
        self._memory = llama_cpp.llama_get_memory(self.handle)
        self._batch = llama_cpp.llama_batch_init(BATCH, 0, 1)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))

    def copy(self, source: int, target: int) -> None:
        """Copies the cache of a sequence to another one."""
        self.library.llama_memory_seq_cp(self._memory, source, target, -1, -1)

    def clear(self) -> None:
        self.library.llama_memory_clear(self._memory, True)

    def step(self, conversations: Sequence[Conversation]) -> None:
        """Computes what conversations wait for, as far as a batch holds it, and samples where nothing is left."""
        batch, count, sampled = self._batch, 0, []
        for conversation in conversations:
            part = conversation.new_tokens[: BATCH - count]
            for token in part:
                batch.token[count] = token
                batch.pos[count] = conversation.computed
                batch.n_seq_id[count] = 1
                batch.seq_id[count][0] = conversation.sequence
                batch.logits[count] = 0
                conversation.computed += 1
                count += 1
            del conversation.new_tokens[: len(part)]
            if part and not conversation.new_tokens:
                batch.logits[count - 1] = 1
                sampled.append((conversation, count - 1))
        batch.n_tokens = count
        if status := self.library.llama_decode(self.handle, batch):
            raise RuntimeError(f"llama_decode returned {status}")
        for conversation, place in sampled:
            logits = self.library.llama_get_logits_ith(self.handle, place)
            conversation.add_sampled(int(np.ctypeslib.as_array(logits, (self._vocab_size,)).argmax()))


def play(context: Context, talks: Talks) -> list[int]:
    """Plays all conversations; returns the first message of the first one."""
    context.clear()
    conversations = [Conversation(i, talk["observations"], talk["lengths"]) for i, talk in enumerate(talks)]
    groups = [list(group) for _, group in itertools.groupby(range(len(talks)), key=lambda i: talks[i]["prompt"])]
    firsts = [conversations[group[0]] for group in groups]
    for conversation in firsts:
        conversation.new_tokens = list(talks[conversation.sequence]["prompt"])
    while waiting := [conversation for conversation in firsts if not conversation.messages[0]]:
        context.step(waiting)
    for group in groups:
        for i in group[1:]:
            first, other = conversations[group[0]], conversations[i]
            context.copy(first.sequence, other.sequence)
            other.computed = first.computed
            other.add_sampled(first.messages[0][0])
    while live := [conversation for conversation in conversations if not conversation.is_done]:
        context.step(live)
    return conversations[0].messages[0]


def main() -> None:
    o = parse_arguments(__doc__)
    talks = read_talks(o.talks)
    longest = max(sum(map(len, [t["prompt"], *t["observations"]])) + sum(t["lengths"]) for t in talks)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.gguf"
        write_gguf(o.model, file)
        context = Context(file, len(talks), -(-longest // 256) * 256, o.threads)
        play(context, [talk | {"lengths": [2], "observations": []} for talk in talks])  # touches the memory
        started = time.perf_counter()
        first = play(context, talks)
        print_figures(talks, time.perf_counter() - started, first)


if __name__ == "__main__":
    main()
