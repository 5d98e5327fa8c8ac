"""Published chat templates against transformers: which render, turn by turn, with calls, with thinking.

    python -m benchmarks.chat_templates [--only qwen3 glm4moe] [--docs docs/bases.md]

Fetches the templates and tokenizers of tests/parity/published.py and needs transformers. Prints a table; --docs writes
it into that page, between its markers. Ids are compared with `apply_chat_template`, with the family's real tokenizer
where it is published, else with a small one that has the template's control tokens.

    equal      the same ids; for thinking, the same text
    one turn   equal until the next message of the user, after which the template drops earlier thinking
    different  other ids or another text; docs/bases.md says why gpt-oss' are, where words stand beside a call
    ours       the template writes no calls in a form that is read, so this library's own form is used
    continued  the generation prompt begins the thinking, which the template leaves out of every history
    refused    with the sentence below the table
    absent     the template itself refuses the conversation, or knows no thinking
"""

import argparse
import json
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from composer_jax.data.chat.chat_format import ChatFormat, Message, declarations
from composer_jax.data.chat.load_chat_format import load_chat_format
from composer_jax.data.chat.messages import AssistantMessage, ToolCall
from composer_jax.data.chat.text_tools import TextToolsFormat
from composer_jax.data.chat.thinking import split_thinking
from composer_jax.errors import UserError
from tests.data.formats import Declaration
from tests.data.model_folders import tokenizer_json
from tests.parity import published

TEMPLATES = {
    "trl/qwen2_5": "qwen3",
    "trl/qwen3": "qwen3",
    "trl/qwen3_instruct_2507": "qwen3",
    "trl/qwen3_vl": "qwen3",
    "trl/qwen3_5_think": "",
    "trl/qwen3_5_nothink": "",
    "trl/qwen3_6": "",
    "trl/qwen3_8": "",
    "trl/glm4moe": "",
    "trl/gptoss": "gptoss",
    "trl/deepseekv3": "deepseek_v3",
    "trl/deepseek_r1_distill": "deepseek_v3",
    "trl/nemotron_3_nano": "",
    "trl/nemotron_3_super": "",
    "trl/nemotron_3_ultra": "",
    "trl/llama3": "llama3",
    "trl/llama3_1": "llama3_1",
    "trl/llama3_2": "llama3_1",
    "trl/gemma": "",
    "trl/gemma3": "gemma3",
    "trl/gemma4": "",
    "trl/cohere": "",
    "trl/cohere2": "",
    "trl/phi3": "",
    "trl/lfm2": "",
    "axolotl/llama4": "",
    "axolotl/mistral_v1": "",
    "axolotl/mistral_v7_tekken": "",
    "axolotl/command_a": "",
    "axolotl/exaone4": "",
    "axolotl/phi_4": "",
    "axolotl/qwen_25": "qwen3",
    "axolotl/qwen3": "qwen3",
}
"""Template -> the tokenizer of its family; "" has a small one."""

ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<end_of_turn>",
    "<｜end▁of▁sentence｜>",
    "<|return|>",
    "<|END_OF_TURN_TOKEN|>",
    "<|end|>",
)
_CONTROL = re.compile(
    r"<\|[A-Za-z0-9_/]+\|>|<｜[^｜]+｜>|\[\|[a-z]+\|\]|\[/?[A-Z_]+\]|\[gMASK\]|<sop>|<\|?turn\|?>|"
    r"</?(?:think|tool_call|tool_response|arg_key|arg_value|start_of_turn|end_of_turn|s|bos|eos|tool_calls)>"
)
_ORDINARY = re.compile(r"</?(?:think|tool_call|tool_response|arg_key|arg_value)>")  # added, but not special

READ, TESTS = ToolCall("read", {"path": "a é.py", "start": 3}), ToolCall("run_tests", {})
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}, "start": {"type": "integer"}}}
TOOLS = [Declaration("read", "Shows a file.", SCHEMA), Declaration("run_tests", "Runs all tests.", {"type": "object"})]
ASK, MORE = Message("user", "What is x? \u4e2d\U0001f600"), Message("user", "And now?")
SAID, THOUGHT = (
    AssistantMessage("It is 3.", (), True),
    AssistantMessage("<think>\nI look.\n</think>\n\nIt is 3.", (), True),
)
SYSTEM = Message("system", "Be brief.")
PLAIN = ([ASK], [SYSTEM, ASK], [ASK, SAID, MORE], [ASK, SAID, MORE, SAID, MORE, SAID, MORE])
CALLS = (
    [ASK, AssistantMessage("I read.", (READ,), True), Message("tool", "x = 3\n\ny")],
    [ASK, AssistantMessage("", (READ, TESTS), True), Message("tool", "x = 3"), Message("tool", "ok"), SAID, MORE],
)

THINKS = [AssistantMessage(THOUGHT.content, (READ,), True), Message("tool", "x = 3")]
READS = [AssistantMessage("I read.", (READ,), True), Message("tool", "x = 3")]
ONE_TURN = ([ASK, *THINKS, *THINKS, THOUGHT], [ASK, *READS, *READS, SAID])
"""With thinking, and without."""


