"""Where a cache entry holds keys and values, for attention kinds that cut them out of it as they are."""

import dataclasses

import jax
import jax.numpy as jnp

from composer_jax.ops.attention import Scales


@dataclasses.dataclass(frozen=True)
class EntryParts:
    """A key for each of N heads, head after head, then their values; or one key that contains its value.

    An instance is a function that cuts entries (ops/cached_attention.py: Split). Its fields let a kernel read the same
    parts from a page.
    """

    n_heads: int
    """N."""
    key_parts: tuple[int, ...]
    """Widths of the parts of a head's key; each part of an int8 entry has a scale."""
    value_width: int
    """V."""
    value_in_key: bool = False
    """Whether the value of the only head is the first part of its key: the latent of absorbed MLA."""

    def __post_init__(self) -> None:
        assert not self.value_in_key or (self.n_heads, self.key_parts[0]) == (1, self.value_width)

    @property
    def key_width(self) -> int:
        return sum(self.key_parts)

    @property
    def head_width(self) -> int:
        """The numbers of an entry that are a head's key and value."""
        return self.key_width + (0 if self.value_in_key else self.value_width)

    @property
    def first_value(self) -> int:
        """Where the values begin in an entry."""
        return 0 if self.value_in_key else self.n_heads * self.key_width

    def __call__(
        self, entries_BTX: jax.Array, scales_BTG: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, Scales | None]:
        """Returns keys [B,T,N,X], values [B,T,N,V] and their scales.

        The value in a key is the whole key here, of whose weighted sum attention returns the first V numbers: cutting
        it out would copy it.
        """
        rows = entries_BTX.shape[:2]
        keys, values = jnp.split(entries_BTX, [self.n_heads * self.key_width], axis=-1)
        k_BTNX = keys.reshape(*rows, self.n_heads, self.key_width)
        v_BTNV = k_BTNX if self.value_in_key else values.reshape(*rows, self.n_heads, self.value_width)
        if scales_BTG is None:
            return k_BTNX, v_BTNV, None
        n_keys = len(self.key_parts)
        groups = jnp.split(scales_BTG, n_keys + (not self.value_in_key), axis=-1)
        of_value = groups[0 if self.value_in_key else -1]
        return k_BTNX, v_BTNV, Scales(self.key_parts, tuple(groups[:n_keys]), of_value)
