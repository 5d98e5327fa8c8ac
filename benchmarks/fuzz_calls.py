"""Random messages through every form of calls: nothing crashes, and nothing that was said is lost.

    python -m benchmarks.fuzz_calls [--messages 200000] [--seed 0] [--published]

Half of the messages are sampled at random from control tokens, pieces of calls and words; their words must be in what
`parse` returns, or in the text of a malformed call (but for headings of the harmony format). The other half are
rendered from random content and calls: they are refused, or read back as they were. Prints a line per form; with
--published a line per chat template of benchmarks/chat_templates.py instead.
"""

import argparse
import functools
import random
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.chat_templates import TEMPLATES, model_folder
from composer_jax.data.chat.chat_format import ChatFormat
from composer_jax.data.chat.control_text import ControlText
from composer_jax.data.chat.harmony import HarmonyFormat
from composer_jax.data.chat.load_chat_format import load_chat_format
from composer_jax.data.chat.messages import AssistantMessage, MalformedToolCall, ToolCall
from composer_jax.data.chat.thinking import split_thinking
from composer_jax.data.model_tokenizer import ModelTokenizer
from composer_jax.errors import UserError
from composer_jax.observe.progress import Progress
from tests.data.formats import Declaration, format_of

FORMS = (
    *("compact", "qwen", "chatml", "thinks", "opens", "closed", "xml", "keys"),
    *("kimi", "kimi_thinking", "kimi_opens", "harmony"),
)
PIECES = (
    *"<tool_call> </tool_call> <think> </think> <tool_response> <|im_end|> <|user|> <|observation|>".split(),
    *"<|call|> <|end|>".split(),
    *"<function=f> </function> <parameter=a> </parameter> <arg_key> </arg_key> <arg_value> </arg_value>".split(),
    *"<|tool_call_begin|> <|tool_call_argument_begin|> <|tool_call_end|> functions.f:0 f".split(),
    *"<|start|> <|channel|> <|message|> <|return|> assistant analysis commentary to=functions.f".split(),
    *('{"name": "f", "arguments": {"a": "', '"}}', '{"name": "f"}', '{"a": "', '"}', "\n", " ", '"'),
)


@functools.cache
def whole_call(chat: ChatFormat) -> str:
    """A well-formed call in the form of the format."""
    return chat.tokenizer.decode(chat.render_assistant("", [ToolCall("f", {"a": "x"})])[:-1])


def sampled_message(rng: random.Random, chat: ChatFormat) -> tuple[list[int], list[str]]:
    """Returns (ids of a message that thinks and begins and ends calls anywhere, its words before the end)."""
    parts, words = [rng.choice(("", "<think>", "<think>\n"))], []
    for number in range(rng.randint(1, 8)):
        words.append(f"word{number}z")
        parts += [words[-1], *rng.choices([*PIECES, whole_call(chat)], [1] * len(PIECES) + [4], k=rng.randint(0, 8))]
    text = "".join(parts)
    ids = _ids(chat, text)
    end = next((at for at, i in enumerate(ids) if i in chat.end_tokens), len(ids))
    before = chat.tokenizer.decode(ids[:end])
    return ids, [word for word in words if word in before]


@functools.cache
def _control_ids(chat: ChatFormat) -> dict[str, int]:
    tok = chat.tokenizer
    return {tok.decode([i]): i for i in range(tok.vocab_size) if tok.is_control(i)}


def _ids(chat: ChatFormat, text: str) -> list[int]:
    if isinstance(chat.tokenizer, ModelTokenizer):
        return ControlText(chat.tokenizer).ids(text, "\0")
    names = _control_ids(chat)
    ids: list[int] = []
    at = start = 0
    while at < len(text):
        name = next((name for name in names if text.startswith(name, at)), None)
        if name is None:
            at += 1
            continue
        ids += [*chat.tokenizer.encode(text[start:at]), names[name]]
        at = start = at + len(name)
    return ids + chat.tokenizer.encode(text[start:])


