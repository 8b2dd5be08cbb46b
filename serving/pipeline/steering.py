"""What a request wants changed about the model's choice of tokens: checked against the vocabulary, grammars made ready.

Runs on the encode pool with the rest of the preparation, so a grammar is compiled beside the running requests.
"""

from collections.abc import Callable, Collection, Sequence

from serving.errors import BadRequest, Unsupported
from serving.types import Constraint

from .guide import AfterReasoning, Grammar
from .language import Language


def check_ids(
    language: Language, *, logit_bias: tuple[tuple[int, float], ...], allowed: tuple[int, ...] | None
) -> None:
    """Raises BadRequest for token ids that the model does not have."""
    _check(language, [token for token, _ in logit_bias], "logit_bias")
    _check(language, allowed or (), "allowed_token_ids")


def no_tables() -> Unsupported:
    return Unsupported(
        "penalties, logit_bias, allowed_token_ids and guided output are switched off on this server "
        "(engine.sampling_tables)"
    )


def constraint_maker(language: Language, grammar: Grammar | None) -> Callable[[], Constraint] | None:
    """Compiled once a request. Raises BadRequest for a grammar that is none, Unsupported where there is no guide."""
    if grammar is None:
        return None
    if language.guide is None:
        raise Unsupported(
            f"{grammar.param}: this server has no guided output; it needs tidegate[guided], "
            "and a tokenizer with an end token",
            param=grammar.param,
        )
    return language.guide.compile(grammar)


def row_constraint(
    language: Language, make: Callable[[], Constraint] | None, prompt: Sequence[int]
) -> Constraint | None:
    """One row's own. `prompt`: where the answer may begin with reasoning, which is free; else nothing."""
    if make is None:
        return None
    constraint = make()
    close_id = language.reasoning_end(prompt) if prompt else None
    if close_id is None:
        return constraint
    return AfterReasoning(
        constraint, close_id=close_id, eos_ids=language.tokenizer.eos_ids, vocab_size=language.vocab_size
    )


def _check(language: Language, ids: Collection[int], param: str) -> None:
    if ids and not (min(ids) >= 0 and max(ids) < language.vocab_size):
        raise BadRequest(
            f"{param}: a token id is outside the vocabulary: ids are 0 to {language.vocab_size - 1}", param=param
        )
