"""What a generating row brings to every step, in arrays indexed by slot.

A step's batch is these arrays at the step's slots, one fancy index a field: its cost does not depend on how long the
rows have become. Slot 0 belongs to nobody and holds the neutral values that padding gets.
"""

import numpy as np
from numpy.typing import NDArray

from .ring import Ring
from .sequence import Sequence


class Slots:
    """`max_slots` rows with up to `max_pages` pages each, which come round where there is a `ring`."""

    def __init__(self, max_slots: int, max_pages: int, ring: Ring | None = None) -> None:
        n, self._ring = max_slots + 1, ring
        self._free = list(range(max_slots, 0, -1))
        self.page_table: NDArray[np.int32] = np.zeros((n, max_pages), np.int32)
        self.num_pages: NDArray[np.int32] = np.zeros(n, np.int32)  # places of the page table that are in use
        self.position: NDArray[np.int32] = np.zeros(n, np.int32)  # of the token that the next step feeds, at most
        self.temperature: NDArray[np.float32] = np.zeros(n, np.float32)
        self.top_k: NDArray[np.int32] = np.zeros(n, np.int32)
        self.top_p: NDArray[np.float32] = np.ones(n, np.float32)
        self.min_p: NDArray[np.float32] = np.zeros(n, np.float32)
        self.seed: NDArray[np.uint32] = np.zeros((n, 2), np.uint32)
        self.table: NDArray[np.int32] = np.zeros(n, np.int32)  # the slot itself, where its row adjusts logits
        self.repetition_penalty: NDArray[np.float32] = np.ones(n, np.float32)
        self.presence_penalty: NDArray[np.float32] = np.zeros(n, np.float32)
        self.frequency_penalty: NDArray[np.float32] = np.zeros(n, np.float32)
        self.want_top: NDArray[np.bool_] = np.zeros(n, np.bool_)

    @property
    def free(self) -> int:
        return len(self._free)

    def assign(self, row: Sequence, pages: list[int]) -> int:
        """A slot for `row`, filled with its pages and its way of sampling."""
        slot = self._free.pop()
        self.page_table[slot, : len(pages)] = pages
        self.num_pages[slot] = len(pages)
        self._turn(slot)
        self.position[slot] = row.num_prompt
        self.want_top[slot] = row.top > 0
        if row.sampling is not None:
            s = row.sampling
            self.temperature[slot], self.top_k[slot] = s.temperature, s.top_k
            self.top_p[slot], self.min_p[slot] = s.top_p, s.min_p
            self.seed[slot] = (s.seed & 0xFFFFFFFF, (s.seed >> 32) & 0xFFFFFFFF)
            self.table[slot] = slot if s.adjusts else 0
            self.repetition_penalty[slot] = s.repetition_penalty
            self.presence_penalty[slot], self.frequency_penalty[slot] = s.presence_penalty, s.frequency_penalty
        return slot

    def add_page(self, slot: int, page: int) -> None:
        """Room for `page_size` more positions."""
        self.page_table[slot, self.num_pages[slot]] = page
        self.num_pages[slot] += 1
        self._turn(slot)

    def unfilled(self, page_size: int) -> int:
        """Tokens for which the rows' pages have room beyond their prompts and what they have generated."""
        most = self.page_table.shape[1] if self._ring is None else self._ring.size
        room = np.minimum(self.num_pages, most) * page_size
        return int(np.maximum(room - self.position, 0).sum())

    def _turn(self, slot: int) -> None:
        """A row that has all pages of its ring needs no more."""
        if self._ring is not None and self.num_pages[slot] == self._ring.size:
            width = self.page_table.shape[1]
            self.page_table[slot] = self._ring.table(self.page_table[slot, : self._ring.size].tolist(), width)
            self.num_pages[slot] = width

    def release(self, slot: int) -> None:
        """Back to the neutral values, so that no later batch reads what was here."""
        assert slot != 0, "slot 0 is nobody's"
        assert slot not in self._free, f"slot {slot} is released twice"
        for array in (
            self.page_table,
            self.num_pages,
            self.position,
            self.temperature,
            self.top_k,
            self.min_p,
            self.seed,
        ):
            array[slot] = 0
        for array in (self.table, self.presence_penalty, self.frequency_penalty):
            array[slot] = 0
        self.top_p[slot], self.repetition_penalty[slot], self.want_top[slot] = 1.0, 1.0, False
        self._free.append(slot)
