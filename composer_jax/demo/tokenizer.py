"""The tokenizer that the demo's exercises and experts are written for."""

from composer_jax.data.text_tokenizer import TextTokenizer
from composer_jax.data.tokenizer import Tokenizer
from composer_jax.errors import UserError


def require_own_tokenizer(tok: TextTokenizer) -> Tokenizer:
    """Returns `tok` if it is a Tokenizer. Raises UserError for the tokenizer of a published model."""
    if not isinstance(tok, Tokenizer):
        raise UserError(
            "the demo's exercises and experts write the compact chat format of our own tokenizer; leave them out of a "
            "run with a base (composer_jax.demo.repository_bugs works with every chat format)."
        )
    return tok
