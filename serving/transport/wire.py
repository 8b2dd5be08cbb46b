"""What every POST handler does first and last: the body to a checked struct and a Call, a struct to a response."""

from typing import Protocol, TypeVar

import msgspec
from aiohttp import web

from serving.errors import BadRequest
from serving.service import Call
from serving.types import LatencyClass, Priority

from .body import read_limited
from .context import CONTEXT, EXCHANGE
from .decode import read_body

T = TypeVar("T", bound=msgspec.Struct)


class Routed(Protocol):
    """A body with the fields that say how it is to be treated."""

    @property
    def priority(self) -> str | None: ...

    @property
    def latency_class(self) -> str | None: ...

    @property
    def timeout_ms(self) -> int | None: ...

    @property
    def profile_id(self) -> str | None: ...


def make_call(request: web.Request, body: Routed, default_class: LatencyClass) -> Call:
    """The routing fields of a body as the service takes them."""
    context, exchange = request.app[CONTEXT], request[EXCHANGE]
    limit_ms = body.timeout_ms or context.config.default_timeout_ms
    return Call(
        id=exchange.id,
        tenant=exchange.tenant,
        arrived_s=exchange.arrived_s,
        deadline_s=exchange.arrived_s + limit_ms / 1000 if limit_ms else None,
        priority=Priority[body.priority.upper()] if body.priority is not None else Priority.NORMAL,
        latency_class=LatencyClass(body.latency_class) if body.latency_class is not None else default_class,
        profile_id=body.profile_id,
    )


async def read_request(request: web.Request, cls: type[T]) -> T:
    """The body, read within the server's limits and checked; the model that it names is the served one."""
    context = request.app[CONTEXT]
    config = context.config
    raw = await read_limited(request, max_bytes=config.max_body_bytes, timeout_s=config.body_timeout_s)
    body = read_body(raw, cls)
    context.check_model(getattr(body, "model", None))
    return body


def json_response(answer: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.json.encode(answer), content_type="application/json")


def check_rows(request: web.Request, num_rows: int, param: str) -> None:
    """Raises BadRequest when one request asks for more rows than it may."""
    most = request.app[CONTEXT].config.max_rows
    if num_rows > most:
        raise BadRequest(f"{param}: {num_rows} rows in one request; the most is {most}", param=param)
