"""PinnedPolicy: a serving policy as a suite samples from it while training episodes sample from it, too."""

import dataclasses
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext

from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.sampler.policy import Sample, Session, TrainablePolicy


class PinnedPolicy:
    """A ServingPolicy whose sessions open before those that wait, and whose tokens all have one weight version."""

    def __init__(self, policy: TrainablePolicy, version: int, temperature: float) -> None:
        """
        Args:
          policy: serves already; its weights must not change meanwhile.
          version: of its weights.
          temperature: of everything that is sampled, whatever an episode asks for: workers that play for training ask
            for the temperature of training.
        """
        self._policy, self._version, self._temperature = policy, version, temperature

    def serving(self) -> AbstractAsyncContextManager[object]:
        """See ServingPolicy.serving; the policy serves already."""
        return nullcontext()

    async def open(self, seed: int) -> "PinnedSession":
        return PinnedSession(await self._policy.open(seed, ahead=True), self._version, self._temperature)


class PinnedSession:
    """A Session of a PinnedPolicy."""

    def __init__(self, session: Session, version: int, temperature: float) -> None:
        self.max_model_len = session.max_model_len
        self._session, self._version, self._temperature = session, version, temperature

    async def sample(self, context: Sequence[int], params: SamplingParams, branch: int = 0) -> Sample:
        """See Session.sample. Raises RuntimeError if other weights sampled a token; always a bug."""
        params = dataclasses.replace(params, temperature=self._temperature)
        sample = await self._session.sample(context, params, branch=branch)
        if others := set(sample.versions) - {self._version}:
            raise RuntimeError(f"a suite at weight version {self._version} sampled tokens of version {min(others)}")
        return sample

    def close(self) -> None:
        self._session.close()
