"""Order of waiting rows, against a model that looks at every row."""

from dataclasses import dataclass
from itertools import count

import hypothesis.strategies as st
from hypothesis import given

from serving.engine.sequence import Sequence, make_sequences
from serving.engine.waiting import WaitingRows
from serving.types import Job, Prepared, Priority

_ORDER = count()


def row(arrived_s: float, priority: Priority = Priority.NORMAL, length: int = 1, tenant: str = "t") -> Sequence:
    (sequence,) = make_sequences(None, Job("j", tenant, (Prepared((1,) * length),), priority))
    sequence.arrived_s = sequence.queued_s = arrived_s
    sequence.order = next(_ORDER)
    return sequence


@dataclass
class Model:
    """The rules of `waiting`, naively: turns are kept by row, every pop looks at all rows."""

    ageing_s: float

    def __post_init__(self) -> None:
        self.ends: dict[tuple[Priority, str], list[Sequence]] = {}
        self.rows: dict[Priority, list[Sequence]] = {p: [] for p in Priority}
        self.turn: dict[Sequence, float] = {}
        self.now = dict.fromkeys(Priority, 0.0)

    def push(self, r: Sequence) -> None:
        mine = [self.turn[o] + o.cost for o in self.ends.get((r.priority, r.tenant), []) if o in self.turn]
        self.turn[r] = max([self.now[r.priority], *mine])
        self.ends.setdefault((r.priority, r.tenant), []).append(r)
        self.rows[r.priority].append(r)

    def pop(self) -> Sequence:
        lanes = [p for p in Priority if self.rows[p]]
        lane = min(lanes, key=lambda p: (min(r.arrived_s for r in self.rows[p]) + p * self.ageing_s, p))
        best = min(self.rows[lane], key=lambda r: (self.turn[r], r.order))
        self.now[lane] = max(self.now[lane], self.turn[best])
        self.rows[lane].remove(best)
        if not self.rows[lane]:
            self.ends = {key: rows for key, rows in self.ends.items() if key[0] is not lane}
        return best


ARRIVALS = st.lists(
    st.tuples(st.floats(0, 5), st.sampled_from(Priority), st.sampled_from("abc"), st.integers(1, 50)), max_size=40
)


@given(ARRIVALS, st.floats(0.1, 3), st.lists(st.booleans(), max_size=40))
def test_rows_start_in_the_order_of_the_rules(
    arrivals: list[tuple[float, Priority, str, int]], ageing_s: float, pops: list[bool]
) -> None:
    waiting, model = WaitingRows(ageing_s), Model(ageing_s)
    for (arrived_s, priority, tenant, length), pop in zip(
        sorted(arrivals, key=lambda a: a[0]), [*pops, *[False] * len(arrivals)], strict=False
    ):
        sequence = row(arrived_s, priority, length, tenant)
        waiting.push(sequence)
        model.push(sequence)
        if pop:
            head = waiting.head()
            assert head is model.pop()
            waiting.start(head)
    left = list(waiting.in_order())
    assert len(waiting) == len(left) == len(waiting.rows())
    assert waiting.num_tokens == sum(r.num_prompt for r in left)
    assert waiting.oldest() is min(left, key=lambda r: r.order, default=None)
    assert waiting.has_urgent() == any(r.priority is Priority.URGENT for r in left)
    for expected in left:  # the order that was told is the order that comes
        head = waiting.head()
        assert head is expected is model.pop()
        waiting.start(head)
    assert waiting.head() is None
    assert waiting.num_tokens == 0


def test_one_tenant_is_first_in_first_out() -> None:
    waiting = WaitingRows(1.0)
    rows = [row(i * 0.1, length=1 + 7 * i % 5) for i in range(20)]
    for r in rows:
        waiting.push(r)
    assert list(waiting.in_order()) == rows


def test_a_flood_of_one_tenant_delays_another_by_a_row() -> None:
    waiting = WaitingRows(1.0)
    for _ in range(100):
        waiting.push(row(0.0, length=10, tenant="flood"))
    for _ in range(20):
        waiting.start(next(waiting.in_order()))
    late = row(1.0, length=10, tenant="late")
    waiting.push(late)
    assert list(waiting.in_order()).index(late) <= 1


