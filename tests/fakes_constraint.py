"""A constraint that is a list of sets: the i-th token is one of the i-th set; after the last the text is complete."""

from collections.abc import Collection, Sequence

import numpy as np

from tests.fakes import ToyModel


class Slotted:
    """`fail_at`: the push that raises, counted from 0."""

    def __init__(self, sets: Sequence[Collection[int]], *, vocab_size: int = 320, fail_at: int = -1) -> None:
        self._sets, self._vocab_size, self._fail_at = list(sets), vocab_size, fail_at
        self.pushed: list[int] = []

    @property
    def mask(self) -> bytes | None:
        place = len(self.pushed)
        if place == len(self._sets):
            return None
        bits = np.zeros(self._vocab_size, np.uint8)
        bits[list(self._sets[place])] = 1
        return np.packbits(bits, bitorder="little").tobytes()

    def push(self, token_id: int) -> None:
        if len(self.pushed) == self._fail_at:
            raise RuntimeError("injected at push")
        assert token_id in self._sets[len(self.pushed)]
        self.pushed.append(token_id)

    def reference(self, model: ToyModel, prompt: Sequence[int]) -> list[int]:
        """Greedy, by the model's own word."""
        context = list(prompt)
        for allowed in self._sets:
            logprobs = model.logprobs(context)
            context.append(max(sorted(allowed), key=lambda token: float(logprobs[token])))
        return context[len(prompt) :]
