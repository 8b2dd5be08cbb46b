"""Rows that wait for their first step, in the order in which they will get it.

Three first-in-first-out lanes, one a priority; the next row is the lane head with the smallest arrival + priority *
ageing. So urgent goes before normal before low, except before a row that has waited `ageing_s` longer for each class
between them: that is the ageing bound. Push, discard and pop cost the same however many rows wait.
"""

from collections import OrderedDict
from collections.abc import Iterator
from heapq import merge

from serving.types import Priority

from .sequence import Sequence


class WaitingRows:
    def __init__(self, ageing_s: float) -> None:
        self._ageing_s = ageing_s
        self._lanes: dict[Priority, OrderedDict[Sequence, None]] = {p: OrderedDict() for p in Priority}
        self.num_tokens = 0

    def __len__(self) -> int:
        return sum(map(len, self._lanes.values()))

    def rank(self, row: Sequence) -> float:
        """Seconds on the engine's clock; the smallest goes first."""
        return row.arrived_s + row.priority * self._ageing_s

    def push(self, row: Sequence) -> None:
        self._lanes[row.priority][row] = None
        self.num_tokens += row.num_prompt

    def discard(self, row: Sequence) -> bool:
        """Take a row out wherever it stands; False if it is not here."""
        lane = self._lanes[row.priority]
        if row not in lane:
            return False
        del lane[row]
        self.num_tokens -= row.num_prompt
        return True

    def head(self) -> Sequence | None:
        return min(self._heads(), key=self.rank, default=None)

    def pop(self) -> Sequence:
        row = self.head()
        assert row is not None, "pop from no rows"
        self.discard(row)
        return row

    def in_order(self) -> Iterator[Sequence]:
        """All rows, next first, without taking any out; ends when the queue changes."""
        lanes = [lane for lane in self._lanes.values() if lane]
        return iter(lanes[0]) if len(lanes) == 1 else merge(*lanes, key=self.rank)

    def has_urgent(self) -> bool:
        return bool(self._lanes[Priority.URGENT])

    def oldest_s(self) -> float | None:
        """Arrival of the row that has waited longest."""
        return min((row.arrived_s for row in self._heads()), default=None)

    def rows(self) -> list[Sequence]:
        return [row for lane in self._lanes.values() for row in lane]

    def _heads(self) -> list[Sequence]:
        return [next(iter(lane)) for lane in self._lanes.values() if lane]
