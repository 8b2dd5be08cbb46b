"""What a text must match, and who turns that into masks of tokens. The library behind it: `llguide`.

A model that reasons aloud does so first: where the prompt ends inside the reasoning, the constraint begins after it.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from serving.types import Constraint


class Form(StrEnum):
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"  # a JSON list of strings


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a client asks its text to be. `param`: the field that said so."""

    form: Form
    text: str
    param: str


class Guide(Protocol):
    """Read-only after construction; used by several threads."""

    def compile(self, grammar: Grammar) -> Callable[[], Constraint]:
        """What makes a fresh constraint, one a row. Raises BadRequest that says what is wrong with the grammar."""
        ...


class AfterReasoning:
    """A Constraint that allows everything but the end until `close_id` has come, and then is `inner`."""

    def __init__(self, inner: Constraint, *, close_id: int, eos_ids: Collection[int], vocab_size: int) -> None:
        self._inner, self._close_id = inner, close_id
        self._free = _all_but(eos_ids, vocab_size)
        self._closed = False

    @property
    def mask(self) -> bytes | None:
        return self._inner.mask if self._closed else self._free

    def push(self, token_id: int) -> None:
        if self._closed:
            self._inner.push(token_id)
        elif token_id == self._close_id:
            self._closed = True


def mask_bytes(vocab_size: int) -> int:
    """Length of a Constraint's mask."""
    return 4 * -(-vocab_size // 32)


def _all_but(ids: Collection[int], vocab_size: int) -> bytes:
    mask = bytearray(b"\xff" * mask_bytes(vocab_size))
    for token in ids:
        mask[token // 8] &= ~(1 << token % 8) & 0xFF
    return bytes(mask)
