"""Reads a request's body within limits: size counted as it arrives, an absolute time, no compression."""

import asyncio

from aiohttp import ClientPayloadError, HttpVersion11, web

from serving.errors import BodyTooLarge, Cancelled, RequestTimeout, UnsupportedMedia


async def read_limited(request: web.Request, *, max_bytes: int, timeout_s: float) -> bytes:
    """The whole body. Raises UnsupportedMedia, BodyTooLarge (before all of it is read), RequestTimeout, Cancelled."""
    _check_media(request)
    if request.content_length is not None and request.content_length > max_bytes:
        raise _too_large(max_bytes)
    try:
        async with asyncio.timeout(timeout_s):
            await _invite(request)
            return await _read(request, max_bytes)
    except TimeoutError:
        raise RequestTimeout(f"the body did not arrive within {timeout_s:g} s") from None
    except (ClientPayloadError, web.RequestPayloadError, ConnectionError):
        raise Cancelled("the connection ended inside the body") from None


async def _invite(request: web.Request) -> None:
    """A client that asks first gets its word here, after key, size and media were checked (RFC 9110, 10.1.1)."""
    if request.version >= HttpVersion11 and request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # what the response has written so far: nothing


async def _read(request: web.Request, max_bytes: int) -> bytes:
    chunks, size = [], 0
    async for chunk in request.content.iter_any():
        size += len(chunk)
        if size > max_bytes:
            raise _too_large(max_bytes)
        chunks.append(chunk)
    return b"".join(chunks)


def _check_media(request: web.Request) -> None:
    encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise UnsupportedMedia("compressed bodies are not accepted; send it without Content-Encoding")
    if "Content-Type" in request.headers and request.content_type != "application/json":
        raise UnsupportedMedia("send the header Content-Type: application/json")


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body is larger than the limit of {max_bytes} bytes")
