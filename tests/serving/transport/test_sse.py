import asyncio
from unittest.mock import Mock

import pytest
from aiohttp.test_utils import make_mocked_request

from serving.transport.sse import EventStream, ReaderGone, event


class Writer:
    """A socket writer that takes `room` bytes and then blocks, or fails."""

    def __init__(self, *, blocks: bool = False, breaks: bool = False) -> None:
        self.written = b""
        self.output_size = 0
        self._blocks, self._breaks = blocks, breaks

    async def write_headers(self, status_line: str, headers: object) -> None:
        self.written += b"head;"

    def send_headers(self) -> None:
        return

    async def write(self, chunk: bytes) -> None:
        if self._blocks:
            await asyncio.Event().wait()
        if self._breaks:
            raise ConnectionResetError
        self.written += chunk

    async def write_eof(self, chunk: bytes = b"") -> None:
        self.written += chunk + b";end"

    def __getattr__(self, name: str) -> Mock:
        return Mock()


def stream(writer: Writer, transport: Mock) -> EventStream:
    request = make_mocked_request("POST", "/", writer=writer, transport=transport)
    return EventStream(request, stall_s=0.01, headers={"X-Request-Id": "r"})


def test_the_head_goes_out_with_the_first_event() -> None:
    async def scenario() -> None:
        writer = Writer()
        events = stream(writer, Mock())
        assert not events.started
        await events.send(event(b"{}"))
        assert events.started
        await events.finish(event(b"[DONE]"))
        assert writer.written == b"head;data: {}\n\ndata: [DONE]\n\n;end"
        assert events.response.headers["X-Request-Id"] == "r"

    asyncio.run(scenario())


def test_a_reader_that_stalls_is_cut() -> None:
    async def scenario() -> None:
        transport = Mock()
        with pytest.raises(ReaderGone) as gone:
            await stream(Writer(blocks=True), transport).send(b"x")
        assert gone.value.stalled
        transport.abort.assert_called_once()

    asyncio.run(scenario())


def test_a_reader_that_left_is_no_fault() -> None:
    async def scenario() -> None:
        with pytest.raises(ReaderGone) as gone:
            await stream(Writer(breaks=True), Mock()).send(b"x")
        assert not gone.value.stalled

    asyncio.run(scenario())
