"""Generates text from weights at an address: what `launch.generate` does."""

from collections.abc import Iterator, Mapping

from composer_jax.checkpoint.checkpoint import open_checkpoint
from composer_jax.checkpoint.dtypes import require_float_dtype
from composer_jax.data.chat.text_processor import SamplingOptions
from composer_jax.parallel.platform import use_compilation_cache
from composer_jax.stages.model import load_model, mesh_of_axes


def generate(
    address: str,
    prompt: str,
    *,
    chat: bool,
    dtype: str | None,
    axes: Mapping[str, int],
    seed: int,
    options: SamplingOptions,
) -> Iterator[str]:
    """Yields the text that follows a prompt, or with `chat` the answer to it, as it is sampled.

    Every process of a run must call it. It yields the text in process 0 and nothing in the others.

    Args:
      address: of weights (checkpoint/address.py).
      axes: sizes of mesh axes (mesh_of_axes).
      seed, options: as in Model.generate.

    Raises:
      UserError: no such weights, an unusable prompt, or parameters out of range; before any weight is read.
    """
    use_compilation_cache()
    require_float_dtype(dtype)
    checkpoint = open_checkpoint(address)
    text = checkpoint.text
    text.params(**options)
    text.encode_chat(prompt) if chat else text.encode_prompt(prompt)
    model = load_model(checkpoint, mesh_of_axes(axes), dtype, mtp=False)
    answer = model.chat if chat else model.generate
    yield from answer(prompt, stream=True, seed=seed, **options)
