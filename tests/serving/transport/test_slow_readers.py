"""Case A04: readers that never read are cut and their pages freed; the others never notice, and nothing is buffered
without bound. The same with sockets that are closed while the server waits for them."""

import json
import logging
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from aiohttp import web

from serving.config import ServerConfig
from serving.transport.sse import EventStream
from tests.fakes_http import Served

DEAF, TOKENS = 4, 400
CONFIG = ServerConfig(port=0, shutdown_s=0.2, stream_stall_s=0.3)


def deaf(server: Served) -> socket.socket:
    """Asks for more than any socket holds, with the smallest of buffers, and reads none of it."""
    body = json.dumps({"prompt": "a", "max_tokens": TOKENS, "logprobs": 5, "stream": True, "ignore_eos": True}).encode()
    reader = socket.socket()
    reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    reader.connect(("127.0.0.1", server.port))
    reader.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    return reader


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel would hold megabytes of a stream for a reader that takes nothing."""
    begin = EventStream.__init__

    def init(self: EventStream, request: web.Request, **options: Any) -> None:
        assert request.transport is not None
        request.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        begin(self, request, **options)

    monkeypatch.setattr(EventStream, "__init__", init)


@pytest.mark.usefixtures("small_buffers")
@pytest.mark.parametrize("closes", [False, True])
def test_a04_readers_that_do_not_read_harm_nobody(closes: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with Served(config=CONFIG) as server, ThreadPoolExecutor(4) as clients:
        readers = [deaf(server) for _ in range(DEAF)]
        good = [
            clients.submit(server.complete, f"p{i}", max_tokens=TOKENS, stream=True, ignore_eos=True) for i in range(4)
        ]
        for answer in good:
            assert answer.result().events[-1] == "[DONE]"
        if closes:
            for reader in readers:
                reader.close()
        server.wait_for("tidegate_http_in_flight_requests", 1)  # the scrape
        server.wait_for("tidegate_kv_pages_used", 0)
        assert server.metric("tidegate_http_disconnects_total") == DEAF
        if not closes:
            assert server.metric("tidegate_streams_cut_total") == DEAF
        assert server.complete("after", max_tokens=3).status == 200
        for reader in readers:
            reader.close()
    assert not [record for record in caplog.records if "never retrieved" in record.getMessage()]
