"""Endpoints of OpenAI's interface that this server does not have: a plain error that says so."""

from typing import NoReturn

from aiohttp import web

from serving.errors import Unsupported


async def unsupported(request: web.Request) -> NoReturn:
    raise Unsupported(f"{request.path} is not supported by this server; /openapi.json lists what is")
