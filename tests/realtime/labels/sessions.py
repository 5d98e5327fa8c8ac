"""Small sessions by hand: texts as byte ids, times in seconds after the session was opened."""

from composer_jax.realtime.simulation import SimulatedText, encode_text
from composer_jax.serve.traffic.records import Event, SampledTurn, SessionRecord, SessionTraffic, turn_id

OPENED = 1_000_000.0
H = 3600.0
TEXT = SimulatedText()


def turn(name, time, user=None, answer="Done.", parent=None, *, kind="main", version=1, seconds=5.0):
    suffix, tokens = encode_text(f"\x02{user}\x03" if user else "result of a tool"), encode_text(answer)
    parent_id = parent.id if parent else ""
    return SampledTurn(
        id=turn_id("s", parent_id, suffix, 0, name),
        session="s",
        answer=name,
        choice=0,
        parent=parent_id,
        suffix=suffix,
        tokens=tokens,
        logprobs=[-1.0] * len(tokens),
        raw_logprobs=[-1.0] * len(tokens),
        versions=[version] * len(tokens),
        finish_reason="stop",
        kind=kind,
        consent="training",
        sampling={},
        template="t",
        tools="",
        time=OPENED + time,
        seconds=seconds,
        cached=0,
        has_secret=False,
    )


def event(kind, time, about="", *, arrival=None, name="", **payload):
    at = OPENED + time
    arrived = at if arrival is None else OPENED + arrival
    return Event(name or f"{kind}-{time}-{about}-{payload}", "s", kind, about, at, arrived, payload)


def measured(time, horizon=H, *, arrival=None, **counts):
    zero = {"added": 0, "added_kept": 0, "deleted": 0, "deleted_kept": 0, "censored": 0, "others": 0, "others_kept": 0}
    return event("edited_after", time, arrival=arrival, horizon=horizon, **(zero | counts))


def session(turns=(), events=(), user="u", name="s"):
    record = SessionRecord(name, "key", user, "repo", "", OPENED)
    return SessionTraffic(record, list(turns), sorted(events, key=lambda one: one.time))
