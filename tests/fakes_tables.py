"""Penalties, biases and allowed tokens as their definitions say, one row at a time in float64, for model.adjust.

repetition (CTRL): logit / r where positive, else logit * r, of every token in prompt or answer; OpenAI: minus
count * frequency, minus presence where count > 0, of the answer's tokens; plus the bias; what is not allowed: -inf.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from serving.batch import SlotMask, SlotTable


@dataclass
class RowTable:
    prompt: frozenset[int] = frozenset()
    generated: Counter[int] = field(default_factory=Counter)
    bias: Mapping[int, float] = field(default_factory=dict)
    allowed: frozenset[int] | None = None

    def adjusted(
        self, logits: NDArray[np.floating], repetition: float, presence: float, frequency: float
    ) -> NDArray[np.float64]:
        """[vocab]"""
        out = logits.astype(np.float64)
        for token, logit in enumerate(logits.astype(float)):
            count = self.generated[token]
            if token in self.prompt or count > 0:
                out[token] = logit / repetition if logit > 0 else logit * repetition
            out[token] -= count * frequency + (presence if count > 0 else 0.0)
            out[token] += self.bias.get(token, 0.0)
            if self.allowed is not None and token not in self.allowed:
                out[token] = -np.inf
        return out


class FakeTables:
    """By slot, as the device keeps them."""

    def __init__(self) -> None:
        self.rows: dict[int, RowTable] = {}

    def write(self, tables: Iterable[SlotTable], masks: Iterable[SlotMask]) -> None:
        for t in tables:
            assert t.slot != 0
            allowed = None if t.allowed is None else frozenset(t.allowed)
            self.rows[t.slot] = RowTable(
                frozenset(t.prompt.tolist()), Counter(t.generated.tolist()), dict(t.bias), allowed
            )
        for mask in masks:
            assert mask.words.dtype == np.uint32
            bits = np.unpackbits(mask.words.view(np.uint8), bitorder="little")
            self.rows[mask.slot].allowed = frozenset(np.flatnonzero(bits).tolist())


def walked(logits: Sequence[float], *, top_k: int, top_p: float, min_p: float) -> set[int]:
    """The tokens that survive truncation, by walking down the sorted list."""
    order = sorted(range(len(logits)), key=lambda i: -logits[i])
    order = order[: top_k or len(order)]
    weights = np.exp([logits[i] - logits[order[0]] for i in order])
    p, mass = weights / weights.sum(), 0.0
    kept: list[int] = []
    for token, prob in zip(order, p, strict=True):
        if kept and (mass >= top_p or prob < min_p * p[0]):
            break
        kept.append(token)
        mass += prob
    return set(kept)