def random_message(rng: random.Random) -> AssistantMessage:
    """A message with content and calls that like to spell markers."""

    def text(most: int) -> str:
        return "".join(rng.choices([*PIECES, "a", "b c", "5", "true"], k=rng.randint(0, most)))

    thought = f"<think>\n{text(3)}x\n</think>\n\n" if rng.random() < 0.3 else ""
    calls = []
    for _ in range(rng.randint(0, 2)):
        values = [text(3), rng.randint(-5, 5), rng.random() < 0.5, None, [text(1), 1.5], {"k": text(1)}]
        calls.append(
            ToolCall(rng.choice("fgh"), {key: rng.choice(values) for key in rng.sample("abc", rng.randint(0, 3))})
        )
    return AssistantMessage(thought + text(3).strip(), tuple(calls), True)


def strings_of(calls: Sequence[ToolCall]) -> list[Declaration]:
    """Declarations that say which arguments are strings."""
    declared: dict[str, dict] = {}
    for call in calls:
        strings = {key: {"type": "string"} for key, value in call.arguments.items() if isinstance(value, str)}
        declared.setdefault(call.name, {}).update(strings)
    return [Declaration(name, "", {"properties": properties}) for name, properties in declared.items()]


def check_sampled(chat: ChatFormat, rng: random.Random, counts: Counter[str]) -> None:
    """Raises AssertionError if a word of a sampled message is in nothing that `parse` returns."""
    ids, words = sampled_message(rng, chat)
    message = chat.parse(ids)
    told = message.content
    for call in message.calls:
        told += call.text if isinstance(call, MalformedToolCall) else f"{call.name}{call.arguments}"
    counts["calls"] += sum(isinstance(call, ToolCall) for call in message.calls)
    counts["malformed"] += sum(isinstance(call, MalformedToolCall) for call in message.calls)
    lost = [word for word in words if word not in told]
    # Headings of the harmony format are not content, and random text gets into them.
    assert not lost or isinstance(chat, HarmonyFormat), f"{lost} of {chat.tokenizer.decode(ids)!r} are not in {message}"


def check_rendered(chat: ChatFormat, rng: random.Random, counts: Counter[str]) -> None:
    """Raises AssertionError if a message that was rendered is read back as another one."""
    message = random_message(rng)
    calls = [call for call in message.calls if isinstance(call, ToolCall)]
    try:
        ids = chat.render_assistant(message.content, calls)
    except ValueError:
        counts["refused"] += 1
        return
    read = chat.parse(ids, strings_of(calls))
    counts["read back"] += 1
    assert read.calls == message.calls, f"{message} was read back as {read}"
    for ours, theirs in zip(split_thinking(read.content), split_thinking(message.content), strict=True):
        assert "".join(ours.split()) == "".join(theirs.split()), f"{message} was read back as {read}"


def published_formats() -> Iterator[tuple[str, ChatFormat]]:
    """Yields (name of a published chat template, its format), but for those whose sentence it prints."""
    for template, tokenizer in TEMPLATES.items():
        with tempfile.TemporaryDirectory() as folder:
            try:
                yield template, load_chat_format(model_folder(Path(folder), template, tokenizer))
            except UserError as error:
                print(f"{template}: refused: {str(error).replace(folder, template)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=200_000, help="per form")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--published", action="store_true", help="published chat templates instead of the forms")
    args = parser.parse_args()
    for name, chat in published_formats() if args.published else ((name, format_of(name)) for name in FORMS):
        rng, counts = random.Random(args.seed), Counter[str]()
        with Progress(args.messages, "message", name) as progress:
            for number in range(args.messages):
                (check_sampled if number % 2 else check_rendered)(chat, rng, counts)
                if number % 1000 == 999:
                    progress.update(1000)
        print(f"{name}: " + ", ".join(f"{count:,} {what}" for what, count in sorted(counts.items())), flush=True)


if __name__ == "__main__":
    main()
