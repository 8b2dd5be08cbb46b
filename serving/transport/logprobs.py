"""Log-probabilities on the wire: never an infinity or NaN, tokens as text with their bytes beside them.

A log-probability below -9999 (a token that truncation made impossible) is written as -9999.0; one that is undefined
(the first token of a prompt) as null. A token that is no whole character is written as OpenAI writes it,
"bytes:\\xf0\\x9f", and one that has no text at all "token_id:7", so that two of them never share a key.
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


def token_text(vocabulary: Vocabulary, token_id: int) -> str:
    raw = vocabulary.token_bytes(token_id)
    if not raw:
        return f"token_id:{token_id}"
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def completion_logprobs(
    vocabulary: Vocabulary, tokens: Sequence[TokenLogprob], offsets: Sequence[int]
) -> CompletionLogprobs:
    """Parallel arrays of equal length; each top_logprobs holds the token itself besides the most likely ones."""
    texts = [token_text(vocabulary, token.token_id) for token in tokens]
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
    most_likely = {token_text(vocabulary, i): finite(logprob) for i, logprob in token.top}
    return {**most_likely, text: finite(token.logprob)}


def _entry(vocabulary: Vocabulary, token: TokenLogprob) -> TokenEntry:
    tops = [
        TopLogprob(token_text(vocabulary, i), finite(logprob), list(vocabulary.token_bytes(i)))
        for i, logprob in token.top
    ]
    raw = list(vocabulary.token_bytes(token.token_id))
    return TokenEntry(token_text(vocabulary, token.token_id), finite(token.logprob), raw, tops)
