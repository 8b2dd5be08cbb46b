"""POST /tokenize and /detokenize: what the completions endpoints would make of a text."""

from aiohttp import web
from msgspec import UNSET

from serving.errors import BadRequest, ServingError
from serving.pipeline.language import Language
from serving.pipeline.prompts import Prompt, encode_inputs
from serving.types import Input, TextInput

from .context import CONTEXT
from .logprobs import token_text
from .messages import chat_input
from .schema.text import DetokenizeIn, DetokenizeOut, TokenizeIn, TokenizeOut
from .wire import json_response, read_request


async def tokenize(request: web.Request) -> web.StreamResponse:
    context = request.app[CONTEXT]
    body = await read_request(request, TokenizeIn)
    item = _input(body)
    service = context.startup.service()
    bare = body.add_special_tokens is False
    ids = await service.encode(lambda: _encode(service.language, item, bare=bare))
    vocabulary = service.language.tokenizer
    texts = [token_text(vocabulary, i) for i in ids] if body.return_token_strs else UNSET
    out = TokenizeOut(len(ids), service.language.max_context, list(ids), texts)
    return json_response(out)


async def detokenize(request: web.Request) -> web.StreamResponse:
    context = request.app[CONTEXT]
    body = await read_request(request, DetokenizeIn)
    language = context.startup.service().language
    if any(token >= language.vocab_size for token in body.tokens):
        raise BadRequest(f"tokens: ids are 0 to {language.vocab_size - 1}", param="tokens")
    out = DetokenizeOut(language.tokenizer.decode(body.tokens))
    return json_response(out)


def _input(body: TokenizeIn) -> Input:
    if (body.prompt is None) == (body.messages is None):
        raise BadRequest("exactly one of prompt and messages is needed", param="prompt")
    return TextInput(body.prompt) if body.prompt is not None else chat_input(body.messages or ())


def _encode(language: Language, item: Input, *, bare: bool) -> Prompt:
    """A text that is longer than the context may still be counted."""
    if isinstance(item, TextInput):
        ids = tuple(language.tokenizer.encode(item.text))
        bos = language.tokenizer.bos_id if language.tokenizer.add_bos and not bare else None
        return ids if bos is None else (bos, *ids)
    (prompt,) = encode_inputs(language, (item,))
    if isinstance(prompt, ServingError):
        raise prompt
    return prompt
