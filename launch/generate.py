"""Generates text from any weights: python -m launch.generate --checkpoint=hf:DIR --prompt="def add(a, b):"

    python -m launch.generate --checkpoint=hf:DIR --chat --prompt="What does zip() do?" --temperature=0
    python -m launch.generate --checkpoint=gguf:FILE --file=module.py --max_tokens=200
    python -m launch.generate --checkpoint=runs/demo < prompt.txt

The prompt is --prompt, the file --file, or standard input, each taken as it is. Without --chat the model continues it;
with --chat it is the message of a user, and the model answers. The text is written to standard output as it is sampled,
and nothing else is; everything else goes to standard error. Temperature, top_p, top_k and min_p default to those of the
model's generation_config.json, or to 1, 1, 0 and 0. Temperature 0 always takes the likeliest token.

Several hosts run the same command; process 0 reads the prompt and writes the text.
"""

import io
import os
import sys

from absl import flags as absl_flags

from composer_jax.errors import UserError
from launch import flags

AXES = ("data", "expert", "tensor")


def define(values):
    string = lambda name, meaning: absl_flags.DEFINE_string(name, None, meaning, flag_values=values)  # noqa: E731
    number = lambda name, meaning: absl_flags.DEFINE_float(name, None, meaning, flag_values=values)  # noqa: E731
    integer = lambda name, default, meaning: absl_flags.DEFINE_integer(  # noqa: E731
        name, default, meaning, flag_values=values
    )
    string("checkpoint", "Weights: hf:DIR, gguf:FILE, a run folder, or a folder of our checkpoints.")
    absl_flags.DEFINE_bool("chat", False, "Answer the prompt in the model's chat format.", flag_values=values)
    string("prompt", "The prompt.")
    string("file", "A UTF-8 file with the prompt.")
    integer("max_tokens", 512, "Most tokens to sample.")
    number("temperature", "Divides the logits; 0 always takes the likeliest token.")
    number("top_p", "Sample from the likeliest tokens that together have this probability.")
    integer("top_k", None, "Sample from this many of the likeliest tokens; 0 is all.")
    number("min_p", "Of those, keep tokens with at least this fraction of the likeliest one's probability.")
    integer("seed", 0, "Fixes all random choices.")
    absl_flags.DEFINE_multi_string(
        "stop", [], "A text that ends the output, which includes it; may be repeated.", flag_values=values
    )
    string("dtype", "float32, bfloat16 or float16; the default is that of the weights.")
    for axis in AXES:
        integer(axis, 1, f"Devices along mesh axis {axis}.")
    return ("checkpoint",)


def main(values):
    from composer_jax.parallel.processes import broadcast_from_process0
    from composer_jax.stages.generate import generate

    prompt = broadcast_from_process0(lambda: _read_prompt(values.prompt, values.file))
    pieces = generate(
        values.checkpoint,
        prompt,
        chat=values.chat,
        dtype=values.dtype,
        axes={axis: values[axis].value for axis in AXES if values[axis].value != 1},
        seed=values.seed,
        options={
            "max_tokens": values.max_tokens,
            "temperature": values.temperature,
            "top_p": values.top_p,
            "top_k": values.top_k,
            "min_p": values.min_p,
            "stop": values.stop,
        },
    )
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character shows another one
    try:
        for piece in pieces:
            print(piece, end="", flush=True)
        if sys.stdout.isatty():
            print()
    except BrokenPipeError:  # the reader has enough, as in `| head`; Python would complain while it flushes at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _read_prompt(prompt: str | None, file: str | None) -> str:
    """Returns the prompt. Raises UserError unless there is exactly one, and for a file that is not text."""
    if prompt is not None and file is not None:
        raise UserError("give either --prompt=TEXT or --file=FILE, not both.")
    if prompt is not None:
        return prompt
    if file is None and (sys.stdin is None or sys.stdin.isatty()):
        raise UserError("a prompt is missing: give --prompt=TEXT, --file=FILE, or a text on standard input.")
    from composer_jax.storage.local_copy import local_copy

    try:
        return (sys.stdin.buffer.read() if file is None else local_copy(file).read_bytes()).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the prompt {file or 'on standard input'}: {error}") from error


if __name__ == "__main__":
    flags.run(main, define=define)
