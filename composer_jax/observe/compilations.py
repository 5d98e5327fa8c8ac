"""Records XLA compilations: tests and metrics show with it that a hot loop has stopped compiling."""

import dataclasses
import threading

import jax.monitoring

_EVENT = "/jax/core/compile/backend_compile_duration"


@dataclasses.dataclass(frozen=True)
class Compilation:
    program: str
    """The jitted function's name, after "jit"."""
    thread: threading.Thread
    """The thread that called the function."""


_compilations: list[Compilation] = []
_listening = False


def _listen(event: str, duration_secs: float, **labels: str | int) -> None:
    if event == _EVENT:
        _compilations.append(Compilation(str(labels.get("fun_name")), threading.current_thread()))


def count_compilations() -> int:
    """Returns the programs compiled or loaded from the compilation cache in this process since the first call."""
    global _listening
    if not _listening:
        jax.monitoring.register_event_duration_secs_listener(_listen)
        _listening = True
    return len(_compilations)


def compilations_since(count: int) -> list[Compilation]:
    """Returns those that followed when `count_compilations` returned `count`."""
    return _compilations[count:]
