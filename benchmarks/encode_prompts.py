"""How long a text takes to become ids, with the published tokenizers: by itself, and as the message of a chat.

    python -m benchmarks.encode_prompts [--bytes 1000000]

Fetches the tokenizers as benchmarks/chat_templates.py does. The text is the source of this library, repeated. A message
is searched for control tokens before and after the template has it (data/chat/control_text.py). Prints a JSON object:
    TEMPLATE            the template, of which the tokenizer is that of its family
      control_tokens    control tokens of the tokenizer
      tokenizer_s       seconds of the tokenizer alone
      message_s         seconds of guarding and encoding the text as a part of a chat
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.chat_templates import TEMPLATES, model_folder
from composer_jax.data.chat.control_text import ControlText
from composer_jax.data.chat.load_chat_format import load_chat_format
from composer_jax.data.model_tokenizer import ModelTokenizer

MEASURED = ("trl/qwen3", "trl/deepseekv3", "trl/llama3_1", "trl/gemma3")


def source_text(size: int) -> str:
    """The first `size` characters of the library's source, repeated as often as that takes."""
    text = "".join(path.read_text() for path in sorted(Path("composer_jax").rglob("*.py")))
    return (text * (size // len(text) + 1))[:size]


def measure(tok: ModelTokenizer, text: str) -> dict[str, float]:
    """Encodes the text in both ways."""
    control = ControlText(tok)

    def seconds(encode: Callable[[], list[int]]) -> float:
        started = time.perf_counter()
        encode()
        return round(time.perf_counter() - started, 3)

    def message() -> list[int]:
        mark = control.mark(text)
        return control.ids(control.guard(text, mark), mark)

    return {
        "control_tokens": len(tok.control),
        "tokenizer_s": seconds(lambda: tok.encode(text)),
        "message_s": seconds(message),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, default=1_000_000, help="length of the text")
    args = parser.parse_args()
    text, rows = source_text(args.bytes), {}
    for template in MEASURED:
        with tempfile.TemporaryDirectory() as folder:
            tok = load_chat_format(model_folder(Path(folder), template, TEMPLATES[template])).tokenizer
            assert isinstance(tok, ModelTokenizer), template
            rows[template] = measure(tok, text)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
