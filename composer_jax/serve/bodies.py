"""The bodies of requests: which fields are read, and which values are refused because the engine has no such thing.

Fields that change nothing of the answer (`user`, `metadata`, `store` and the like) are accepted and not read.
"""

from functools import cached_property
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    ValidationError,
    field_validator,
    model_validator,
)

from composer_jax.data.chat.load_chat_format import GenerationDefaults
from composer_jax.data.chat.message_fields import check_depth
from composer_jax.data.chat.messages import read_json
from composer_jax.data.chat.sampling_params import MOST_TOP_LOGPROBS, SamplingParams
from composer_jax.errors import UserError
from composer_jax.sampler.weight_checksums import WeightChecksum
from composer_jax.serve.errors import ApiError
from composer_jax.serve.responses_input import ClientTool, read_client_tools

MOST_CHOICES = 128
MOST_STOPS, LONGEST_STOP = 32, 1000
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "logit_bias": (None, {}),
    "response_format": (None, {"type": "text"}),
    "guided_json": (None,),
    "guided_regex": (None,),
    "structured_outputs": (None,),
    "use_beam_search": (None, False),
    "suffix": (None, ""),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "top_logprobs": (None, 0),
    "prompt_logprobs": (None,),
    "return_routed_experts": (None, False),
    "routed_experts_prompt_start": (None, 0),
    "previous_response_id": (None,),
    "background": (None, False),
    "conversation": (None,),
    "text": (None, {}),
    "prompt": (None,),
    "modalities": (None, [], ["text"]),
    "context_management": (None, []),
    "min_tokens": (None, 0),
    "ignore_eos": (None, False),
    "bad_words": (None, []),
    "allowed_token_ids": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "chat_template": (None,),
    "chat_template_kwargs": (None, {}),
    "continue_final_message": (None, False),
    "add_generation_prompt": (None, True),
    "truncation": (None, "disabled"),
    "parse_special": (None, False),
    "add_special_tokens": (None, False),
}
"""Fields that would change the answer and are not built, with the values that change nothing."""


def _check_choice(choice: Any) -> Any:
    if choice == "required" or isinstance(choice, dict):
        raise ValueError('the engine cannot force a call; use "auto" or "none"')
    return choice


ToolChoice = Annotated[Literal["auto", "none"] | None, BeforeValidator(_check_choice)]
Number = Annotated[float, Field(strict=True)]  # integers count, booleans and texts do not
Body = TypeVar("Body", bound="SamplingBody")


class SamplingBody(BaseModel):
    """What the three endpoints have in common."""

    model_config = ConfigDict(extra="allow")

    model: StrictStr | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: StrictInt | None = None
    min_p: Number | None = None
    seed: StrictInt | None = None
    n: Annotated[StrictInt, Field(ge=1, le=MOST_CHOICES)] | None = None
    stop: StrictStr | list[StrictStr] | None = None
    stop_token_ids: list[StrictInt] | None = None
    stream: StrictBool | None = None
    priority: StrictInt = 0
    return_token_ids: StrictBool | None = None
    max_tokens: StrictInt | None = None

    def sampling_params(self, defaults: GenerationDefaults, max_tokens: int) -> SamplingParams:
        """Returns the engine's parameters; what the body leaves open is the model's default.

        Raises ApiError for a parameter out of range.
        """
        stop, ids = self.stop_texts, self.stop_token_ids or []
        if max(len(stop), len(ids)) > MOST_STOPS or max(map(len, stop), default=0) > LONGEST_STOP:
            raise ApiError(
                f"stop has at most {MOST_STOPS} texts of {LONGEST_STOP} characters; send less.", param="stop"
            )
        given = {name: getattr(self, name) for name in ("temperature", "top_p", "top_k", "min_p")}
        fields = {name: getattr(defaults, name) if value is None else value for name, value in given.items()}
        if fields["top_k"] == -1:  # all tokens, as vLLM writes it
            fields["top_k"] = 0
        try:
            return SamplingParams(
                max_tokens, **fields, **self.asked_details(), stop_ids=tuple(ids), stop_strings=tuple(stop)
            )
        except UserError as error:
            raise ApiError(str(error)) from error

    @property
    def stop_texts(self) -> list[str]:
        """The texts that end an answer."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def asked_tokens(self) -> int | None:
        """Most tokens that the request allows; None leaves it to the server."""
        return self.max_tokens

    def asked_details(self) -> dict[str, Any]:
        """Returns the fields of SamplingParams that add something to the answer."""
        return {}


class StreamOptions(BaseModel):
    include_usage: StrictBool = False


class DetailedBody(SamplingBody):
    """With what the two older endpoints can say about tokens."""

    prompt_logprobs: Annotated[StrictInt, Field(ge=0, le=MOST_TOP_LOGPROBS)] | None = None
    """Number of likeliest tokens at each place of the prompt, whose own log-probabilities come with them."""
    return_routed_experts: StrictBool | None = None
    routed_experts_prompt_start: Annotated[StrictInt, Field(ge=0)] = 0
    """Tokens of the prompt whose experts the client has already."""
    stream_options: StreamOptions | None = None

    @property
    def n_top_logprobs(self) -> int | None:
        """Likeliest tokens at each place of the answer; None gives no log-probabilities."""
        raise NotImplementedError("each endpoint has a field of its own for it")

    def asked_details(self) -> dict[str, Any]:
        return {
            "top_logprobs": max(self.n_top_logprobs or 0, self.prompt_logprobs or 0),
            "prompt_logprobs": self.prompt_logprobs is not None,
            "return_routing": bool(self.return_routed_experts),
            "routing_start": self.routed_experts_prompt_start if self.return_routed_experts else 0,
        }


class ChatBody(DetailedBody):
    """Of POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: StrictBool | None = None
    max_completion_tokens: StrictInt | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=MOST_TOP_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _check_top_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs; set logprobs to true")
        return self

    @property
    def n_top_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def asked_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class PromptBody(BaseModel):
    """How the text of a prompt is encoded."""

    parse_special: StrictBool | None = None
    """Whether control tokens that the text spells are those tokens (llama.cpp's name); characters by default."""
    add_special_tokens: StrictBool | None = None
    """Whether the token with which texts begin is put before the prompt (vLLM's name), which it is by default."""

    def encode_options(self) -> dict[str, bool]:
        """Returns the keywords of TextProcessor.encode_prompt that the body states."""
        options = {"parse_special": self.parse_special, "add_special_tokens": self.add_special_tokens}
        return {name: value for name, value in options.items() if value is not None}


