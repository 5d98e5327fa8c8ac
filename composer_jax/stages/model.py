"""Model: published weights ready for use: network, weights on a mesh, tokenizer and chat format.

It generates text, answers in a conversation, and is a Policy (sampler/policy.py) that plays episodes.
"""

import contextlib
import dataclasses
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, Unpack, overload

import jax
from jax.sharding import Mesh

from composer_jax.checkpoint.checkpoint import Checkpoint, open_checkpoint
from composer_jax.data.chat.chat_format import ChatFormat
from composer_jax.data.chat.load_chat_format import GenerationDefaults
from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.data.chat.text_processor import Messages, SamplingOptions, TextProcessor
from composer_jax.data.text_tokenizer import TextTokenizer
from composer_jax.event_loop import EventLoop
from composer_jax.models.model_def import ModelDef, Params
from composer_jax.parallel.dispatch import dispatch_without_drops
from composer_jax.parallel.mesh import batch_shards, make_mesh
from composer_jax.parallel.processes import is_first_process, process_count
from composer_jax.sampler.config import SamplerConfig
from composer_jax.sampler.detokenizer import IncrementalDetokenizer
from composer_jax.sampler.sampler import Sampler
from composer_jax.sampler.session import EngineSession

SMALLEST_CAPACITY, GROWTH = 512, 4
"""A context holds 512 tokens, or 4, 16, 64, ... times as many: few sizes compile, and a short text needs no large
cache."""
SESSION_CAPACITY = 32_768
"""Tokens of a session's context, or the model's max_context if that is shorter."""


class Model:
    """A network with weights, and what turns text into its tokens and back.

    Attributes:
      definition, params, router_bias: the network and its weights.
      mesh: where the weights lie.
      text: tokenizer, chat format and generation defaults, each loaded on first use.
      sampler_config: sizes of the sampler; None follows the length of each text, for one conversation at a time.

    `generate` and `chat` block and work in a notebook. Sessions (`async with model.serving(): await model.open(seed)`)
    are for code that is asynchronous itself. The sampler is made and compiled when it is first needed.

    On a mesh over several processes, every process must make the same calls of `generate` and `chat`. Process 0 gets
    the text, and the others an empty one.
    """

    def __init__(
        self,
        definition: ModelDef,
        params: Params,
        router_bias: Params,
        mesh: Mesh,
        text: TextProcessor,
        sampler_config: SamplerConfig | None = None,
    ) -> None:
        self.definition, self.params, self.router_bias, self.mesh = definition, params, router_bias, mesh
        self.text, self.sampler_config = text, sampler_config
        self._sampler: Sampler | None = None

    @property
    def tokenizer(self) -> TextTokenizer:
        """The tokenizer. Raises UserError if the model has none."""
        return self.text.tokenizer

    @property
    def chat_format(self) -> ChatFormat:
        """The chat format. Raises UserError if the model has none that can be used."""
        return self.text.chat_format

    @property
    def defaults(self) -> GenerationDefaults:
        """Temperature, top_p, top_k, min_p and end tokens of generation_config.json."""
        return self.text.defaults

    # -- text ----------------------------------------------------------------------------------------------------

    @overload
    def generate(
        self, prompt: str, *, stream: Literal[False] = False, seed: int = 0, **options: Unpack[SamplingOptions]
    ) -> str: ...
    @overload
    def generate(
        self, prompt: str, *, stream: Literal[True], seed: int = 0, **options: Unpack[SamplingOptions]
    ) -> Iterator[str]: ...
    @overload
    def generate(
        self,
        prompt: Sequence[int],
        *,
        stream: Literal[False] = False,
        seed: int = 0,
        **options: Unpack[SamplingOptions],
    ) -> list[int]: ...
    @overload
    def generate(
        self, prompt: Sequence[int], *, stream: Literal[True], seed: int = 0, **options: Unpack[SamplingOptions]
    ) -> Iterator[list[int]]: ...

    def generate(self, prompt, *, stream=False, seed=0, **options):
        """Continues a text, or token ids; returns what follows it, of the same type.

        Text excludes the token that ends it; ids include it. stream=True returns an iterator of pieces instead, as they
        are sampled; its text never splits a character. Raises UserError for an empty prompt, one that fills the
        context, parameters out of range, or no tokenizer for a text.

        Args:
          seed: fixes all random choices.
          options: max_tokens, temperature, top_p, top_k, min_p and stop (SamplingOptions).
        """
        ids = self.text.encode_prompt(prompt)
        tokens = self._stream_tokens(ids, self.text.params(**options), seed)
        if isinstance(prompt, str):
            pieces = _stream_text(tokens, self.text.decode)
            return pieces if stream else "".join(pieces)
        return tokens if stream else [token for piece in tokens for token in piece]

    @overload
    def chat(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        stream: Literal[False] = False,
        seed: int = 0,
        **options: Unpack[SamplingOptions],
    ) -> str: ...
    @overload
    def chat(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        stream: Literal[True],
        seed: int = 0,
        **options: Unpack[SamplingOptions],
    ) -> Iterator[str]: ...

    def chat(self, messages, *, tools=(), stream=False, seed=0, **options):
        """Answers a conversation in the model's chat format; returns the text of the answer, with calls as written.

        Raises UserError for an empty conversation, one that fills the context, parameters out of range, or no chat
        format.

        Args:
          messages: a user message as text, or messages, which may be OpenAI's {"role": ..., "content": ...} with
            tool_calls and tool_call_id.
          tools: declarations of tools in OpenAI's form.
          stream, seed, options: as in `generate`.
        """
        ids = self.text.encode_chat(messages, tools)
        pieces = _stream_text(self._stream_tokens(ids, self.text.params(**options), seed), self.chat_format.text)
        return pieces if stream else "".join(pieces)

    def _stream_tokens(self, ids: list[int], params: SamplingParams, seed: int) -> Iterator[list[int]]:
        """Yields the tokens that follow `ids`, one decode call at a time; between the calls nothing is computed.

        Only process 0 yields tokens; the other processes of the mesh yield nothing.
        """
        if self.mesh.is_multi_process and not is_first_process():
            self._sampler_for(len(ids) + params.max_tokens).follow()
            return
        with EventLoop() as loop:
            chunks = self._stream(ids, params, seed)

            async def next_chunk() -> list[int] | None:
                return await anext(chunks, None)

            try:
                while (tokens := loop.run(next_chunk())) is not None:
                    yield tokens
            finally:
                loop.run(chunks.aclose())

    async def _stream(self, ids: list[int], params: SamplingParams, seed: int) -> AsyncGenerator[list[int]]:
        sampler = self._sampler_for(len(ids) + params.max_tokens)
        async with sampler.serving():
            session = await sampler.open(seed)
            try:
                async with contextlib.aclosing(session.stream(ids, params)) as chunks:
                    async for chunk in chunks:
                        yield chunk.tokens
            finally:
                session.close()

    # -- the Policy protocol -------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[Self]:
        """See ServingPolicy.serving. `generate` and `chat` cannot be called inside."""
        async with self._sampler_for(SESSION_CAPACITY).serving():
            yield self

    def follow(self) -> None:
        """Computes for process 0 until it leaves `serving`: what every other process of the mesh does meanwhile."""
        self._sampler_for(SESSION_CAPACITY).follow()

    async def open(self, seed: int) -> EngineSession:
        """See Policy.open. The memory of the sampler's cache bounds the open sessions."""
        if self._sampler is None:
            raise RuntimeError("open sessions inside `async with model.serving():`")
        return await self._sampler.open(seed)

    def _sampler_for(self, tokens: int) -> Sampler:
        """Returns a sampler whose contexts hold so many tokens, or all that the model's context holds."""
        longest = self.definition.config.max_context
        if self._sampler is not None:
            if self.sampler_config is not None or self._sampler.config.max_model_len >= min(tokens, longest):
                return self._sampler
            if self._sampler.is_serving:
                raise RuntimeError("this model is serving; use its sessions, or leave the block first")
            self._sampler = None  # frees its cache before the larger one is made
        config = self.sampler_config or _sampler_config(tokens, longest, self.mesh)
        network = self.definition.config
        definition = ModelDef(dataclasses.replace(network, dispatch=dispatch_without_drops(network.dispatch)))
        sampler = Sampler(
            definition,
            self.mesh,
            config,
            end_tokens=self.text.end_tokens,
            decode=lambda ids: self.tokenizer.decode(ids),
        )
        sampler.update(self.params, self.router_bias, version=0, copy=False)
        self._sampler = sampler
        return sampler