@dataclass
class Result:
    """What was found for one template: a word per column, and the sentences of refusals."""

    template: str
    tokenizer: str
    words: dict[str, str] = field(default_factory=dict)
    sentences: list[str] = field(default_factory=list)

    def note(self, error: Exception, folder: Path) -> None:
        """Adds the sentence of a refusal."""
        self.sentences.append(" ".join(str(error).replace(str(folder), self.template).split()))


def model_folder(folder: Path, template: str, tokenizer: str) -> Path:
    """Writes a model folder with a published template, and a published or a small tokenizer."""
    source = published.template(template)
    (folder / "chat_template.jinja").write_text(source)
    if tokenizer:
        for file in published.TOKENIZER_FILES:
            (folder / file).write_bytes((published.tokenizer_folder(tokenizer) / file).read_bytes())
        config = json.loads((folder / "tokenizer_config.json").read_text())
        config.pop("chat_template", None)
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        return folder
    texts = {*_CONTROL.findall(source), "<|endoftext|>", "<s>", "</s>"}
    (folder / "tokenizer.json").write_text(tokenizer_json({t: not _ORDINARY.fullmatch(t) for t in sorted(texts)}))
    end = next((text for text in ENDS if text in source), "</s>")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": end, "bos_token": "<s>"}))
    return folder


