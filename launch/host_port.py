"""Addresses HOST:PORT in flags."""

from __future__ import annotations

from composer_jax.errors import UserError
from composer_jax.host_port import split_host_port


def parse_host_port(text: str, flag: str) -> tuple[str, int]:
    """Returns (host, port) of "HOST:PORT"; an IPv6 address stands in brackets, and ":PORT" has the host "".

    Raises:
      UserError: `text`, the value of --`flag`, is none.
    """
    if (address := split_host_port(text)) is None:
        raise UserError(f"--{flag}={text} is not an address; use HOST:PORT, such as 10.0.0.5:7411.")
    return address
