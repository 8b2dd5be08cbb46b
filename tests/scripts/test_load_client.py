"""The clients of benchmarks against a server of known behaviour, on loopback."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from scripts.load_client import Load, percentile, run_clients, wait_ready

SEEN = web.AppKey("SEEN", list)


def stream(tokens: int) -> Callable[[web.Request], Any]:
    async def handler(request: web.Request) -> web.StreamResponse:
        request.app[SEEN].append((await request.json(), request.transport))
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(tokens):
            await response.write(b'data: {"choices": [{"text": "x"}]}\n\n')
        usage = {"choices": [], "usage": {"completion_tokens": tokens}}
        await response.write(f"data: {json.dumps(usage)}\n\ndata: [DONE]\n\n".encode())
        return response

    return handler


def run(handler: Callable[[web.Request], Any], **options: Any) -> tuple[Load, list[Any]]:
    async def all_of_it() -> tuple[Load, list[Any]]:
        app = web.Application()
        app[SEEN] = []
        app.router.add_post("/x", handler)
        async with TestServer(app) as server:
            load = await run_clients(str(server.make_url("/x")), options.pop("bodies"), **options)
        return load, app[SEEN]

    return asyncio.run(all_of_it())


def body(index: int) -> dict[str, Any]:
    return {"index": index, "stream": True, "max_tokens": 3, "stream_options": {"include_usage": True}}


@pytest.mark.parametrize("fresh", [True, False])
def test_every_request_is_sent_once_and_measured(fresh: bool) -> None:
    load, seen = run(stream(3), bodies=body, clients=3, requests=8, fresh=fresh)
    assert sorted(sent["index"] for sent, _ in seen) == list(range(8))
    assert (len(load.latencies), len(load.ttfts), len(load.token_times), load.errors) == (8, 8, 8, 0)
    assert all(0 < ttft <= latency for ttft, latency in zip(load.ttfts, load.latencies, strict=True))
    connections = len({id(transport) for _, transport in seen})
    assert connections == 8 if fresh else connections <= 3
    row = load.row("name")
    assert (row["run"], row["requests"]) == ("name", 8)
    assert {"latency_p95_ms", "ttft_p50_ms", "token_time_p50_ms"} <= row.keys()


def test_a_stream_that_is_too_short_is_an_error() -> None:
    load, _ = run(stream(2), bodies=body, clients=1, requests=4)
    assert load.errors == 4


def test_a_refusal_is_an_error_and_no_latency() -> None:
    async def refuse(request: web.Request) -> web.Response:
        request.app[SEEN].append((await request.json(), None))
        return web.Response(status=503)

    load, _ = run(refuse, bodies=body, clients=2, requests=5)
    assert (load.errors, load.latencies) == (5, [])


def test_waiting_for_a_server_that_has_ended_stops_at_once() -> None:
    with pytest.raises(TimeoutError, match="has ended"):
        asyncio.run(wait_ready("http://127.0.0.1:9", timeout_s=1000, alive=lambda: False))


def test_percentiles_are_by_nearest_rank() -> None:
    assert [percentile([4, 1, 3, 2], q) for q in (25, 50, 95, 99)] == [1, 2, 4, 4]
