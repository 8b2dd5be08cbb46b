"""Reasoning first, then the constraint."""

import numpy as np
import pytest

from serving.pipeline.guide import AfterReasoning, mask_bytes

CLOSE, EOS = 7, 9


class Letters:
    """Allows its letters one after the other."""

    def __init__(self, *tokens: int) -> None:
        self._tokens = list(tokens)

    @property
    def mask(self) -> bytes | None:
        return bytes(self._tokens[:1]) if self._tokens else None  # any bytes do: nobody looks inside

    def push(self, token_id: int) -> None:
        assert token_id == self._tokens.pop(0)


def allowed(mask: bytes | None) -> set[int]:
    assert mask is not None
    return set(np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")).tolist())


@pytest.mark.parametrize("vocab", [33, 64])
def test_all_but_the_end_is_free_until_the_tag(vocab: int) -> None:
    constraint = AfterReasoning(Letters(3), close_id=CLOSE, eos_ids=(EOS, 0), vocab_size=vocab)
    for token in (1, 3, 2, CLOSE):
        assert constraint.mask is not None
        assert len(constraint.mask) == mask_bytes(vocab)
        assert allowed(constraint.mask) & set(range(vocab)) == set(range(vocab)) - {EOS, 0}
        constraint.push(token)
    assert constraint.mask == bytes([3])
    constraint.push(3)
    assert constraint.mask is None, "the inner text is complete"


def test_masks_are_whole_words() -> None:
    assert [mask_bytes(n) for n in (1, 32, 33, 129_280)] == [4, 4, 8, 16_160]
