"""GET endpoints: probes, metrics, the list of models. None of them reads a body or waits for the engine."""

import msgspec
from aiohttp import web
from msgspec import UNSET

from serving.errors import ModelNotFound
from serving.metrics import CONTENT_TYPE
from serving.startup import Phase

from .context import CONTEXT, Context
from .schema.text import Health, ModelList, ModelOut
from .wire import json_response


async def livez(request: web.Request) -> web.StreamResponse:
    """200 while the process can work: also while it loads and warms up."""
    failed = request.app[CONTEXT].startup.health.phase is Phase.FAILED
    return _health(Health("failed" if failed else "ok"), 503 if failed else 200)


async def readyz(request: web.Request) -> web.StreamResponse:
    """200 once every bucket is compiled; else 503 with how far it has come."""
    health = request.app[CONTEXT].startup.health
    buckets = f"{health.done}/{health.total}" if health.total else UNSET
    return _health(Health(health.phase.value, buckets), 200 if health.phase is Phase.READY else 503)


async def metrics(request: web.Request) -> web.StreamResponse:
    body = request.app[CONTEXT].metrics.render()
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})


async def models(request: web.Request) -> web.StreamResponse:
    out = ModelList("list", [_model(request.app[CONTEXT])])
    return json_response(out)


async def model(request: web.Request) -> web.StreamResponse:
    context = request.app[CONTEXT]
    if request.match_info["id"] != context.model_name:
        raise ModelNotFound(f"this server serves {context.model_name!r} and no other model")
    return json_response(_model(context))


def _model(context: Context) -> ModelOut:
    max_context = context.startup.service().language.max_context
    return ModelOut(context.model_name, "model", context.started, "tidegate", max_context)


def _health(health: Health, status: int) -> web.Response:
    headers = {"Retry-After": "5"} if status == 503 else {}
    return web.Response(
        body=msgspec.json.encode(health), status=status, content_type="application/json", headers=headers
    )
