"""Checks of a request against the sampler that is to carry it out."""

from collections.abc import Sequence

from composer_jax.data.chat.sampling_params import SamplingParams
from composer_jax.errors import UserError
from composer_jax.models.config import ModelConfig
from composer_jax.sampler.detokenizer import Decode


def check_request(
    tokens: Sequence[int], params: SamplingParams, config: ModelConfig, max_model_len: int, decode: Decode | None
) -> int:
    """Returns the most tokens that a request may sample after the context `tokens`.

    max_model_len: tokens that one conversation can hold. decode: text of token ids, if the sampler has it.

    Raises:
      ValueError: an empty context, or one that leaves no room for a token.
      UserError: token ids that the network does not have, stop strings without `decode`, or return_routing
        with a cache without routing.
    """
    if not tokens:
        raise ValueError("the context is empty; give the tokens that the sample follows")
    budget = min(params.max_tokens, max_model_len - len(tokens))
    if budget < 1:
        raise ValueError(f"{len(tokens)} tokens leave no room in a context of {max_model_len}")
    wrong = next((token for token in tokens if not 0 <= token < config.vocab_size), None)
    if wrong is not None:
        raise UserError(f"the context has the token id {wrong}; those of the model are 0 to {config.vocab_size - 1}.")
    if params.stop_strings and decode is None:
        raise UserError(f"stop_strings={params.stop_strings!r} needs a Sampler with decode=, the text of token ids.")
    if params.return_routing and not config.cache_routing:
        raise UserError("return_routing needs a cache with routing; set model.cache_routing=True in the config.")
    return budget
