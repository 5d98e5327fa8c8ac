"""ServedSession: a conversation with a server of this process, which samples and writes it as that of any client."""

import asyncio
import dataclasses
import hashlib
from collections.abc import Callable, Sequence

from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.sampler.policy import Sample
from composer_jax.sampler.session import GOLDEN
from composer_jax.serve.bodies import CompletionBody
from composer_jax.serve.service import Client, Service


class ServedSession:
    """A Session (sampler/policy.py) whose requests go through a Service: limits, consent, traffic on disk.

    The service's sampler must be serving. Each request has the whole context, as over HTTP.

    Attributes:
      answers: ids of the answers so far, by which events name them; a function of the session's id.
    """

    def __init__(
        self, service: Service, client: Client, seed: int, on_sampled: Callable[[Sample], None] = lambda sample: None
    ) -> None:
        """
        Args:
          client: whose headers the requests have.
          seed: uint32; fixes what is sampled.
          on_sampled: called with an answer before the client gets it and traffic has it, such as to move a clock.
        """
        self.max_model_len = service.max_model_len
        self.answers: list[str] = []
        self._service, self._client, self._seed, self._on_sampled = service, client, seed, on_sampled

    async def sample(self, context: Sequence[int], params: SamplingParams, branch: int = 0) -> Sample:
        """See Session.sample. Raises ApiError for what the server refuses."""
        body = CompletionBody(
            prompt=list(context),
            max_tokens=params.max_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            min_p=params.min_p,
            seed=(self._seed + GOLDEN * branch) % 2**32,
            return_routed_experts=params.return_routing,
            routed_experts_prompt_start=params.routing_start,
        )
        name = f"{self._client.session}/{len(self.answers)}"
        answer = f"chatcmpl-{hashlib.sha256(name.encode()).hexdigest()[:24]}"
        choices = self._service.submit([list(context)], body, self._client, answer)
        choices[0].handle.future.add_done_callback(self._note)  # before that of `finish`, which waits and writes
        (sample,) = await self._service.finish(choices)
        self.answers.append(answer)
        return sample if params.return_routing else dataclasses.replace(sample, routing=None)  # traffic has them

    def close(self) -> None:
        """Does nothing: a server knows no end of a conversation."""

    def _note(self, future: asyncio.Future[Sample]) -> None:
        if not future.cancelled() and future.exception() is None:
            self._on_sampled(future.result())
