"""Counts XLA compilations, so that a test and the metrics can show that a hot loop has stopped compiling."""

import jax.monitoring

_EVENT = "/jax/core/compile/backend_compile_duration"
_count = 0
_listening = False


def _listen(event: str, duration: float, **_) -> None:
    global _count
    if event == _EVENT:
        _count += 1


def compilations() -> int:
    """Programs compiled (or loaded from the compilation cache) in this process since the first call of this
    function."""
    global _listening
    if not _listening:
        jax.monitoring.register_event_duration_secs_listener(_listen)
        _listening = True
    return _count
