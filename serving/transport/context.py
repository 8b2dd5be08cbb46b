"""What every handler needs: the server's parts under one application key, and one request's facts under another."""

from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web

from serving.config import ServerConfig
from serving.errors import ModelNotFound
from serving.metrics import Metrics
from serving.startup import Startup

from .auth import Authenticator


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Built once by `app`. Times: `clock` is the engine's (monotonic), `now` the wall clock's."""

    startup: Startup
    config: ServerConfig
    authenticator: Authenticator
    metrics: Metrics
    model_name: str
    clock: Callable[[], float]
    now: Callable[[], float]
    started: int  # Unix time, given as the model's time of creation
    new_id: Callable[[], str]
    new_seed: Callable[[], int]
    log_access: bool = True

    def check_model(self, name: str | None) -> None:
        """Raises ModelNotFound for anything but the served name."""
        if name is not None and name != self.model_name:
            raise ModelNotFound(f"this server serves {self.model_name!r} and no other model", param="model")


@dataclass(slots=True)
class Exchange:
    """One request's facts. `label` is the client's own X-Request-Id, echoed and never relied on."""

    id: str
    arrived_s: float
    route: str
    label: str | None = None
    tenant: str = ""
    disconnected: bool = False

    @property
    def headers(self) -> dict[str, str]:
        """X-Request-Id is the client's own label where it sent one; X-Tidegate-Id is always ours."""
        return {"X-Request-Id": self.label or self.id, "X-Tidegate-Id": self.id, "Server": "tidegate"}


CONTEXT = web.AppKey("context", Context)
EXCHANGE = web.RequestKey("exchange", Exchange)
