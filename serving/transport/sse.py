"""Server-sent events of one stream: `data: {...}` blocks, a reader that stalls is cut, exactly one terminal state.

The 200 line goes out with the first event, so whatever fails before it still gets an honest status.
"""

import asyncio
from collections.abc import Mapping

from aiohttp import web

DONE = b"data: [DONE]\n\n"


class ReaderGone(Exception):
    """The client left, or took nothing for too long; nobody is there to be told."""

    def __init__(self, *, stalled: bool) -> None:
        super().__init__("stalled" if stalled else "disconnected")
        self.stalled = stalled


def event(payload: bytes) -> bytes:
    """payload: JSON, which holds no line break."""
    return b"data: " + payload + b"\n\n"


class EventStream:
    def __init__(self, request: web.Request, *, stall_s: float, headers: Mapping[str, str]) -> None:
        self._request = request
        self._stall_s = stall_s
        self.response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
                **headers,
            }
        )

    @property
    def started(self) -> bool:
        return self.response.prepared

    async def send(self, events: bytes) -> None:
        """Write whole events. Raises ReaderGone."""
        await self._write(events, last=False)

    async def finish(self, events: bytes) -> None:
        """Write the last events and end the response. Raises ReaderGone."""
        await self._write(events, last=True)

    async def _write(self, events: bytes, *, last: bool) -> None:
        try:
            async with asyncio.timeout(self._stall_s):
                if not self.started:
                    await self.response.prepare(self._request)
                await self.response.write(events)
                if last:
                    await self.response.write_eof()
        except TimeoutError:
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ReaderGone(stalled=True) from None
        except ConnectionError:
            raise ReaderGone(stalled=False) from None
