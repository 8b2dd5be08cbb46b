"""What every handler needs: the server's parts under one application key, and one request's facts under another."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web

from serving.config import ServerConfig
from serving.errors import BadRequest, ModelNotFound
from serving.metrics import Metrics
from serving.service import Call
from serving.startup import Startup
from serving.types import LatencyClass, Priority

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


def make_call(
    request: web.Request,
    *,
    priority: str | None,
    latency_class: str | None,
    timeout_ms: int | None,
    profile_id: str | None,
    default_class: LatencyClass,
) -> Call:
    """The routing fields of a body as the service takes them."""
    context, exchange = request.app[CONTEXT], request[EXCHANGE]
    limit_ms = timeout_ms if timeout_ms is not None else context.config.default_timeout_ms or math.inf
    return Call(
        id=exchange.id,
        tenant=exchange.tenant,
        arrived_s=exchange.arrived_s,
        deadline_s=exchange.arrived_s + limit_ms / 1000 if math.isfinite(limit_ms) else None,
        priority=Priority[priority.upper()] if priority is not None else Priority.NORMAL,
        latency_class=LatencyClass(latency_class) if latency_class is not None else default_class,
        profile_id=profile_id,
    )


def check_rows(request: web.Request, num_rows: int, param: str) -> None:
    """Raises BadRequest when one request asks for more rows than it may."""
    most = request.app[CONTEXT].config.max_rows
    if num_rows > most:
        raise BadRequest(f"{param}: {num_rows} rows in one request; the most is {most}", param=param)
