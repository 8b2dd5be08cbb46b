"""A Generation to an answer: gathered whole, or as a stream of events that always ends in one terminal state.

A stream ends with one chunk per choice that carries finish_reason, the usage chunk where it was asked for, and
[DONE]; or, on a fault, with one error event and the close. Whatever happens, the generation is closed.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from aiohttp import web

from serving.errors import Cancelled, ServingError
from serving.service import Generation
from serving.types import Delta, Finish, TokenLogprob, Usage

from .context import CONTEXT, EXCHANGE
from .problem import error_json
from .schema.common import UsageOut
from .sse import DONE, EventStream, ReaderGone, event

_log = logging.getLogger("tidegate.http")
FINISH_REASONS = {Finish.STOP: "stop", Finish.LENGTH: "length"}


class Chunks(Protocol):
    """Makes the events of one kind of completion."""

    def events(self, deltas: Sequence[Delta]) -> bytes: ...

    def usage(self, usage: Usage) -> bytes:
        """Empty unless the client asked for it."""
        ...


@dataclass(slots=True)
class Gathered:
    """All of one choice."""

    text: str = ""
    reasoning: str = ""
    tokens: list[TokenLogprob] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.reasoning += delta.reasoning
        self.tokens += delta.tokens
        self.offsets += delta.offsets
        if delta.finish is not None:
            self.finish_reason = FINISH_REASONS[delta.finish]


def usage_out(usage: Usage) -> UsageOut:
    details = {"cached_tokens": usage.cached_tokens}
    total = usage.prompt_tokens + usage.completion_tokens
    return UsageOut(usage.prompt_tokens, usage.completion_tokens, total, details)


async def gather(request: web.Request, generation: Generation) -> list[Gathered]:
    """Every choice, whole. Raises the first ServingError of any of them."""
    gathered = [Gathered() for _ in range(generation.num_choices)]
    try:
        while not generation.ended:
            for delta in _unfailed(await generation.take()):
                gathered[delta.choice].add(delta)
    finally:
        generation.close()
    _count(request, generation.usage)
    return gathered


async def stream(request: web.Request, generation: Generation, chunks: Chunks) -> web.StreamResponse:
    """Raises ServingError only while no byte has been sent."""
    exchange = request[EXCHANGE]
    events = EventStream(request, stall_s=request.app[CONTEXT].config.stream_stall_s, headers=exchange.headers)
    try:
        await _send_all(events, generation, chunks)
        _count(request, generation.usage)
    except ReaderGone as gone:
        exchange.disconnected = True
        if gone.stalled:
            request.app[CONTEXT].metrics.cut_streams.inc()
        if not events.started:
            raise Cancelled("the client left") from None
    except Exception as error:
        if not events.started:
            raise
        await _send_error(events, error, exchange.id)
    finally:
        generation.close()
    return events.response


async def _send_all(events: EventStream, generation: Generation, chunks: Chunks) -> None:
    while not generation.ended:
        written = chunks.events(_unfailed(await generation.take()))
        if generation.ended:
            await events.finish(written + chunks.usage(generation.usage) + DONE)
        elif written:
            await events.send(written)


async def _send_error(events: EventStream, error: Exception, request_id: str) -> None:
    if not isinstance(error, ServingError):
        _log.error("stream failed", exc_info=error, extra={"id": request_id})
    try:
        await events.finish(event(error_json(error)))
    except ReaderGone:
        return


def _unfailed(deltas: list[Delta]) -> list[Delta]:
    for delta in deltas:
        if delta.error is not None:
            raise delta.error
    return deltas


def _count(request: web.Request, usage: Usage) -> None:
    tokens = request.app[CONTEXT].metrics.tokens
    tokens.labels("prompt").inc(usage.prompt_tokens)
    tokens.labels("completion").inc(usage.completion_tokens)
