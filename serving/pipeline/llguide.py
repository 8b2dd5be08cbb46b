"""Grammars to masks with llguidance (the extra `tidegate[guided]`): JSON schemas, regular expressions, choices.

The library's derivative parser needs no table over the vocabulary, so a new grammar is ready in milliseconds and a mask
takes well under one. Building its view of the tokenizer takes a second for 129,280 tokens, with Python's lock held: at
load, never beside running requests.
"""

import json
from collections.abc import Callable, Collection
from typing import Any

from serving.errors import BadRequest
from serving.types import Constraint

from .guide import Form, Grammar, Guide, mask_bytes
from .language import Vocabulary

# White space between JSON's parts is the model's choice, but not without end: a model that repeats itself would fill
# its whole budget with it.
_JSON_OPTIONS = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{0,20}"}
_FUEL = 200_000  # a fifth of the library's: an expression that would keep a thread for seconds is refused in tenths
_MAX_CHARS = 256 * 1024
_MAX_MESSAGE_CHARS = 300


def make_guide(tokenizer: Vocabulary, *, control_ids: Collection[int], vocab_size: int) -> Guide | None:
    """None where llguidance is not installed, and for a tokenizer without an end token: a text could not end.

    control_ids: tokens that are no text. vocab_size: the model's, which may be more than the tokenizer's.
    """
    try:
        import llguidance
    except ImportError:
        return None
    if not tokenizer.eos_ids:
        return None
    view = _View(tokenizer, frozenset(control_ids), vocab_size)
    return LlGuide(llguidance.LLTokenizer(view, eos_token=list(tokenizer.eos_ids)), vocab_size)  # type: ignore[arg-type]


class _View:
    """A tokenizer as llguidance asks for it (its TokenizerWrapper)."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Vocabulary, control_ids: frozenset[int], vocab_size: int) -> None:
        self._encode = tokenizer.encode
        self.eos_token_id, self.bos_token_id = tokenizer.eos_ids[0], tokenizer.bos_id
        self.special_token_ids = sorted(control_ids | set(tokenizer.eos_ids))
        self.tokens = [tokenizer.token_bytes(i) for i in range(vocab_size)]

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text if isinstance(text, str) else text.decode("utf-8", "replace"))


class LlGuide:
    """Implements Guide. `tokenizer`: an llguidance.LLTokenizer."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size

    def compile(self, grammar: Grammar) -> Callable[[], Constraint]:
        import llguidance

        limits = llguidance.LLParserLimits(initial_lexer_fuel=_FUEL)
        matcher = llguidance.LLMatcher(self._tokenizer, _compiled(grammar), log_level=0, limits=limits)
        if matcher.is_error():
            raise _refused(grammar, matcher.get_error())
        first = _next_mask(matcher, grammar, mask_bytes(self._vocab_size))
        return lambda: LlConstraint(matcher.deep_copy(), grammar, first)


def _compiled(grammar: Grammar) -> str:
    import llguidance

    if len(grammar.text) > _MAX_CHARS:
        raise _refused(grammar, f"it has {len(grammar.text)} characters; {_MAX_CHARS} is the most")
    try:
        match grammar.form:
            case Form.JSON_SCHEMA:
                return llguidance.LLMatcher.grammar_from_json_schema(grammar.text, None, _JSON_OPTIONS)  # type: ignore[arg-type]
            case Form.REGEX:
                return llguidance.LLMatcher.grammar_from_regex(grammar.text)
            case Form.CHOICE:
                choices = [json.dumps(choice, ensure_ascii=False) for choice in json.loads(grammar.text)]
                return llguidance.LLMatcher.grammar_from_lark("start: " + " | ".join(choices))
    except ValueError as error:
        raise _refused(grammar, str(error)) from None


def _refused(grammar: Grammar, why: str) -> BadRequest:
    first = next((line for line in why.splitlines() if line.startswith("error:")), why.partition("\n")[0])
    return BadRequest(f"{grammar.param}: {first.removeprefix('error: ')[:_MAX_MESSAGE_CHARS]}", param=grammar.param)


def _next_mask(matcher: Any, grammar: Grammar, num_bytes: int) -> bytes:
    mask: bytes = matcher.compute_bitmask()[:num_bytes]
    if matcher.is_error() or not any(mask):
        raise _refused(grammar, matcher.get_error() or "no token of this model's vocabulary fits")
    return mask


class LlConstraint:
    """Implements serving.types.Constraint. `matcher`: an llguidance.LLMatcher at its start; `mask`: its first."""

    def __init__(self, matcher: Any, grammar: Grammar, mask: bytes) -> None:
        self._matcher, self._grammar, self._num_bytes = matcher, grammar, len(mask)
        self._mask: bytes | None = mask

    @property
    def mask(self) -> bytes | None:
        return self._mask

    def push(self, token_id: int) -> None:
        """Raises BadRequest where the grammar needs more than the library's limits."""
        self._matcher.consume_token(token_id)
        ended = self._matcher.is_stopped() and not self._matcher.is_error()
        self._mask = None if ended else _next_mask(self._matcher, self._grammar, self._num_bytes)
