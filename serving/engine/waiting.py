"""Rows that wait for a step, in the order in which they will get it: priorities that age, tenants in turn.

One lane a priority. The lane whose oldest row has the smallest arrival + priority * ageing goes first: urgent before
normal before low, except that a row never starts after one of a higher class that came `ageing_s` later for each class
between them, as long as its own class gives it its turn. Inside a lane tenants take turns by cost (start-time fair
queueing, Goyal, Vin and Cheng 1996): a row's turn is where its tenant's earlier rows end on a clock that runs in
tokens, so one tenant's flood delays another's row by no more than a row of each; rows that leave before they start cost
their tenant nothing. A row that was stopped and comes back keeps its turn, and ages by what it has waited. Finding the
next row costs the same however many wait; coming and going moves part of a list.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from heapq import heappop, heappush

from serving.types import Priority

from .sequence import Sequence

Entry = tuple[float, int, Sequence]  # turn or age, order of arrival (never equal), row


class _Lane:
    """Rows of one priority."""

    def __init__(self) -> None:
        self._fresh: dict[str, list[Sequence]] = {}  # rows that never started, by tenant, in order of arrival
        self._by_turn: list[Entry] = []  # rows that came back, and the first fresh one of each tenant
        self._by_age: list[Entry] = []
        self._now = 0.0  # the turn of the row that started last, in tokens
        self._tenant_end: dict[str, float] = {}  # where the turn of the tenant's row that started last ends

    def __len__(self) -> int:
        return len(self._by_age)

    def __contains__(self, row: Sequence) -> bool:
        at = bisect_left(self._by_age, (row.aged_from_s, row.order))
        return at < len(self._by_age) and self._by_age[at][2] is row

    @property
    def oldest(self) -> Sequence:
        return self._by_age[0][2]

    def push(self, row: Sequence) -> None:
        insort(self._by_age, (row.aged_from_s, row.order, row))
        if row.started:
            self._line_up(row, row.turn)
            return
        fresh = self._fresh.setdefault(row.tenant, [])
        fresh.append(row)
        if len(fresh) == 1:
            self._line_up(row, max(self._now, self._tenant_end.get(row.tenant, 0.0)))

    def remove(self, row: Sequence) -> None:
        """Without a start: the next row of its tenant has its turn."""
        self._take_out(row, 0)

    def start(self, row: Sequence) -> None:
        self._take_out(row, row.cost)
        self._now = max(self._now, row.turn)
        row.started = True

    def in_order(self) -> Iterator[tuple[float, Sequence]]:
        """Each row in its turn, with the age of the oldest one that is left before it goes."""
        gone: set[Sequence] = set()
        heap, places = list(self._by_turn), dict.fromkeys(self._fresh, 0)  # a sorted list is a heap
        age = 0
        while heap:
            turn, _, row = heappop(heap)
            while self._by_age[age][2] in gone:
                age += 1
            yield self._by_age[age][0], row
            gone.add(row)
            if not row.started:
                fresh, place = self._fresh[row.tenant], places[row.tenant] + 1
                places[row.tenant] = place
                if place < len(fresh):
                    heappush(heap, (turn + row.cost, fresh[place].order, fresh[place]))

    def _line_up(self, row: Sequence, turn: float) -> None:
        row.turn = turn
        insort(self._by_turn, (turn, row.order, row))

    def _fall_out(self, row: Sequence) -> None:
        del self._by_turn[bisect_left(self._by_turn, (row.turn, row.order))]

    def _take_out(self, row: Sequence, cost: int) -> None:
        """`cost`: by how much the next turn of its tenant moves, if this is the row's first start."""
        del self._by_age[bisect_left(self._by_age, (row.aged_from_s, row.order))]
        if row.started:
            self._fall_out(row)
        else:
            self._take_fresh(row, cost)
        if not self._by_age:  # nobody to be fair to. The clock goes on: rows that come back keep their turn
            self._tenant_end.clear()

    def _take_fresh(self, row: Sequence, cost: int) -> None:
        fresh = self._fresh[row.tenant]
        first = fresh[0]
        place = 0 if row is first else bisect_left(fresh, row.order, key=lambda other: other.order)
        del fresh[place]
        if place and not cost:
            return
        self._fall_out(first)
        row.turn = first.turn
        if cost:
            self._tenant_end[row.tenant] = row.turn + cost
        if fresh:
            self._line_up(fresh[0], row.turn + cost)
        else:
            del self._fresh[row.tenant]


class WaitingRows:
    def __init__(self, ageing_s: float) -> None:
        self._ageing_s = ageing_s
        self._lanes: dict[Priority, _Lane] = {p: _Lane() for p in Priority}
        self.num_tokens = 0

    def __len__(self) -> int:
        return sum(map(len, self._lanes.values()))

    def push(self, row: Sequence) -> None:
        self._lanes[row.priority].push(row)
        self.num_tokens += row.num_prompt

    def discard(self, row: Sequence) -> bool:
        """Take a row out wherever it stands; False if it is not here."""
        lane = self._lanes[row.priority]
        if row not in lane:
            return False
        lane.remove(row)
        self.num_tokens -= row.num_prompt
        return True

    def start(self, row: Sequence) -> None:
        """Take a row out because it goes to the device: its tenant has had this turn."""
        self._lanes[row.priority].start(row)
        self.num_tokens -= row.num_prompt

    def head(self) -> Sequence | None:
        return next(self.in_order(), None)

    def in_order(self) -> Iterator[Sequence]:
        """All rows, next first, without taking any out; ends when the queue changes."""
        heads = []
        for priority, lane in self._lanes.items():
            walk = lane.in_order()
            if (first := next(walk, None)) is not None:
                heads.append((first[0] + priority * self._ageing_s, priority, first[1], walk))
        while len(heads) > 1:
            at = min(range(len(heads)), key=lambda i: heads[i][:2])
            _, priority, row, walk = heads[at]
            yield row
            if (after := next(walk, None)) is not None:
                heads[at] = (after[0] + priority * self._ageing_s, priority, after[1], walk)
            else:
                del heads[at]
        for _, _, row, walk in heads:  # one class alone, as nearly always
            yield row
            for _, following in walk:
                yield following

    def has_urgent(self) -> bool:
        return len(self._lanes[Priority.URGENT]) > 0

    def oldest(self) -> Sequence | None:
        """The row that came first."""
        return min((lane.oldest for lane in self._lanes.values() if len(lane)), key=lambda r: r.order, default=None)

    def rows(self) -> list[Sequence]:
        return [row for lane in self._lanes.values() for _, row in lane.in_order()]
