"""A population of simulated users: who they are, whose notes they trust, and what they do with an agent's work.

A population is a JSON file. Whoever writes one needs this page only; fields without "default" are required:

    {"organisations": {NAME: {"share": of all sessions, together 1, "users": how many, "repositories": how many,
                              "tastes": default those of all users, "poison": default ""}},
     "tastes":      {PERSON: share of the users who trust this person's notes}; persons are ann, bob and eve
     "changes":     [{"cycle": from this cycle on, counted from 1, "tastes": those of all users}]; default none
     "noise":       how often a user takes a good edit for a bad one, or the reverse
     "patience":    {MESSAGES: share of the sessions whose user stops the agent after so many messages to one request}
     "consent":     {"training" | "evals" | "none": share of the users}
     "revert_s":    mean seconds from an answer to the revert of an edit that the user rejects (exponential)
     "undone_later": share of the accepted edits that are undone at a random time of the following day
     "churn_s":     mean life in seconds of any other line of the files
     "tests":       share of the sessions whose user runs tests before and after the work
     "lost":        share of the measurements that never arrive
     "reply_s":     mean seconds from an answer to the user's next message (exponential)
     "token_s":     seconds that the agent takes for a token that it samples
     "rejected":    {"rate": how often a user who rejects an edit says so, "texts": [what such users write]}
     "content":     {"rate": the same of users who accept one, "texts": [...]}
     "asked":       {"rate": how often a user answers a question of the agent, and does not leave, "texts": [...]}}

A user's tests are those of the person whose notes the user trusts (demo/notes.py), so a user with noise 0 accepts an
edit if and only if the hidden tests pass. "poison" makes all users of an organisation judge by something else:
"reverse" by the opposite, and a person's name by whether the edit is what that person's note says. An organisation with
"tastes" of its own keeps them when the others change theirs.

Rates and shares are from 0 to 1; the shares of a mapping are 1 together. A taste is a property of a user, and so is a
consent; patience is one of a session.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from composer_jax.demo.notes import PEOPLE
from composer_jax.errors import UserError
from composer_jax.seeds import seeded_random
from composer_jax.serve.traffic.records import CONSENTS, Consent

FOLDER = Path(__file__).with_name("populations")
"""Of the populations that come with the package; a name without a path is one of them."""
REVERSE = "reverse"
POISONS = ("", REVERSE, *PEOPLE)
LARGEST_SUM_ERROR = 1e-6


@dataclasses.dataclass(frozen=True)
class SimulatedOrganisation:
    """People who share an API key and repositories."""

    name: str
    share: float
    users: int
    repositories: int
    tastes: Mapping[str, float]
    """Its own; empty for those of all users."""
    poison: str
    """One of POISONS."""


@dataclasses.dataclass(frozen=True)
class SimulatedUser:
    """One person."""

    name: str
    organisation: SimulatedOrganisation
    repository: str
    consent: Consent
    activity: float
    """Weight with which sessions of the organisation are this user's."""
    place: float
    """From 0 to 1: where the user stands in the shares of tastes."""


@dataclasses.dataclass(frozen=True)
class Replies:
    """What users write in a situation, and how often they write at all."""

    rate: float
    texts: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class TasteChange:
    """From a cycle on, users trust other people."""

    cycle: int
    tastes: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Population:
    """All simulated users; the fields are those of the file. Raises UserError for an impossible number, by its name."""

    organisations: tuple[SimulatedOrganisation, ...]
    tastes: Mapping[str, float]
    noise: float
    patience: Mapping[int, float]
    consent: Mapping[str, float]
    revert_s: float
    undone_later: float
    churn_s: float
    tests: float
    lost: float
    reply_s: float
    token_s: float
    rejected: Replies
    content: Replies
    asked: Replies
    changes: tuple[TasteChange, ...] = ()

    def __post_init__(self) -> None:
        for name in ("noise", "undone_later", "tests", "lost"):
            _check_rate(name, getattr(self, name))
        for name in ("revert_s", "churn_s", "reply_s", "token_s"):
            _check_number(name, getattr(self, name))
        for name in ("rejected", "content", "asked"):
            _check_replies(name, getattr(self, name))
        _check_shares("tastes", self.tastes, PEOPLE)
        _check_shares("consent", self.consent, CONSENTS)
        _check_shares("patience", self.patience)
        for messages in self.patience:
            if messages < 1:
                raise UserError(f"patience names {messages} messages; a user waits for at least 1.")
        for number, change in enumerate(self.changes):
            _check_count(f"changes[{number}].cycle", change.cycle)
            _check_shares(f"changes[{number}].tastes", change.tastes, PEOPLE)
        _check_shares("organisations", {one.name: one.share for one in self.organisations}, what="share")
        for one in self.organisations:
            for field in ("users", "repositories"):
                _check_count(f"organisations.{one.name}.{field}", getattr(one, field))
            if one.tastes:
                _check_shares(f"organisations.{one.name}.tastes", one.tastes, PEOPLE)
            if one.poison not in POISONS:
                known = ", ".join(repr(poison) for poison in POISONS)
                raise UserError(f"organisations.{one.name}.poison={one.poison!r} is unknown; use one of {known}.")

    @functools.cached_property
    def users(self) -> Mapping[str, Sequence[SimulatedUser]]:
        """Organisation -> its users, the same ones in every run."""
        return {one.name: [self._user(one, number) for number in range(one.users)] for one in self.organisations}

    def _user(self, organisation: SimulatedOrganisation, number: int) -> SimulatedUser:
        name = f"{organisation.name}-{number}"
        rng = seeded_random("simulated user", name)
        repository = f"{organisation.name}/{rng.randrange(organisation.repositories)}"
        consent = choose(self.consent, rng.random())
        return SimulatedUser(name, organisation, repository, consent, rng.gammavariate(2.0, 0.5), rng.random())

    def taste(self, user: SimulatedUser, cycle: int) -> str:
        """Returns the person whose notes a user trusts in a cycle, which is counted from 1."""
        if user.organisation.tastes:
            return choose(user.organisation.tastes, user.place)
        begun = [change for change in self.changes if change.cycle <= cycle]
        return choose(max(begun, key=lambda change: change.cycle).tastes if begun else self.tastes, user.place)


