"""From an open port to a served model and its end: loading, warming up, ready, stopping, or failed."""

from dataclasses import dataclass
from enum import StrEnum

from .errors import InternalError, NotReady
from .service import Service


class Phase(StrEnum):
    LOADING = "loading"
    WARMING = "warming"
    READY = "ready"
    STOPPING = "stopping"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Health:
    phase: Phase
    done: int = 0
    total: int = 0


class Startup:
    """Owned by the event loop. The service exists once the model's files are read; the engine then compiles."""

    def __init__(self) -> None:
        self._service: Service | None = None
        self._failed = False
        self._stopping = False

    def loaded(self, service: Service) -> None:
        self._service = service

    def failed(self) -> None:
        self._failed = True

    def stopping(self) -> None:
        """From now on new work is refused; what runs goes on."""
        self._stopping = True

    def service(self) -> Service:
        """Raises NotReady while the model loads or the server stops, and InternalError when loading failed."""
        if self._failed:
            raise InternalError("the model could not be loaded; see the server's log")
        if self._stopping:
            raise NotReady("the server is stopping", retry_after_s=5.0)
        if self._service is None:
            raise NotReady("the model is loading", retry_after_s=5.0)
        return self._service

    @property
    def health(self) -> Health:
        if self._failed or (self._service is not None and self._service.engine.failure is not None):
            return Health(Phase.FAILED)
        if self._stopping:
            return Health(Phase.STOPPING)
        if self._service is None:
            return Health(Phase.LOADING)
        done, total = self._service.engine.progress
        return Health(Phase.READY if self._service.engine.ready else Phase.WARMING, done, total)
