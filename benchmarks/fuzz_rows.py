"""Random rows through SFT's reader: `python -m benchmarks.fuzz_rows --rows=100000`, in a checkout with the tests.

A row is a conversation in one of the forms that data sets have, and half of the rows are damaged in one to three
places. Each is read and rendered in one of the chat formats of tests/data/formats.py. Every row must be refused with a
reason or be accepted whole: each word of its messages and tools occurs in the decoded tokens, those of trained messages
in trained ones and no others. Left out of account are columns that the reader reports as ignored, and what follows the
last trained message. Prints one JSON object: rows, accepted, refused by reason, and rows that crashed or lost words.
Ends with status 1 if there are any of these.

    --seed=N: other rows    --formats=NAME,NAME: other formats
"""

import argparse
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

from composer_jax.data.chat.chat_format import ChatFormat
from composer_jax.data.chat.compact import CompactFormat
from composer_jax.data.chat.conversations import TrainingConversation, conversation_trace, read_conversation
from composer_jax.errors import UserError
from composer_jax.observe.progress import Progress

FORMATS = ("compact", "qwen", "kimi", "chatml", "headers", "thinks", "opens")
_NOISE = (
    "",
    "",
    "",
    " ",
    "\n",
    "\n\n",
    "é",
    "e\u0301",
    "\u3042",
    "\U0001f600",
    "\u2028",
    "\0",
    '"',
    "\\",
    "{}",
    "&lt;",
)
_MARKERS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "</tool_response>",
    "<|im_end|>",
    "<|im_start|>",
    "[BOS]",
)
_NAMES = ("read", "3d_render", "get.weather", "-x")
_HARMLESS = ("id", "metadata", "name", "tool_call_id", "type")  # where a row may hold what is not read
_WORD = re.compile(r"word[0-9]+end")
_SHAREGPT = {"user": "human", "assistant": "gpt", "system": "system", "tool": "observation", "function": "tool"}


