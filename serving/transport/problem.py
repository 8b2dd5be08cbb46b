"""Errors on the wire, in OpenAI's shape."""

import math

import msgspec
from aiohttp import web

from serving.errors import InternalError, MethodNotAllowed, ServingError

from .schema.common import ErrorBody, ErrorOut


def error_out(error: Exception) -> ErrorOut:
    """What a client may know of an error; of one that is no ServingError, nothing."""
    known = error if isinstance(error, ServingError) else InternalError("the server failed; see its log")
    return ErrorOut(known.message, known.kind, known.param, known.code)


def error_json(error: Exception) -> bytes:
    return msgspec.json.encode(ErrorBody(error_out(error)))


def error_response(error: ServingError) -> web.Response:
    """A whole response, with the headers that belong to its status."""
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    if isinstance(error, MethodNotAllowed):
        headers["Allow"] = ", ".join(error.allowed)
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return web.Response(body=error_json(error), status=error.status, content_type="application/json", headers=headers)
