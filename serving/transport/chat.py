"""POST /v1/chat/completions: messages in, an answer out, its reasoning apart where the model reasons aloud."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from serving.errors import BadRequest
from serving.pipeline.generation import GenerationRequest
from serving.pipeline.language import Vocabulary
from serving.types import Delta, LatencyClass, Usage

from .context import CONTEXT, EXCHANGE
from .logprobs import chat_logprobs
from .messages import chat_input
from .sampling import generation_request, wants_usage, with_output
from .schema.chat import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatIn,
    ChatMessageOut,
    ChatOut,
)
from .schema.common import UsageOut
from .sse import event
from .streaming import FINISH_REASONS, Gathered, gather, stream, usage_out
from .wire import check_rows, json_response, make_call, read_request


async def chat_completions(request: web.Request) -> web.StreamResponse:
    context = request.app[CONTEXT]
    body = await read_request(request, ChatIn)
    include_usage = wants_usage(body.stream, body.stream_options)
    check_rows(request, body.n or 1, "n")
    asked = _asked(body, context.new_seed())
    call = make_call(request, body, LatencyClass.INTERACTIVE)
    service = context.startup.service()
    generation = await service.generate(asked, stream=bool(body.stream), call=call)
    writer = _Writer(
        id=f"chatcmpl-{request[EXCHANGE].id}",
        created=int(context.now()),
        model=context.model_name,
        vocabulary=service.language.tokenizer if body.logprobs else None,
        include_usage=include_usage,
        reasons=service.language.new_splitter is not None,
    )
    if body.stream:
        return await stream(request, generation, writer)
    gathered = await gather(request, generation)
    return json_response(writer.whole(gathered, generation.usage))


def _asked(body: ChatIn, fresh_seed: int) -> GenerationRequest:
    prompts = (chat_input(body.messages),)
    asked = generation_request(body, prompts, max_tokens=_max_tokens(body), fresh_seed=fresh_seed)
    return with_output(asked, logprobs=_logprobs(body), split_reasoning=True)


def _max_tokens(body: ChatIn) -> int | None:
    """Both names mean the same; None: all that the context leaves."""
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise BadRequest("max_tokens and max_completion_tokens are both set and differ", param="max_tokens")
    return body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens


def _logprobs(body: ChatIn) -> int:
    if body.top_logprobs is not None and not body.logprobs:
        raise BadRequest("top_logprobs: only allowed with logprobs: true", param="top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else -1


@dataclass(slots=True, kw_only=True)
class _Writer:
    """`vocabulary` None: no log-probabilities. `reasons`: messages have a reasoning_content."""

    id: str
    created: int
    model: str
    vocabulary: Vocabulary | None
    include_usage: bool
    reasons: bool
    _begun: set[int] = field(default_factory=set)

    def whole(self, gathered: Sequence[Gathered], usage: Usage) -> ChatOut:
        choices = [
            ChatChoice(
                index,
                ChatMessageOut("assistant", each.text, each.reasoning if self.reasons else UNSET),
                chat_logprobs(self.vocabulary, each.tokens) if self.vocabulary else None,
                each.finish_reason,
            )
            for index, each in enumerate(gathered)
        ]
        return ChatOut(self.id, "chat.completion", self.created, self.model, choices, usage_out(usage))

    def events(self, deltas: Sequence[Delta]) -> bytes:
        out = []
        for delta in deltas:
            if delta.choice not in self._begun:
                self._begun.add(delta.choice)
                out.append(ChatChunkChoice(delta.choice, ChatDelta("assistant", "")))
            out.append(self._choice(delta))
        usage = None if self.include_usage else UNSET
        return b"".join(event(msgspec.json.encode(self._chunk([choice], usage))) for choice in out)

    def usage(self, usage: Usage) -> bytes:
        return event(msgspec.json.encode(self._chunk([], usage_out(usage)))) if self.include_usage else b""

    def _choice(self, delta: Delta) -> ChatChunkChoice:
        wire = ChatDelta(content=delta.text or UNSET, reasoning_content=delta.reasoning or UNSET)
        logprobs = chat_logprobs(self.vocabulary, delta.tokens) if self.vocabulary and delta.tokens else None
        reason = FINISH_REASONS[delta.finish] if delta.finish is not None else None
        return ChatChunkChoice(delta.choice, wire, logprobs, reason)

    def _chunk(self, choices: list[ChatChunkChoice], usage: UsageOut | UnsetType | None) -> ChatChunk:
        return ChatChunk(self.id, "chat.completion.chunk", self.created, self.model, choices, usage)