class CompletionBody(DetailedBody, PromptBody):
    """Of POST /v1/completions."""

    prompt: StrictStr | list[StrictStr] | list[StrictInt] | list[list[StrictInt]]
    echo: StrictBool | None = None
    logprobs: Annotated[StrictInt, Field(ge=0, le=MOST_TOP_LOGPROBS)] | StrictBool | None = None
    best_of: StrictInt | None = None

    @property
    def n_top_logprobs(self) -> int | None:
        return None if self.logprobs is None or self.logprobs is False else int(self.logprobs)

    def asked_details(self) -> dict[str, Any]:
        details = super().asked_details()
        return details | {"prompt_logprobs": details["prompt_logprobs"] or self.scores_echo}

    @property
    def scores_echo(self) -> bool:
        """Whether the log-probabilities begin with those of the prompt."""
        return bool(self.echo) and self.n_top_logprobs is not None


class TextOptions(BaseModel):
    """Of a response's text. How long the model is to write (verbosity) is a hint that is not read."""

    format: dict[str, Any] | None = None

    @field_validator("format")
    @classmethod
    def _check_format(cls, value: Any) -> Any:
        if value not in (None, {"type": "text"}):
            raise ValueError('the engine writes text only; use {"type": "text"}')
        return value


class ResponsesBody(SamplingBody):
    """Of POST /v1/responses."""

    input: StrictStr | list[dict[str, Any]]
    instructions: StrictStr | None = None
    text: TextOptions | None = None
    include: list[StrictStr] | None = None
    """What else the answer shall hold. Results of tools and encrypted reasoning are not made here and left out."""
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: StrictBool | None = None
    max_output_tokens: StrictInt | None = None

    @field_validator("include")
    @classmethod
    def _check_include(cls, include: list[str] | None) -> list[str] | None:
        if "message.output_text.logprobs" in (include or ()):
            raise ValueError("message.output_text.logprobs is not built; use /v1/chat/completions with logprobs")
        return include

    @property
    def asked_tokens(self) -> int | None:
        return self.max_output_tokens

    @cached_property
    def client_tools(self) -> dict[str, ClientTool]:
        """The tools that the model may call, by the names that it uses. Raises ApiError as `read_client_tools`."""
        return read_client_tools([] if self.tool_choice == "none" else self.tools or [])


class TextBody(PromptBody):
    """Of POST /tokenize: a text, or a conversation, of which the template writes the control tokens."""

    prompt: StrictStr | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None


class IdsBody(BaseModel):
    """Of POST /detokenize."""

    tokens: list[StrictInt]


class WeightsBody(BaseModel):
    """Of POST /update_weights."""

    checkpoint: StrictStr
    version: StrictInt | None = None
    mode: Literal["keep", "recompute", "drain"] = "keep"
    checksums: tuple[WeightChecksum, ...] | None = None
    """Those of the trainer's weights after the server's cast; the server refuses weights that have others."""


def parse_body(kind: type[BaseModel], data: bytes) -> Any:
    """Parses the body of a request.

    Raises ApiError if it is no JSON object, or has a field of another type or one that asks for something that is not
    built.
    """
    try:
        value = read_json(data.decode(), "the body's values")
        check_depth(value)
    except UnicodeDecodeError as error:
        raise ApiError(f"the body is not UTF-8 at byte {error.start}; send JSON in UTF-8.") from error
    except (ValueError, RecursionError) as error:
        raise ApiError(f"{error}; correct the body.") from error
    if not isinstance(value, dict):
        raise ApiError("the body is not a JSON object; send {...}.")
    for field, neutral in NEUTRAL.items():
        if field in value and field not in kind.model_fields and value[field] not in neutral:
            raise ApiError(f"{field} is not supported; leave it out.", param=field)
    try:
        return kind.model_validate(value)
    except (ValidationError, RecursionError) as error:
        raise _refusal(error) from error


def _refusal(error: Exception) -> ApiError:
    if not isinstance(error, ValidationError):
        return ApiError("the body is nested too deeply.")
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    reason = first["msg"].removeprefix("Value error, ")
    return ApiError(f"{place}: {reason}.", param=str(first["loc"][0]) if first["loc"] else None)
