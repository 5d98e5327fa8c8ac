"""TrafficPolicy: what users agreed to, how long their traffic is kept, and what stands for their names on disk.

Whoever runs the server writes a file, which `launch.serve --traffic_policy` reads:

    {"consent_text": "What users were asked, in the words that they saw.", "retention_days": 30,
     "organisations": {"example": {"consent": "evals", "keys": [SHA-256 of an API key]}}, "sampling_fraction": 1.0}

policy.json of the folder has the same fields, and those that the server adds: schema, fingerprint and salt.
"""

import dataclasses
import hashlib
import hmac
import json
import re
import secrets
from collections.abc import Mapping
from pathlib import Path

from composer_jax.atomic_write import write_atomically
from composer_jax.data.chat.load_chat_format import CONFIG, TEMPLATE
from composer_jax.data.chat.text_processor import TextProcessor
from composer_jax.errors import UserError
from composer_jax.serve.traffic.records import CONSENTS, SCHEMA, Consent

NAME = "policy.json"
MOST_DAYS = 36_500


@dataclasses.dataclass(frozen=True)
class Organisation:
    """Whose requests have one consent level, whatever their headers say."""

    consent: Consent
    keys: tuple[str, ...] = ()
    """SHA-256 of its API keys, in hexadecimal digits."""


@dataclasses.dataclass(frozen=True)
class TrafficPolicy:
    """The policy of a traffic folder. Raises UserError for a field that is out of range."""

    consent_text: str
    """What users agree to by sending X-Consent."""
    retention_days: int = 30
    """A session is deleted so many days after the day on which it opened."""
    organisations: Mapping[str, Organisation] = dataclasses.field(default_factory=dict)
    sampling_fraction: float = 1.0
    """Fraction of the sessions that are written."""
    schema: int = SCHEMA
    fingerprint: str = ""
    """Of the model's tokenizer and template; see `text_fingerprint`."""
    salt: str = ""
    """Of the hashes; random unless the file names one, which the folders of servers with the same users share."""

    def __post_init__(self) -> None:
        if not isinstance(self.consent_text, str) or not self.consent_text.strip():
            raise UserError(f"consent_text is {self.consent_text!r}; write what users agree to.")
        if type(self.retention_days) is not int or not 1 <= self.retention_days <= MOST_DAYS:
            raise UserError(f"retention_days is {self.retention_days!r}; give a number of days from 1 to {MOST_DAYS}.")
        if not isinstance(self.salt, str):
            raise UserError(f"salt is {self.salt!r}; write it in quotes.")
        fraction = self.sampling_fraction
        if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 <= fraction <= 1:
            raise UserError(f"sampling_fraction is {fraction!r}; give a number from 0 to 1.")
        for name, one in self.organisations.items():
            if one.consent not in CONSENTS:
                raise UserError(f"organisations.{name}.consent is {one.consent!r}; use {', '.join(CONSENTS)}.")
            for key in one.keys:
                if not isinstance(key, str) or not re.fullmatch("[0-9a-f]{64}", key):
                    raise UserError(f"organisations.{name}.keys has {key!r}; give SHA-256 digests of API keys.")

    def hash(self, name: str) -> str:
        """Returns what stands for a name on disk: 32 hexadecimal digits."""
        return hmac.new(self.salt.encode(), name.encode(), hashlib.sha256).hexdigest()[:32]

    @property
    def text_hash(self) -> str:
        """Hash of the consent text, by which sessions name it: 16 hexadecimal digits."""
        return hashlib.sha256(self.consent_text.encode()).hexdigest()[:16]

    def organisation(self, key: str) -> str:
        """Returns the name of the organisation that has an API key, or ""."""
        digest = hashlib.sha256(key.encode()).hexdigest()
        return next((name for name, one in self.organisations.items() if digest in one.keys), "")

    def is_sampled(self, session: str) -> bool:
        """Whether a session belongs to the fraction that is written."""
        return int(self.hash(f"sampling {session}")[:8], 16) < self.sampling_fraction * 2**32


def text_fingerprint(text: TextProcessor) -> str:
    """Returns a hash of all that turns a conversation into token ids: tokenizer, template and end tokens."""
    parts = [text.tokenizer.fingerprint, *(text.files.text(name) or "" for name in (CONFIG, TEMPLATE))]
    return hashlib.sha256(repr((parts, text.end_tokens)).encode()).hexdigest()[:16]


def read_policy(folder: Path) -> TrafficPolicy:
    """Returns the policy of a traffic folder. Raises UserError for none, or one of another schema."""
    policy = _parse(folder / NAME)
    if policy is None:
        raise UserError(f"{folder} is not a traffic folder: it has no {NAME}; give one that a server wrote.")
    return policy


def claim_policy(folder: Path, file: str, fingerprint: str) -> TrafficPolicy:
    """Writes policy.json, or compares it with this model and brings it up to date; returns the policy.

    file: what whoever runs the server has written; "" keeps the policy of the folder.

    Raises UserError without a consent text, and for a folder of another model or schema.
    """
    old, new = _parse(folder / NAME), _parse(Path(file)) if file else None
    if file and new is None:
        raise UserError(f"--traffic_policy={file} does not exist; write the policy there.")
    if (policy := new or old) is None:
        raise UserError(
            f"{folder} has no consent text; write a file such as "
            '{"consent_text": "what users agree to", "retention_days": 30} and give it as --traffic_policy.'
        )
    if old is not None and old.fingerprint != fingerprint:
        raise UserError(
            f"{folder} has the traffic of a model with another tokenizer or template ({old.fingerprint}; that of this "
            f"model is {fingerprint}); choose another --traffic."
        )
    if old is not None and policy.salt not in ("", old.salt):
        raise UserError(f"{folder} has another salt than --traffic_policy={file}; choose another --traffic.")
    salt = old.salt if old is not None else policy.salt or secrets.token_hex(16)
    policy = dataclasses.replace(policy, fingerprint=fingerprint, salt=salt)
    content = json.dumps(dataclasses.asdict(policy), indent=1, ensure_ascii=False) + "\n"
    if old is None or policy != old:
        write_atomically(folder / NAME, content.encode())
    return policy


def _parse(file: Path) -> TrafficPolicy | None:
    """The policy in a file; None if there is no file."""
    try:
        fields = json.loads(file.read_bytes())
        if (schema := fields.get("schema", SCHEMA)) != SCHEMA:
            raise UserError(f"it has schema {schema}, and this version reads {SCHEMA}; choose another folder.")
        rows = fields.pop("organisations", {}).items()
        organisations = {name: Organisation(row["consent"], tuple(row.get("keys", ()))) for name, row in rows}
        return TrafficPolicy(**{"consent_text": "", **fields}, organisations=organisations)
    except FileNotFoundError:
        return None
    except UserError as error:
        raise UserError(f"{file}: {error}") from error
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise UserError(f"{file} is not a policy ({error}); its fields are in docs/realtime_stored.md.") from error