def mesh_of_axes(axes: Mapping[str, int]) -> Mesh:
    """Returns the mesh with these sizes of axes; none of them is one device.

    Several processes use all devices: those that the axes leave form replicas.
    """
    if process_count() > 1:
        return make_mesh(jax.devices(), replica=-1, **axes)
    return make_mesh(jax.devices()[: math.prod(axes.values())], **axes)


def load_hf(path: str | Path, mesh: Mesh | None = None, dtype: str | None = None, *, mtp: bool = True) -> Model:
    """Loads a Hugging Face folder as a Model, with its weights sharded over the mesh.

    A folder without tokenizer or chat template loads, too; what needs them then raises a UserError.

    Args:
      path: a local folder, or a URL that fsspec knows (gs://bucket/folder).
      mesh: None puts everything on the first device of this process.
      dtype: of the weights and of the computation: float32, bfloat16 or float16. None is that of config.json.
      mtp: whether to read the multi-token-prediction modules, which only training uses.

    Raises:
      UserError: as checkpoint.huggingface.load_hf, which returns the bare weights.
    """
    return load_model(f"hf:{path}", mesh, dtype, mtp=mtp)


def load_model(
    address: str | Checkpoint, mesh: Mesh | None = None, dtype: str | None = None, *, mtp: bool = True
) -> Model:
    """Loads the weights at an address (checkpoint/address.py: hf:DIR, gguf:FILE or a checkpoint of ours) as a Model.

    address: or a Checkpoint that is open. The other arguments and the errors are those of `load_hf`.
    """
    checkpoint = open_checkpoint(address) if isinstance(address, str) else address
    mesh = make_mesh(jax.local_devices()[:1]) if mesh is None else mesh
    return Model(*checkpoint.load(mesh, dtype, mtp=mtp), mesh, checkpoint.text)


def _sampler_config(tokens: int, longest: int, mesh: Mesh) -> SamplerConfig:
    """Sizes for contexts of `tokens` tokens, at most `longest`."""
    # On a CPU, XLA multiplies a single row with the scanned weights of a layer in a naive loop: two rows take an eighth
    # of the time of one (measured for SmolLM2's layers).
    slots = batch_shards(mesh) * (2 if mesh.devices.flat[0].platform == "cpu" else 1)
    max_model_len = SMALLEST_CAPACITY
    while max_model_len < tokens:
        max_model_len *= GROWTH
    return SamplerConfig(
        slots=slots, max_model_len=min(max_model_len, longest), prefill_shapes=((1, 16), (1, 128), (1, 512))
    )


def _stream_text(tokens: Iterator[list[int]], decode: Callable[[Sequence[int]], str]) -> Iterator[str]:
    detokenizer = IncrementalDetokenizer(decode)
    for piece in tokens:
        if text := detokenizer.add(piece):
            yield text
    if text := detokenizer.finish():
        yield text
