"""TextProcessor: the way from text to the token ids of a model and back, and how the model is meant to be sampled.

It reads no weights, so a prompt can be refused before they are loaded.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, Unpack

from composer_jax.data.chat.chat_format import ChatFormat, Conversation, Message, ToolSpec
from composer_jax.data.chat.control_text import ControlText
from composer_jax.data.chat.conversations import assistant_row, read_messages, read_tools, text_row
from composer_jax.data.chat.load_chat_format import (
    GenerationDefaults,
    load_chat_format,
    load_tokenizer,
    read_generation_defaults,
)
from composer_jax.data.chat.messages import AssistantMessage
from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.data.model_tokenizer import ModelTokenizer
from composer_jax.data.text_files import TextFiles
from composer_jax.data.text_tokenizer import TextTokenizer, check_vocab_size
from composer_jax.errors import UserError

if TYPE_CHECKING:
    from composer_jax.models.config import ModelConfig

MAX_TOKENS = 512
"""Most tokens of an answer whose length nobody asked for."""

T = TypeVar("T")
Messages = str | Sequence[Message | AssistantMessage | Mapping[str, Any]]
"""A conversation: one user message, or messages, which may be OpenAI's {"role": ..., "content": ..., ...}."""


class SamplingOptions(TypedDict, total=False):
    """Keywords of Model.generate and Model.chat; None, or absent, is the model's default."""

    max_tokens: int
    """Most tokens to sample, 512 if absent; fewer where the context ends before."""
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    stop: str | Sequence[str]
    """Texts that end the answer, which includes them."""


class FilesInMemory:
    """TextFiles (data/text_files.py) whose contents have been read."""

    def __init__(self, files: Mapping[str, bytes], name: str) -> None:
        self.name, self._files = name, files

    def text(self, file: str) -> str | None:
        """See TextFiles.text."""
        try:
            return self._files[file].decode() if file in self._files else None
        except UnicodeDecodeError as error:
            raise UserError(f"{self.name}/{file} cannot be read ({error}); download it again") from error


@dataclasses.dataclass(frozen=True)
class _NamedFiles:
    """TextFiles under another name."""

    files: TextFiles
    name: str

    def text(self, file: str) -> str | None:
        """See TextFiles.text."""
        return self.files.text(file)


class ContextOverflow(UserError):
    """A prompt of `n_tokens` tokens that leaves no room for an answer."""

    def __init__(self, message: str, n_tokens: int) -> None:
        super().__init__(message)
        self.n_tokens = n_tokens


