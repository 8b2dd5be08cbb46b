"""The aiohttp application and the socket that serves it.

The parser's own complaints get the same form of answer as everyone else's, and never reach the log with the bytes
that caused them: a header may hold a key.
"""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import LineTooLong

from serving.errors import BadRequest, HeadersTooLarge, ServingError

from .auth import Authenticator
from .context import CONTEXT, Context
from .middleware import UNMATCHED, make_middleware
from .openapi import openapi_document
from .problem import error_response
from .routes import ENDPOINTS, Endpoint

_log = logging.getLogger("tidegate.http")
_LINGER_S = 5.0  # a client that still sends what was refused gets this long to read why
_FLUSH_S = 1.0  # at the end, for answers that are being written


def build_app(context: Context, version: str) -> web.Application:
    """`context` is all that the handlers know."""
    endpoints = (*ENDPOINTS, _document(version))
    open_routes = frozenset(endpoint.path for endpoint in endpoints if endpoint.open) | {UNMATCHED}
    app = web.Application(middlewares=[make_middleware(open_routes)], client_max_size=context.config.max_body_bytes)
    app[CONTEXT] = context
    for endpoint in endpoints:
        path = endpoint.pattern or endpoint.path
        if endpoint.method == "GET":  # answers HEAD too
            app.router.add_get(path, endpoint.handler, expect_handler=_expect)
        else:
            app.router.add_route(endpoint.method, path, endpoint.handler, expect_handler=_expect)
    return app


async def _expect(request: web.Request) -> None:
    """Nothing yet: `read_limited` asks for the body once it is known that it will be read."""


def _document(version: str) -> Endpoint:
    async def openapi(request: web.Request) -> web.StreamResponse:
        return web.Response(body=document, content_type="application/json")

    endpoint = Endpoint("GET", "/openapi.json", openapi, "This document.", open=True)
    document = msgspec.json.encode(openapi_document((*ENDPOINTS, endpoint), version))
    return endpoint


class _Protocol(web.RequestHandler):
    """One connection."""

    __slots__ = ("_key_required",)

    def __init__(self, manager: web.Server, *, key_required: bool, **options: Any) -> None:
        super().__init__(manager, **options)
        self._key_required = key_required

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answers what the parser refuses. Without a readable key there is no telling more than 401."""
        _log.info("unreadable request: %s", type(exc).__name__)
        error: ServingError
        if isinstance(exc, LineTooLong):
            too_long = HeadersTooLarge("the request line or a header is too long")
            error = Authenticator.refusal() if self._key_required else too_long
        else:
            error = BadRequest("the request is no valid HTTP")
        response = error_response(error)
        response.headers["Server"] = "tidegate"
        response.force_close()
        return response


@asynccontextmanager
async def listen(app: web.Application, *, host: str, port: int) -> AsyncIterator[Sequence[tuple[str, int]]]:
    """Serve inside the context; yields the addresses. Leaving it cuts what the engine has not ended."""
    context = app[CONTEXT]
    flush_s = max(0.1, min(_FLUSH_S, context.config.shutdown_s))  # aiohttp takes 0 for no limit
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=flush_s)
    await runner.setup()
    loop = asyncio.get_running_loop()
    manager = runner.server
    assert manager is not None

    def protocol() -> _Protocol:
        return _Protocol(
            manager,
            key_required=context.authenticator.required,
            loop=loop,
            keepalive_timeout=context.config.keepalive_s,
            auto_decompress=False,  # compressed bodies are refused, and a bomb is never inflated
            lingering_time=_LINGER_S,
            access_log=None,
        )

    server = await loop.create_server(protocol, host, port, reuse_address=True, backlog=1024)
    try:
        yield [_address(each) for each in server.sockets]
    finally:
        server.close()
        await runner.cleanup()


def _address(sock: socket.socket) -> tuple[str, int]:
    host, port = sock.getsockname()[:2]
    return host, port
