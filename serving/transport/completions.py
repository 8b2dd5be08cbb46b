"""POST /v1/completions: text or token ids in, a continuation out."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from serving.errors import BadRequest
from serving.pipeline.generation import GenerationRequest
from serving.pipeline.language import Vocabulary
from serving.types import Delta, Input, LatencyClass, TextInput, TokenInput, Usage

from .context import CONTEXT, EXCHANGE
from .logprobs import completion_logprobs
from .sampling import generation_request, wants_usage, with_output
from .schema.common import UsageOut
from .schema.completions import CompletionChoice, CompletionIn, CompletionOut
from .sse import event
from .streaming import FINISH_REASONS, Gathered, gather, stream, usage_out
from .wire import check_rows, json_response, make_call, read_request

_DEFAULT_MAX_TOKENS = 16  # as in OpenAI's interface


async def completions(request: web.Request) -> web.StreamResponse:
    context = request.app[CONTEXT]
    body = await read_request(request, CompletionIn)
    include_usage = wants_usage(body.stream, body.stream_options)
    asked = _asked(body, context.new_seed())
    check_rows(request, len(asked.prompts) * asked.num_choices, "n")
    call = make_call(request, body, LatencyClass.INTERACTIVE)
    service = context.startup.service()
    generation = await service.generate(asked, stream=bool(body.stream), call=call)
    writer = _Writer(
        id=f"cmpl-{request[EXCHANGE].id}",
        created=int(context.now()),
        model=context.model_name,
        vocabulary=service.language.tokenizer if body.logprobs is not None else None,
        include_usage=include_usage,
    )
    if body.stream:
        return await stream(request, generation, writer)
    gathered = await gather(request, generation)
    return json_response(writer.whole(gathered, generation.usage))


def _asked(body: CompletionIn, fresh_seed: int) -> GenerationRequest:
    max_tokens = _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    asked = generation_request(body, read_prompts(body.prompt), max_tokens=max_tokens, fresh_seed=fresh_seed)
    return with_output(asked, logprobs=-1 if body.logprobs is None else body.logprobs, echo=bool(body.echo))


def read_prompts(prompt: str | list[str | int | list[int]]) -> tuple[Input, ...]:
    """One input a prompt. An empty list is one prompt of no tokens. Raises BadRequest for a mixed list."""
    if isinstance(prompt, str):
        return (TextInput(prompt),)
    if all(type(item) is int for item in prompt):
        return (TokenInput(tuple(prompt)),)  # type: ignore[arg-type]
    if all(isinstance(item, str) for item in prompt):
        return tuple(TextInput(item) for item in prompt)  # type: ignore[arg-type]
    if all(isinstance(item, list) for item in prompt):
        return tuple(TokenInput(tuple(item)) for item in prompt)  # type: ignore[arg-type]
    raise BadRequest("prompt: a list holds either strings, token ids, or lists of token ids", param="prompt")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Writer:
    """`vocabulary` None: no log-probabilities."""

    id: str
    created: int
    model: str
    vocabulary: Vocabulary | None
    include_usage: bool

    def whole(self, gathered: Sequence[Gathered], usage: Usage) -> CompletionOut:
        choices = [
            CompletionChoice(
                index,
                each.text,
                completion_logprobs(self.vocabulary, each.tokens, each.offsets) if self.vocabulary else None,
                each.finish_reason,
            )
            for index, each in enumerate(gathered)
        ]
        return self._out(choices, usage_out(usage))

    def events(self, deltas: Sequence[Delta]) -> bytes:
        return b"".join(
            event(msgspec.json.encode(self._out([self._choice(delta)], None if self.include_usage else UNSET)))
            for delta in deltas
        )

    def usage(self, usage: Usage) -> bytes:
        return event(msgspec.json.encode(self._out([], usage_out(usage)))) if self.include_usage else b""

    def _choice(self, delta: Delta) -> CompletionChoice:
        logprobs = None
        if self.vocabulary is not None and delta.tokens:
            logprobs = completion_logprobs(self.vocabulary, delta.tokens, delta.offsets)
        reason = FINISH_REASONS[delta.finish] if delta.finish is not None else None
        return CompletionChoice(delta.choice, delta.text, logprobs, reason)

    def _out(self, choices: list[CompletionChoice], usage: UsageOut | UnsetType | None) -> CompletionOut:
        return CompletionOut(self.id, "text_completion", self.created, self.model, choices, usage)
