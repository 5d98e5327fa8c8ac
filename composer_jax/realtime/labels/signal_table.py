"""The table of signals, and a user's own beside them."""

import math
from collections.abc import Callable, Mapping

from composer_jax.errors import UserError
from composer_jax.extensions import resolve
from composer_jax.realtime.labels import conversation, edits
from composer_jax.realtime.labels.signal_types import SIGNAL_STATES, LabelContext, Signal
from composer_jax.serve.traffic.records import SessionTraffic

SignalFunction = Callable[[SessionTraffic, float, LabelContext], Signal]
"""(traffic, horizon in seconds, context) -> signal. Pure. The traffic holds only what the label may see (window.py)."""

SIGNALS: Mapping[str, SignalFunction] = {
    "keep": edits.keep,
    "keep_corrected": edits.keep_corrected,
    "edited": edits.edited,
    "edit_weight": edits.edit_weight,
    "accept_share": edits.accept_share,
    "undo": edits.undo,
    "tests": edits.tests,
    "follow_up": conversation.follow_up,
    "question": conversation.question,
    "needless_question": conversation.needless_question,
    "invalid_calls": conversation.invalid_calls,
    "seconds": conversation.seconds,
    "tokens": conversation.tokens,
    "calls": conversation.calls,
    "thumb": conversation.thumb,
    "regenerate": conversation.regenerate,
    "stop_pressed": conversation.stop_pressed,
}
"""Name -> measure. All are logged; those of `RewardWeights` make the reward."""


def resolve_signals(own: Mapping[str, str]) -> dict[str, SignalFunction]:
    """Returns all signals by name: ours and a user's own.

    own: name -> import path of a `SignalFunction`.

    Raises UserError for a name of ours and a path that does not resolve.
    """
    if taken := sorted(own.keys() & SIGNALS.keys()):
        raise UserError(f"the signal {taken[0]!r} exists; give your own another name.")
    return {**SIGNALS, **{name: resolve(path, {}, f"signals.{name}") for name, path in own.items()}}


def measure_signals(
    functions: Mapping[str, SignalFunction], traffic: SessionTraffic, horizon: float, context: LabelContext
) -> dict[str, Signal]:
    """Returns every signal of what a label sees of a session.

    Raises UserError if a function returns anything but a Signal, or one whose value is not a finite number.
    """
    signals = {name: function(traffic, horizon, context) for name, function in functions.items()}
    for name, signal in signals.items():
        if not isinstance(signal, Signal) or signal.state not in SIGNAL_STATES:
            raise UserError(f"the signal {name!r} returned {signal!r}; return a composer_jax Signal.")
        if signal.value is not None and not math.isfinite(signal.value):
            raise UserError(f"the signal {name!r} returned {signal.value}; return a finite number or censor it.")
    return signals
