"""Records XLA compilations: tests and metrics show with it that a hot loop has stopped compiling."""

import jax.monitoring

_EVENT = "/jax/core/compile/backend_compile_duration"
_programs: list[str] = []
_listening = False


def _listen(event: str, duration_secs: float, **labels: str | int) -> None:
    if event == _EVENT:
        _programs.append(str(labels.get("fun_name")))


def count_compilations() -> int:
    """Returns the programs compiled or loaded from the compilation cache in this process since the first call."""
    global _listening
    if not _listening:
        jax.monitoring.register_event_duration_secs_listener(_listen)
        _listening = True
    return len(_programs)


def compiled_since(count: int) -> list[str]:
    """Returns the names of the programs that followed when `count_compilations` returned `count`."""
    return _programs[count:]
