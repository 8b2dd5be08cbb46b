"""Log-probabilities on the wire: never an infinity or NaN, tokens as text with their bytes beside them.

A log-probability below -9999 (a token that truncation made impossible) is written as -9999.0; one that is undefined
(the first token of a prompt) as null. A token that is no whole character is written as OpenAI writes it,
"bytes:\\xf0\\x9f", so that two of them never share a key.
"""

import math
from collections.abc import Sequence

from serving.pipeline.language import Vocabulary
from serving.types import TokenLogprob

from .schema.chat import ChatLogprobs, TokenEntry, TopLogprob
from .schema.completions import CompletionLogprobs

FLOOR = -9999.0


def finite(logprob: float) -> float:
    return logprob if logprob > FLOOR else FLOOR


def token_text(raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def completion_logprobs(
    vocabulary: Vocabulary, tokens: Sequence[TokenLogprob], offsets: Sequence[int]
) -> CompletionLogprobs:
    """Parallel arrays of equal length; each top_logprobs holds the token itself besides the most likely ones."""
    texts = [token_text(vocabulary.token_bytes(token.token_id)) for token in tokens]
    return CompletionLogprobs(
        tokens=texts,
        token_logprobs=[None if math.isnan(token.logprob) else finite(token.logprob) for token in tokens],
        top_logprobs=[_top(vocabulary, token, text) for token, text in zip(tokens, texts, strict=True)],
        text_offset=list(offsets),
    )


def chat_logprobs(vocabulary: Vocabulary, tokens: Sequence[TokenLogprob]) -> ChatLogprobs:
    return ChatLogprobs([_entry(vocabulary, token) for token in tokens])


def _top(vocabulary: Vocabulary, token: TokenLogprob, text: str) -> dict[str, float] | None:
    if math.isnan(token.logprob):
        return None
    most_likely = {token_text(vocabulary.token_bytes(i)): finite(logprob) for i, logprob in token.top}
    return {**most_likely, text: finite(token.logprob)}


def _entry(vocabulary: Vocabulary, token: TokenLogprob) -> TokenEntry:
    raw = vocabulary.token_bytes(token.token_id)
    tops = []
    for token_id, logprob in token.top:
        top = vocabulary.token_bytes(token_id)
        tops.append(TopLogprob(token_text(top), finite(logprob), list(top)))
    return TokenEntry(token_text(raw), finite(token.logprob), list(raw), tops)
