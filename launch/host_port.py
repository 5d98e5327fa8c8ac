"""Addresses HOST:PORT in flags."""

from __future__ import annotations

from composer_jax.errors import UserError


def parse_host_port(text: str, flag: str) -> tuple[str, int]:
    """Returns (host, port) of "HOST:PORT"; an IPv6 address stands in brackets, and ":PORT" has the host "".

    Raises:
      UserError: `text`, the value of --`flag`, is none.
    """
    host, colon, port = text.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    if not colon or not port.isdecimal() or not 0 <= int(port) < 2**16 or (":" in bare and bare == host):
        raise UserError(f"--{flag}={text} is no address; use HOST:PORT, such as 10.0.0.5:7411.")
    return bare, int(port)
