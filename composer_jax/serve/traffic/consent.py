"""What the headers of a request say about its traffic: consent, kind of turn, user and repository.

X-Consent: training | evals | none    none without it
X-Turn-Type: main | side | summary    main without it
X-User-ID, X-Repository               names, of which only salted hashes are stored
"""

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence

from composer_jax.serve.errors import ApiError
from composer_jax.serve.traffic.records import CONSENTS, TURN_KINDS, Consent, TurnKind

LONGEST_NAME = 256


@dataclasses.dataclass(frozen=True)
class TrafficHeaders:
    """The headers of one request."""

    consent: Consent = "none"
    kind: TurnKind = "main"
    user: str = ""
    repository: str = ""


def read_headers(headers: Mapping[str, str]) -> TrafficHeaders:
    """Returns what the headers of a request say. Raises ApiError for an unknown value or a long name."""
    consent = _one_of("X-Consent", headers.get("x-consent", "none"), CONSENTS)
    kind = _one_of("X-Turn-Type", headers.get("x-turn-type", "main"), TURN_KINDS)
    return TrafficHeaders(
        CONSENTS[consent], TURN_KINDS[kind], *(read_name(headers, name) for name in ("X-User-ID", "X-Repository"))
    )


def read_name(headers: Mapping[str, str], header: str) -> str:
    """Returns the name in a header, "" without it. Raises ApiError for one that is too long.

    Starlette reads the bytes of headers as Latin-1; those that are UTF-8 are read as UTF-8.
    """
    name = headers.get(header.lower(), "")
    with contextlib.suppress(UnicodeDecodeError):
        name = name.encode("latin-1").decode()
    if len(name) > LONGEST_NAME:
        raise ApiError(f"{header} has more than {LONGEST_NAME} characters; send a shorter one.")
    return name


def _one_of(name: str, value: str, values: Sequence[str]) -> int:
    if value not in values:
        raise ApiError(f"{name} is {value[:40]!r}; use {', '.join(values)}.")
    return values.index(value)
