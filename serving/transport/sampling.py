"""The sampling fields of both completions endpoints, from wire to pipeline: defaults, clamps, contradictions."""

import re
from collections.abc import Mapping
from dataclasses import replace

from serving.errors import BadRequest
from serving.pipeline.generation import GenerationRequest
from serving.types import Input

from .grammar import read_grammar
from .schema.chat import ChatIn
from .schema.common import StreamOptions
from .schema.completions import CompletionIn

_GREEDY_BELOW = 1e-5  # a temperature this small divides logits to infinity; its limit is greedy
_SEEDS = range(-(2**63), 2**64)
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,8}")


def generation_request(
    body: CompletionIn | ChatIn, prompts: tuple[Input, ...], *, max_tokens: int | None, fresh_seed: int
) -> GenerationRequest:
    """Everything but echo, logprobs and reasoning, which the endpoints add. Raises BadRequest.

    fresh_seed: used where the client gave none.
    """
    if body.seed is not None and body.seed not in _SEEDS:
        raise BadRequest("seed: expected an integer of at most 64 bits", param="seed")
    temperature = 1.0 if body.temperature is None else body.temperature
    grammar = read_grammar(body)
    if grammar is not None and body.ignore_eos:
        raise BadRequest(f"ignore_eos: not with {grammar.param}, which says where the text ends", param="ignore_eos")
    return GenerationRequest(
        prompts=prompts,
        num_choices=body.n or 1,
        max_tokens=max_tokens,
        temperature=0.0 if temperature < _GREEDY_BELOW else temperature,
        top_k=max(0, body.top_k or 0),
        top_p=1.0 if body.top_p is None else body.top_p,
        min_p=body.min_p or 0.0,
        seed=fresh_seed if body.seed is None else body.seed,
        seed_is_fresh=body.seed is None,
        stop=_stops(body.stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=_logit_bias(body.logit_bias),
        allowed_token_ids=None if body.allowed_token_ids is None else tuple(body.allowed_token_ids),
        grammar=grammar,
    )


def with_output(
    request: GenerationRequest, *, logprobs: int, echo: bool = False, split_reasoning: bool = False
) -> GenerationRequest:
    return replace(request, logprobs=logprobs, echo=echo, split_reasoning=split_reasoning)


def wants_usage(stream: bool | None, options: StreamOptions | None) -> bool:
    """Raises BadRequest for stream_options without stream."""
    if options is not None and not stream:
        raise BadRequest("stream_options: only allowed with stream: true", param="stream_options")
    return options is not None and bool(options.include_usage)


def _logit_bias(bias: Mapping[str, float] | None) -> tuple[tuple[int, float], ...]:
    """(token id, bias), those that change something. Raises BadRequest for a key that is no plain number."""
    pairs = []
    for key, value in (bias or {}).items():
        if not _TOKEN_ID.fullmatch(key):
            raise BadRequest(f"logit_bias: {key[:64]!r} is no token id", param="logit_bias")
        if value:
            pairs.append((int(key), value))
    return tuple(pairs)


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(dict.fromkeys(stop))