def test_tenants_share_by_cost_not_by_rows() -> None:
    waiting = WaitingRows(1.0)
    for _ in range(30):
        waiting.push(row(0.0, length=30, tenant="long"))
        waiting.push(row(0.0, length=10, tenant="short"))
    first = list(waiting.in_order())[:40]
    assert sum(r.cost for r in first if r.tenant == "long") == sum(r.cost for r in first if r.tenant == "short") == 300


def test_a_row_that_comes_back_goes_first_of_its_class() -> None:
    waiting = WaitingRows(1.0)
    rows = [row(0.1 * i, length=10, tenant="ab"[i % 2]) for i in range(8)]
    for r in rows:
        waiting.push(r)
    stopped = [waiting.head()]
    waiting.start(rows[0])
    for _ in range(3):
        waiting.start(next(waiting.in_order()))
    (first,) = stopped
    assert first is rows[0]
    waiting.push(first)
    assert waiting.head() is first


def test_discard_takes_a_row_out_once() -> None:
    waiting = WaitingRows(1.0)
    rows = [row(0.0, length=n) for n in (3, 4, 5)]
    for r in rows:
        waiting.push(r)
    assert waiting.num_tokens == 12
    assert waiting.discard(rows[1])
    assert not waiting.discard(rows[1])
    assert waiting.num_tokens == 8
    assert waiting.rows() == [rows[0], rows[2]]


@given(ARRIVALS, st.data())
def test_rows_that_leave_before_they_start_change_nothing_for_the_others(
    arrivals: list[tuple[float, Priority, str, int]], data: st.DataObject
) -> None:
    """Against a queue that never had them, whatever starts then."""
    arrivals = sorted(arrivals, key=lambda a: a[0])
    first, second = ([row(a, p, length, t) for a, p, t, length in arrivals] for _ in range(2))
    leave = set(data.draw(st.lists(st.integers(0, max(0, len(first) - 1)))))
    with_them, without = WaitingRows(1.0), WaitingRows(1.0)
    for i, (a, b) in enumerate(zip(first, second, strict=True)):
        b.order = a.order
        with_them.push(a)
        if i not in leave:
            without.push(b)
    for i in data.draw(st.permutations(sorted(leave & set(range(len(first)))))):
        assert with_them.discard(first[i])
    for _ in range(data.draw(st.integers(0, 5))):
        for waiting in (with_them, without):
            if (head := waiting.head()) is not None:
                waiting.start(head)
    assert [r.order for r in with_them.in_order()] == [r.order for r in without.in_order()]


def test_a_tenant_pays_nothing_for_a_flood_that_it_took_back() -> None:
    waiting = WaitingRows(1.0)
    waiting.push(row(0.0, length=10, tenant="other"))
    flood = [row(0.0, length=1000, tenant="t") for _ in range(50)]
    kept = row(0.0, length=10, tenant="t")
    for r in [*flood, kept]:
        waiting.push(r)
    for _ in range(50):
        waiting.push(row(0.0, length=10, tenant="other"))
    for r in flood:
        waiting.discard(r)
    late = row(0.0, length=10, tenant="t")
    waiting.push(late)
    order = list(waiting.in_order())
    assert (order.index(kept), order.index(late)) == (1, 3)


def test_a_row_that_starts_out_of_turn_is_paid_for() -> None:
    """The first of its tenant waits for something; the one behind it goes."""
    waiting = WaitingRows(1.0)
    rows = [row(0.0, length=10, tenant="t") for _ in range(3)]
    others = [row(0.0, length=10, tenant="other") for _ in range(3)]
    for r in [*rows, *others]:
        waiting.push(r)
    waiting.start(rows[1])
    assert list(waiting.in_order()) == [others[0], rows[0], others[1], rows[2], others[2]]
    waiting.push(rows[1])
    assert waiting.head() is rows[1]