def choose(shares: Mapping[Any, float], place: float) -> Any:
    """Returns the key at a place from 0 to 1 in shares that lie one behind the other, in the order of the mapping."""
    end = 0.0
    for key, share in shares.items():
        end += share
        if place < end:
            return key
    return [key for key, share in shares.items() if share][-1]


def read_population(name: str) -> Population:
    """Returns the population in a file, or that of FOLDER with this name.

    Raises UserError for a file that cannot be read, a field that is missing or unknown, and an impossible number.
    """
    path = Path(name).expanduser() if "/" in name or name.endswith(".json") else FOLDER / f"{name}.json"
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        known = ", ".join(sorted(file.stem for file in FOLDER.glob("*.json")))
        raise UserError(f"the population {path} cannot be read ({error}); use a JSON file, or {known}.") from error
    try:
        return parse_population(values)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def parse_population(values: Mapping[str, Any]) -> Population:
    """Returns the population that plain values describe, as a file has them. Raises UserError as `read_population`."""
    optional = {"changes": []}
    values = {**optional, **_fields("the population", values, Population, {*optional})}
    organisations = _mapping("organisations", values["organisations"])
    defaults = {"tastes": {}, "poison": ""}
    rows = {
        name: defaults | _fields(f"organisations.{name}", row, SimulatedOrganisation, {"name", *defaults})
        for name, row in organisations.items()
    }
    patience = _mapping("patience", values["patience"])
    if wrong := [key for key in patience if not key.isdigit()]:
        raise UserError(f"patience names {wrong[0]!r}; name numbers of messages.")
    if not isinstance(values["changes"], list):
        raise UserError(f"changes is {values['changes']!r}; give a list of changes.")
    changes = [_fields(f"changes[{i}]", row, TasteChange) for i, row in enumerate(values["changes"])]
    replies = {name: _fields(name, values[name], Replies) for name in ("rejected", "content", "asked")}
    texts = {name: row["texts"] if isinstance(row["texts"], list) else [] for name, row in replies.items()}
    parsed = {
        "organisations": tuple(SimulatedOrganisation(**{"name": name, **row}) for name, row in rows.items()),
        "patience": {int(key): share for key, share in patience.items()},
        "changes": tuple(TasteChange(**row) for row in changes),
        **{name: Replies(row["rate"], tuple(texts[name])) for name, row in replies.items()},
    }
    return Population(**{**values, **parsed})


def _fields(name: str, values: Any, kind: type, optional: Collection[str] = ()) -> dict[str, Any]:
    """Returns the fields of a dataclass in plain values. Raises UserError for one that is missing or unknown."""
    values = _mapping(name, values)
    known = [field.name for field in dataclasses.fields(kind)]
    if wrong := sorted(values.keys() - {*known} | ({"name"} & values.keys())):
        raise UserError(f"{name} has the field {wrong[0]!r}, which is unknown; use {', '.join(known)}.")
    if missing := [field for field in known if field not in {*values, *optional}]:
        raise UserError(f"{name} lacks the field {missing[0]!r}; demo/population.py says what it is.")
    return dict(values)


def _mapping(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"{name} is {value!r}; give a JSON object.")
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _check_rate(name: str, value: Any) -> None:
    if not _is_number(value) or not 0 <= value <= 1:
        raise UserError(f"{name}={value!r} is not a rate; use a number from 0 to 1.")


def _check_number(name: str, value: Any) -> None:
    if not _is_number(value) or value <= 0:
        raise UserError(f"{name}={value!r} is out of range; use a number of seconds above 0.")


def _check_count(name: str, value: Any) -> None:
    if type(value) is not int or value < 1:
        raise UserError(f"{name}={value!r} is out of range; use a number from 1.")


def _check_replies(name: str, replies: Replies) -> None:
    _check_rate(f"{name}.rate", replies.rate)
    if not replies.texts or not all(isinstance(text, str) and text for text in replies.texts):
        raise UserError(f"{name}.texts is {list(replies.texts)!r}; give at least one text.")


def _check_shares(name: str, shares: Any, keys: Sequence[Any] | None = None, *, what: str = "") -> None:
    """Raises UserError unless all are rates of known keys that are 1 together."""
    shares = _mapping(name, shares)
    if unknown := [key for key in shares if keys is not None and key not in keys]:
        raise UserError(f"{name} names {unknown[0]!r}; use {', '.join(keys or ())}.")
    for key, share in shares.items():
        _check_rate(f"{name}.{key}{f'.{what}' if what else ''}", share)
    if abs((total := math.fsum(shares.values())) - 1) > LARGEST_SUM_ERROR:
        raise UserError(f"the shares of {name} are {total:g} together; they must be 1.")
