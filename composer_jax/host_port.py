"""Addresses HOST:PORT."""

from __future__ import annotations


def split_host_port(text: str) -> tuple[str, int] | None:
    """Returns (host, port) of "HOST:PORT"; None for any other text.

    An IPv6 address stands in brackets, and ":PORT" has the host "".
    """
    host, colon, port = text.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    if not colon or not port.isdecimal() or not 0 <= int(port) < 2**16 or (":" in bare and bare == host):
        return None
    return bare, int(port)