class TextProcessor:
    """The text side of a model. Tokenizer and chat format load on first use; a model may lack either.

    files: with the names of a Hugging Face folder. config: of the network. name: of the model, for error messages.
    """

    def __init__(self, files: TextFiles, config: ModelConfig, name: str) -> None:
        self.files, self.config, self.name = files, config, name

    def named(self, name: str) -> TextProcessor:
        """Returns the text side of the same model, whose errors call it `name` instead of naming its files' place.

        The generation defaults are read before, so that an error about them says where their file is.
        """
        named = TextProcessor(_NamedFiles(self.files, name), self.config, name)
        named.defaults = self.defaults
        return named

    @functools.cached_property
    def tokenizer(self) -> TextTokenizer:
        """The tokenizer. Raises UserError if the model has none, or one with more ids than the embedding has rows."""
        tokenizer = load_tokenizer(self.files)
        check_vocab_size(tokenizer, self.config.vocab_size, self.name)
        return tokenizer

    @functools.cached_property
    def chat_format(self) -> ChatFormat:
        """The chat format. Raises UserError if the model has none, or one that cannot be used."""
        self.tokenizer  # noqa: B018 - refuses one that does not fit the network
        return load_chat_format(self.files)

    @functools.cached_property
    def defaults(self) -> GenerationDefaults:
        """Sampling parameters of requests that do not name them."""
        return read_generation_defaults(self.files)

    @functools.cached_property
    def end_tokens(self) -> tuple[int, ...]:
        """Ids that end what the model samples: those of its chat format and generation defaults, and an end of text."""
        of_chat = _or_none(lambda: self.chat_format.end_tokens) or ()
        of_document = _or_none(lambda: self.tokenizer.eod)
        ids = [*of_chat, *self.defaults.end_ids, *([] if of_document is None else [of_document])]
        return tuple(dict.fromkeys(ids))

    def params(self, **options: Unpack[SamplingOptions]) -> SamplingParams:
        """Returns the parameters of a request: `options`, and the model's defaults for what they leave open.

        Raises UserError when an option, or a default in generation_config.json, is out of range.
        """
        fields = {name: options.get(name) for name in ("temperature", "top_p", "top_k", "min_p")}
        fields = {name: getattr(self.defaults, name) if value is None else value for name, value in fields.items()}
        stop = options.get("stop", ())
        strings = (stop,) if isinstance(stop, str) else tuple(stop)
        return SamplingParams(options.get("max_tokens", MAX_TOKENS), **fields, stop_strings=strings)

    def encode_prompt(
        self, prompt: str | Sequence[int], *, parse_special: bool = False, add_special_tokens: bool = True
    ) -> list[int]:
        """Returns the ids of a text to continue; ids stay as they are.

        Args:
          parse_special: whether the control tokens that the text spells are those tokens, instead of characters.
          add_special_tokens: whether the id with which texts begin is put before it, unless it is there.

        Raises ContextOverflow for a prompt that fills the context, UserError for an empty one, ids that the network
        does not have, or `parse_special` with our own tokenizer, whose control tokens have no spelling.
        """
        if not isinstance(prompt, str):
            return self._check(list(prompt))
        if not prompt:
            raise UserError("the prompt is empty; give a text to continue.")
        ids = self._encode_control(prompt) if parse_special else self.tokenizer.encode_document(prompt)
        bos = self.tokenizer.bos if add_special_tokens else None
        return self._check(ids if bos is None or ids[:1] == [bos] else [bos, *ids])

    @functools.cached_property
    def _control(self) -> ControlText:
        if not isinstance(self.tokenizer, ModelTokenizer):
            raise UserError(
                f"the control tokens of {self.name} cannot be spelled; send their ids, or no parse_special."
            )
        return ControlText(self.tokenizer)

    def _encode_control(self, prompt: str) -> list[int]:
        return self._control.ids(prompt, self._control.mark(prompt), before="")

    def encode_chat(self, messages: Messages, tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Returns the ids of a conversation and of the beginning of the model's answer.

        tools: declarations in OpenAI's form.

        Messages of the system stay where they are if the format writes them there. Several at the beginning become one
        message if it does not; any other is refused.

        Raises ContextOverflow for a conversation that fills the context, UserError for an empty one, an empty message,
        a last message of the model, or calls without answers.
        """
        conversation = as_conversation(messages)
        try:
            rendered = self._render(conversation, read_tools(list(tools)))
        except ValueError as error:
            raise UserError(f"the conversation cannot be written: {error}") from error
        return self._check([*rendered, *self.chat_format.generation_prompt])

    def _render(self, conversation: Conversation, tools: Sequence[ToolSpec]) -> list[int]:
        """Renders a conversation; a format that writes one message of the system gets the first ones as one."""
        try:
            return self.chat_format.render(conversation, tools)
        except (ValueError, UserError):
            first = list(itertools.takewhile(lambda message: getattr(message, "role", "") == "system", conversation))
            if len(first) < 2:
                raise
        joined = Message("system", "\n\n".join(message.content for message in first))
        return self.chat_format.render([joined, *conversation[len(first) :]], tools)

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of sampled ids without end tokens; other control tokens are shown by name."""
        return self.tokenizer.decode(i for i in ids if i not in self.end_tokens)

    def _check(self, ids: list[int]) -> list[int]:
        if not ids:
            raise UserError("the prompt is empty; give at least one token.")
        if len(ids) >= self.config.max_context:
            raise ContextOverflow(
                f"the prompt has {len(ids)} tokens, and the context of {self.name} holds {self.config.max_context}, "
                "the answer included; shorten it.",
                len(ids),
            )
        for i in ids:
            if not 0 <= i < self.config.vocab_size:
                raise UserError(
                    f"the prompt has the token id {i}; those of {self.name} are 0 to {self.config.vocab_size - 1}."
                )
        return ids


def _or_none(find: Callable[[], T]) -> T | None:
    """None where a model has no tokenizer or chat format: it samples all the same."""
    try:
        return find()
    except UserError:
        return None


def as_conversation(messages: Messages) -> list[Message | AssistantMessage]:
    """Returns messages in the form of chat formats.

    Raises UserError for no messages, an empty one of the user, one that is not OpenAI's form, or a last one of the
    model.
    """
    if isinstance(messages, str):
        messages = [Message("user", messages)]
    conversation = _parse([*messages])
    if not conversation:
        raise UserError("the conversation is empty; give at least one message.")
    if isinstance(conversation[-1], AssistantMessage):
        raise UserError("the conversation ends with a message of the model; end it with one that the model can answer.")
    for message in conversation:
        if isinstance(message, Message) and message.role == "user" and not message.content:
            raise UserError("the prompt is empty: a message of the user has no text.")
    return conversation


def _parse(messages: list[Message | AssistantMessage | Mapping[str, Any]]) -> list[Message | AssistantMessage]:
    """Returns messages of which some may be rows in OpenAI's form."""
    rows: list[Mapping[str, Any]] = []
    for message in messages:
        if isinstance(message, AssistantMessage):
            row: Mapping[str, Any] = assistant_row(message, 0)
        elif isinstance(message, Message):
            row = text_row(message.role, message.content)
        else:
            row = message
        rows.append(row)
    try:
        return read_messages(rows)
    except ValueError as error:
        raise UserError(f"the conversation cannot be read: {error}.") from error
