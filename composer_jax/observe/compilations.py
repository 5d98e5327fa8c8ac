"""Counts XLA compilations: tests and metrics show with it that a hot loop has stopped compiling."""

import jax.monitoring

_EVENT = "/jax/core/compile/backend_compile_duration"
_count = 0
_listening = False


def _listen(event: str, duration_secs: float, **_: str | int) -> None:
    global _count
    if event == _EVENT:
        _count += 1


def count_compilations() -> int:
    """Returns the programs compiled or loaded from the compilation cache in this process since the first call."""
    global _listening
    if not _listening:
        jax.monitoring.register_event_duration_secs_listener(_listen)
        _listening = True
    return _count
