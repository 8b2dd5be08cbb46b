"""Which rows are out of time, found without looking at the others.

A heap by deadline; rows that end earlier stay in it until their time comes or until the heap has doubled since it was
last cleared of them, so it is never more than twice the live rows (and a constant).
"""

import heapq
from collections.abc import Iterator
from itertools import count

from .sequence import Sequence, Stage

_MIN_CLEAR = 1024


class Deadlines:
    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Sequence]] = []
        self._order = count()  # breaks ties; sequences have no order
        self._clear_at = _MIN_CLEAR

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, row: Sequence) -> None:
        """Rows without a deadline are ignored."""
        if row.deadline_s is None:
            return
        heapq.heappush(self._heap, (row.deadline_s, next(self._order), row))
        if len(self._heap) >= self._clear_at:
            self._clear()

    def expired(self, now_s: float) -> Iterator[Sequence]:
        """Rows whose deadline has come and that are not done; each is given once."""
        while self._heap and self._heap[0][0] <= now_s:
            row = heapq.heappop(self._heap)[2]
            if row.stage is not Stage.DONE:
                yield row

    def _clear(self) -> None:
        self._heap = [entry for entry in self._heap if entry[2].stage is not Stage.DONE]
        heapq.heapify(self._heap)
        self._clear_at = max(_MIN_CLEAR, 2 * len(self._heap))