class RowWriter:
    """Writes random rows. No word occurs twice in a row that is not damaged."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._words = 0

    def row(self) -> dict[str, Any]:
        """Returns a row as a file of JSON lines holds it."""
        row = self._form(self._messages())
        if self._random.random() < 0.4:
            tools = [self._tool() for _ in range(self._random.randint(1, 2))]
            row[self._random.choice(("tools", "tools", "functions"))] = self._maybe_text(tools)
        if self._chance():
            row |= {"difficulty": 3, "source": self._text(), "id": "row"}
        if self._random.random() < 0.5:
            for _ in range(self._random.randint(1, 3)):
                self._damage(row)
        return row

    def _form(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        system = {}
        if messages[0]["role"] == "system" and self._chance():
            system = {"system": messages.pop(0)["content"]}
        kind = self._random.random()
        if kind < 0.15:
            return {"conversations": [self._sharegpt(message) for message in messages], **system}
        if kind < 0.3:
            return {"prompt": messages[:-1], "completion": messages[-1:], **system}
        if kind < 0.35:
            return {"prompt": self._text(), "completion": self._text(), **system}
        return {"messages": self._maybe_text(messages), **system}

    def _sharegpt(self, message: dict[str, Any]) -> dict[str, Any]:
        own = ("role", "content", "tool_calls", "function_call")
        others = {name: value for name, value in message.items() if name not in own}
        calls = [call["function"] for call in message.get("tool_calls", ())]
        calls += [message["function_call"]] if "function_call" in message else []
        if calls:
            return {"from": "function_call", "value": json.dumps(calls), **others}
        return {"from": _SHAREGPT[message["role"]], "value": message.get("content"), **others}

    def _messages(self) -> list[dict[str, Any]]:
        messages = [{"role": "system", "content": self._text()}] if self._chance() else []
        messages.append({"role": "user", "content": self._content()})
        for _ in range(self._random.randint(1, 3)):
            calls = self._random.choice((0, 0, 1, 2))
            said = self._said(calls)
            messages.append(said)
            for number in range(calls):
                answer = {"role": "tool", "tool_call_id": f"call{number}", "content": self._content()}
                if "function_call" in said:
                    answer = {"role": "function", "name": said["function_call"]["name"], "content": self._text()}
                messages.append(answer)
            if self._chance():
                messages.append({"role": "user", "content": self._content()})
        messages.append({"role": "assistant", "content": self._text()})
        for message in messages:
            if self._chance():
                message |= {"name": "someone", "metadata": "b", "audio": None, "images": []}
        return messages

    def _said(self, calls: int) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self._content()}
        if self._chance():
            message[self._random.choice(("reasoning_content", "reasoning", "thinking"))] = self._text()
        if self._chance():
            message |= self._random.choice(({"weight": 0}, {"weight": 1}, {"train": False}, {"train": True}))
        if calls == 1 and self._chance():
            message["function_call"] = self._function()
        elif calls:
            message["tool_calls"] = [
                {"id": f"call{number}", "type": "function", "function": self._function()} for number in range(calls)
            ]
        if calls and self._chance():
            message["content"] = None
        return message

    def _function(self) -> dict[str, Any]:
        arguments: Any = {self._word(): self._value(2) for _ in range(self._random.randint(0, 2))}
        if not arguments and self._chance():
            arguments = self._random.choice(("", None, "null"))
        return {"name": self._random.choice(_NAMES), "arguments": self._maybe_text(arguments)}

    def _value(self, depth: int) -> Any:
        kind = self._random.randint(0, 7 if depth else 5)
        if kind == 6:
            return [self._value(depth - 1) for _ in range(2)]
        if kind == 7:
            return {self._word(): self._value(depth - 1)}
        return (None, True, -3, 0.5, self._text(), self._text())[kind]

    def _tool(self) -> dict[str, Any]:
        schema = {"type": "object", "properties": {self._word(): {"type": "string"}}}
        tool = {"name": self._random.choice(_NAMES), "description": self._word(), "parameters": schema}
        return {"type": "function", "function": tool} if self._chance() else tool

    def _content(self) -> Any:
        if self._chance():
            return [{"type": "text", "text": self._text()} for _ in range(2)]
        return self._text()

    def _text(self) -> str:
        pieces = [self._random.choice(_NOISE), self._word(), self._random.choice(_NOISE)]
        if self._random.random() < 0.1:
            pieces.insert(self._random.randint(0, 3), self._random.choice(_MARKERS))
        return "".join(pieces)

    def _word(self) -> str:
        self._words += 1
        return f"word{self._words}end"

    def _chance(self) -> bool:
        return self._random.random() < 0.25

    def _maybe_text(self, value: Any) -> Any:
        return json.dumps(value) if not isinstance(value, str) and self._random.random() < 0.25 else value

    def _damage(self, row: dict[str, Any]) -> None:
        """Deletes, replaces, renames, doubles or adds something at a random place."""
        within: Any
        within, key = self._random.choice([*_places(row), (row, "messages")])
        action = self._random.randint(0, 4)
        if action == 0:
            within.pop(key, None) if isinstance(within, dict) else within.pop(key)
        elif action == 1:
            within[key] = self._junk() if key not in _HARMLESS else "junk"
        elif isinstance(within, dict) and action == 2:
            within[self._random.choice(("text", "thoughts", "contents"))] = within.pop(key, None)
        elif isinstance(within, dict):
            within[self._random.choice(("refusal", "prefix", "weight", "train", "system", "role"))] = self._junk()
        elif action == 3:
            within.insert(key, within[key])
        else:
            within.append(self._junk())

    def _junk(self) -> Any:
        nested: Any = "deep"
        for _ in range(self._random.choice((2, 150, 300))):
            nested = {"a": nested}
        junk = (None, "", " ", "junk", "\ud800", 0, 1, 0.5, True, False, [], {}, ["junk"], float("nan"), nested)
        return self._random.choice((*junk, self._text(), {"role": "assistant", "content": self._text()}))


def _places(value: Any) -> Any:
    """Yields (container, key) of every value within a value."""
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _places(value[key])


def lost_words(row: dict[str, Any], chat: ChatFormat) -> tuple[set[str], set[str]]:
    """Reads and renders a row; returns the words that it lost, and those that are trained or not against its marks.

    Raises ValueError or UserError for a row that is refused.
    """
    conversation = read_conversation(row)
    tokens, mask = conversation_trace(conversation, chat)
    read = {name: value for name, value in row.items() if name not in conversation.ignored_columns}
    wanted = _words(read) - _words_after(conversation)
    if isinstance(chat, CompactFormat):  # which declares no tools
        wanted -= _words([row.get("tools"), row.get("functions")])
    written, trained = (_words(chat.tokenizer.decode(ids.tolist())) for ids in (tokens, tokens[mask]))
    to_train = _words([turn.message for turn in conversation.turns if turn.trained])
    others = _words([turn.message for turn in conversation.turns if not turn.trained])
    others |= _words([conversation.prompt, [(turn.answers, turn.later) for turn in conversation.turns]])
    return wanted - written, (to_train - trained) | (trained & (others - to_train))


def _words_after(conversation: TrainingConversation) -> set[str]:
    """The words after the last trained message, which nobody learns from."""
    last = max(place for place, turn in enumerate(conversation.turns) if turn.trained)
    turn, *later = conversation.turns[last:]
    before = _words([conversation.prompt, conversation.turns[:last], turn.message, conversation.tools])
    return _words([turn.answers, turn.later, later]) - before


def _words(value: Any) -> set[str]:
    return set(_WORD.findall(value if isinstance(value, str) else repr(value)))


def fuzz(rows: int, seed: int, formats: dict[str, ChatFormat], on_row: Callable[[], object] = bool) -> dict[str, Any]:
    """Returns what became of random rows: counts, reasons of refusals, and the rows that went wrong."""
    writer, names = RowWriter(seed), list(formats)
    refused, wrong, accepted = Counter[str](), [], 0
    for number in range(rows):
        row = json.loads(json.dumps(writer.row()))
        name = names[number % len(names)]
        try:
            lost, misplaced = lost_words(row, formats[name])
        except (ValueError, UserError) as error:
            refused[re.sub(r"'[^']*'|[0-9]+|\"[^\"]*\"", "_", str(error))[:90]] += 1
        except Exception as error:  # what this looks for
            wrong.append({"format": name, "row": row, "error": repr(error)})
        else:
            accepted += 1
            if lost or misplaced:
                wrong.append({"format": name, "row": row, "lost": sorted(lost), "misplaced": sorted(misplaced)})
        on_row()
    return {
        "rows": rows,
        "accepted": accepted,
        "refused": sum(refused.values()),
        "reasons": dict(refused.most_common(40)),
        "wrong": len(wrong),
        "wrong_rows": wrong[:5],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--formats", default=",".join(FORMATS))
    o = parser.parse_args()
    from tests.data.formats import format_of

    formats = {name: format_of(name) for name in o.formats.split(",")}
    with Progress(o.rows, "rows", "fuzz") as progress:
        result = fuzz(o.rows, o.seed, formats, lambda: progress.update(1))
    print(json.dumps(result))
    sys.exit(bool(result["wrong"]))


if __name__ == "__main__":
    main()
