"""How many programs this process has built, whoever asked: what shows that nothing compiles after ready.

Counts JAX's own events, so a stray jax.numpy call on the request path is seen as well; a program read from the
persistent cache counts as one too. The listener is taken off by `close`.
"""

import threading

import jax.monitoring

_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileCounter:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    @property
    def count(self) -> int:
        return self._count

    def close(self) -> None:
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event == _EVENT:
            with self._lock:
                self._count += 1
