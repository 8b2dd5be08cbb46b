"""Around every handler: id, authentication before the body is read, errors to responses, metrics, one access line.

One of the two places with a broad except (the other is the engine's loop): what nobody foresaw is logged once and
answered with 500. Invariant: metrics and log lines hold route templates and our own ids, never what a client sent.
"""

import asyncio
import logging
import re

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from serving.errors import (
    BadRequest,
    BodyTooLarge,
    InternalError,
    MethodNotAllowed,
    NotFound,
    ServingError,
    Unauthorized,
)

from .context import CONTEXT, EXCHANGE, Exchange
from .problem import error_response

_log = logging.getLogger("tidegate.http")
_LABEL = re.compile(r"[\x21-\x7e]{1,128}")

UNMATCHED = "unmatched"  # the route label of paths that are nobody's
CLIENT_LEFT = 499
_PROBES = frozenset({"/livez", "/readyz", "/metrics"})  # asked every few seconds: their lines are for debugging


def make_middleware(open_routes: frozenset[str]) -> Middleware:
    """open_routes: templates that answer without an API key."""

    @web.middleware
    async def exchange_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        context = request.app[CONTEXT]
        exchange = Exchange(context.new_id(), context.clock(), _route(request), _label(request))
        request[EXCHANGE] = exchange
        status = CLIENT_LEFT
        context.metrics.in_flight.inc()
        try:
            response = await _answer(request, handler, is_open=exchange.route in open_routes)
            status = CLIENT_LEFT if exchange.disconnected else response.status
            return response
        finally:
            context.metrics.in_flight.dec()
            _account(request, status)

    return exchange_middleware


async def _answer(request: web.Request, handler: Handler, *, is_open: bool) -> web.StreamResponse:
    context, exchange = request.app[CONTEXT], request[EXCHANGE]
    try:
        if not is_open:
            exchange.tenant = context.authenticator.tenant(request.headers.get("Authorization"))
        response = await handler(request)
    except asyncio.CancelledError:
        exchange.disconnected = True
        raise
    except Exception as error:
        if isinstance(error, Unauthorized):
            context.metrics.unauthorized.inc()
        response = error_response(_as_serving_error(error, exchange))
    if not response.prepared:
        response.headers.update(exchange.headers)
    return response


def _as_serving_error(error: Exception, exchange: Exchange) -> ServingError:
    match error:
        case ServingError():
            if error.status >= 500 and not error.retryable:
                _log.warning("request failed: %s", error.code, extra={"id": exchange.id})
            return error
        case web.HTTPNotFound():
            return NotFound("there is no such path here; /openapi.json lists them all")
        case web.HTTPMethodNotAllowed():
            allowed = sorted(error.allowed_methods)
            return MethodNotAllowed(
                f"{error.method[:16]} is not allowed here; use {', '.join(allowed)}", allowed=allowed
            )
        case web.HTTPRequestEntityTooLarge():
            return BodyTooLarge("the body is too large")
        case web.HTTPException() if error.status < 500:
            return BadRequest(error.reason)
        case _:
            _log.error("request failed", exc_info=error, extra={"id": exchange.id})
            return InternalError("the server failed; see its log")


def _route(request: web.Request) -> str:
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else UNMATCHED


def _label(request: web.Request) -> str | None:
    given = request.headers.get("X-Request-Id", "")
    return given if _LABEL.fullmatch(given) else None


def _account(request: web.Request, status: int) -> None:
    context, exchange = request.app[CONTEXT], request[EXCHANGE]
    seconds = context.clock() - exchange.arrived_s
    context.metrics.answered(exchange.route, request.method, status, seconds)
    if status == CLIENT_LEFT:
        context.metrics.disconnects.inc()
    if context.log_access:
        method = request.method if request.method.isalpha() else "?"
        _log.log(
            logging.DEBUG if exchange.route in _PROBES else logging.INFO,
            "%s %s %d",
            method[:16],
            exchange.route,
            status,
            extra={"id": exchange.id, "tenant": exchange.tenant, "ms": round(seconds * 1000, 1)},
        )