def rows_of(messages: Sequence[Message | AssistantMessage], template: str) -> list[dict[str, Any]]:
    """A conversation as transformers takes it; the thinking has a field of its own if the template reads that."""
    rows: list[dict[str, Any]] = []
    keys: list[tuple[str, str]] = []
    for message in messages:
        if isinstance(message, Message):
            rows.append({"role": message.role, "content": message.content})
            if message.role == "tool":
                key, name = keys.pop(0)
                rows[-1] |= {"tool_call_id": key, "name": name}
            continue
        rows.append({"role": "assistant", "content": message.content})
        thought, said = split_thinking(message.content)
        spelled = {"reasoning_content": "reasoning_content", "thinking": "message.thinking"}
        name = next((name for name, text in spelled.items() if text in template), None)
        if thought and name:
            rows[-1] |= {"content": said, name: thought}
        calls = [call for call in message.calls if isinstance(call, ToolCall)]
        keys = [(f"call{number:05d}", call.name) for number, call in enumerate(calls)]
        if calls:
            rows[-1]["tool_calls"] = [
                {"id": key, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for (key, _), call in zip(keys, calls, strict=True)
            ]
    return rows


class Theirs:
    """transformers with the files of a folder."""

    def __init__(self, folder: Path) -> None:
        from transformers import PreTrainedTokenizerFast  # pyright: ignore[reportMissingImports]  # optional

        config = json.loads((folder / "tokenizer_config.json").read_text())
        tokens = {
            name: value if isinstance(value, str) else value["content"]
            for name in ("bos_token", "eos_token", "pad_token")
            if (value := config.get(name))
        }
        self._template = (folder / "chat_template.jinja").read_text()
        self._tok: Any = PreTrainedTokenizerFast(  # its types leave out most of what it takes and returns
            tokenizer_file=str(folder / "tokenizer.json"), chat_template=self._template, **tokens
        )
        self.thinks = "think" in self._template

    def ids(
        self, messages: Sequence[Message | AssistantMessage], tools: Sequence[Declaration] = ()
    ) -> list[int] | None:
        """The ids of a conversation and the generation prompt; None if the template refuses it."""
        return self._ids(messages, tools, True)

    def answer(self, message: AssistantMessage) -> str | None:
        """The text of a message of the model after the generation prompt; None if it does not begin with that."""
        texts = [
            self._tok.apply_chat_template(
                rows_of(messages, self._template), add_generation_prompt=opened, tokenize=False
            )
            for messages, opened in (([ASK], True), ([ASK, message], False))
        ]
        return texts[1].removeprefix(texts[0]) if texts[1].startswith(texts[0]) else None

    def _ids(self, messages: Sequence[Message | AssistantMessage], tools: Sequence[Declaration], opened: bool) -> Any:
        try:
            return self._tok.apply_chat_template(
                rows_of(messages, self._template),
                tools=declarations(tools) or None,
                add_generation_prompt=opened,
                return_dict=False,
            )
        except Exception:  # a template may raise anything
            return None


def turn_by_turn(chat: ChatFormat, messages: Sequence[Message | AssistantMessage]) -> list[int]:
    """The ids of a conversation as an episode makes it."""
    first = next(at for at, message in enumerate(messages) if isinstance(message, AssistantMessage))
    ids = chat.render(messages[:first])
    answers: list[str] = []
    sampled: list[int] = []
    for at, message in enumerate(messages[first:], first):
        if isinstance(message, AssistantMessage):
            sampled = chat.render_assistant(message.content, [c for c in message.calls if isinstance(c, ToolCall)])
            ids += [*chat.generation_prompt, *sampled]
            answers = [later.content for later in messages[at + 1 : at + 1 + len(message.calls)]]
            if answers:
                ids += [i for piece in chat.bridge(sampled, answers) for i in piece]
            elif at < len(messages) - 1:
                ids += chat.close(sampled)
        elif message.role == "user":
            ids += chat.user([message.content], follows=ids)
    return ids


def compare(template: str, tokenizer: str, folder: Path) -> Result:
    """Compares one template in all columns."""
    result = Result(template, tokenizer or "small")
    try:
        chat = load_chat_format(model_folder(folder, template, tokenizer))
    except UserError as error:
        result.words = dict.fromkeys(("renders", "turn by turn", "calls", "thinking"), "refused")
        result.note(error, folder)
        return result
    theirs = Theirs(folder)

    def compared(
        conversations: Sequence[Sequence[Message | AssistantMessage]], tools: Sequence[Declaration] = ()
    ) -> str:
        words = set()
        for messages in conversations:
            want = theirs.ids(messages, tools)
            if want is None:
                words.add("absent")
                continue
            try:
                got = [*chat.render(messages, tools), *chat.generation_prompt]
            except (UserError, ValueError) as error:
                result.note(error, folder)
                words.add("refused")
                continue
            words.add("equal" if got == want else "different")
        return next(word for word in ("different", "refused", "equal", "absent") if word in words)

    result.words["renders"] = compared(PLAIN)
    result.words["turn by turn"] = _turns(chat, theirs, result, folder)
    result.words["calls"] = "ours" if isinstance(chat, TextToolsFormat) else compared(CALLS, TOOLS)
    result.words["thinking"] = _thinking(chat, theirs, result, folder)
    return result


def _turns(chat: ChatFormat, theirs: Theirs, result: Result, folder: Path) -> str:
    def is_same(messages: Sequence[Message | AssistantMessage]) -> bool | None:
        """None if the format or the template refuses the conversation."""
        try:
            return turn_by_turn(chat, messages) == chat.render(messages)
        except (UserError, ValueError) as error:
            result.note(error, folder)
            return None

    whole = [is_same(messages) for messages in (*PLAIN[2:], *CALLS)]
    if False not in whole:
        return "equal" if True in whole else "refused"
    one_turn = [is_same(messages) for messages in ONE_TURN]
    if True in one_turn:  # a template that thinks, or is asked not to, keeps one of the two
        return "one turn"
    return "continued" if theirs.answer(THOUGHT) is None else "different"


def _thinking(chat: ChatFormat, theirs: Theirs, result: Result, folder: Path) -> str:
    calls = (READ,)
    try:
        ids = chat.render_assistant(THOUGHT.content, [])
        if chat.parse(ids) != THOUGHT:
            return "different"
        with_call = chat.render_assistant(THOUGHT.content, calls)
        if chat.parse(with_call, TOOLS) != AssistantMessage(THOUGHT.content, calls, True):
            return "different"
    except ValueError as error:
        result.note(error, folder)
        return "refused"
    if not theirs.thinks:
        return "absent"
    want = theirs.answer(THOUGHT)
    while ids and ids[-1] in chat.end_tokens:
        ids.pop()
    if want is None:
        return "continued"
    return "equal" if want.startswith(chat.tokenizer.decode(ids)) else "different"


def table(results: Sequence[Result]) -> str:
    """The results as a Markdown table, with the sentences of refusals below it."""
    columns = ("renders", "turn by turn", "calls", "thinking")
    lines = ["| template | tokenizer | " + " | ".join(columns) + " |", "|---" * (len(columns) + 2) + "|"]
    for result in results:
        words = " | ".join(result.words[column] for column in columns)
        lines.append(f"| {result.template} | {result.tokenizer} | {words} |")
    sentences = [
        f"- {result.template}: {sentence}" for result in results for sentence in dict.fromkeys(result.sentences)
    ]
    return "\n".join([*lines, "", *sentences])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], help="templates whose name contains one of these")
    parser.add_argument("--docs", type=Path, help="page to write the table into")
    args = parser.parse_args()
    results = []
    for template, tokenizer in TEMPLATES.items():
        if not args.only or any(part in template for part in args.only):
            with tempfile.TemporaryDirectory() as folder:
                results.append(compare(template, tokenizer, Path(folder)))
    text = table(results)
    print(text)
    if args.docs:
        begin, end = "<!-- chat templates -->\n", "\n<!-- /chat templates -->"
        if not (begin in args.docs.read_text() and end in args.docs.read_text()):
            raise UserError(
                f"{args.docs} has no lines {begin.strip()} and {end.strip()}, between which the table belongs."
            )
        page = args.docs.read_text()
        before, _, rest = page.partition(begin)
        args.docs.write_text(f"{before}{begin}{text}{end}{rest.partition(end)[2]}")


if __name__ == "__main__":
    main()
