"""Order of waiting rows, against sorting."""

import hypothesis.strategies as st
from hypothesis import given

from serving.engine.sequence import Sequence, make_sequences
from serving.engine.waiting import WaitingRows
from serving.types import Job, Prepared, Priority


def row(arrived_s: float, priority: Priority = Priority.NORMAL, length: int = 1) -> Sequence:
    (sequence,) = make_sequences(None, Job("j", "t", (Prepared((1,) * length),), priority))
    sequence.arrived_s = arrived_s
    return sequence


@given(st.lists(st.tuples(st.floats(0, 5), st.sampled_from(Priority), st.booleans()), max_size=30), st.floats(0.1, 3))
def test_rows_come_out_by_arrival_plus_priority(arrivals: list[tuple[float, Priority, bool]], ageing_s: float) -> None:
    waiting, kept = WaitingRows(ageing_s), []
    for arrived_s, priority, discard in sorted(arrivals, key=lambda a: a[0]):
        sequence = row(arrived_s, priority)
        waiting.push(sequence)
        if discard:
            assert waiting.discard(sequence)
            assert not waiting.discard(sequence)
        else:
            kept.append(sequence)
    assert len(waiting) == len(kept)
    assert waiting.oldest_s() == min((r.arrived_s for r in kept), default=None)
    assert waiting.has_urgent() == any(r.priority is Priority.URGENT for r in kept)
    ordered = list(waiting.in_order())
    out = [waiting.pop() for _ in kept]
    assert [waiting.rank(r) for r in ordered] == [waiting.rank(r) for r in out]
    assert [r.arrived_s + r.priority * ageing_s for r in out] == sorted(
        r.arrived_s + r.priority * ageing_s for r in kept
    )
    assert waiting.head() is None


def test_tokens_are_counted() -> None:
    waiting = WaitingRows(1.0)
    rows = [row(0.0, length=n) for n in (3, 4, 5)]
    for r in rows:
        waiting.push(r)
    assert waiting.num_tokens == 12
    waiting.discard(rows[1])
    assert waiting.num_tokens == 8
    assert waiting.rows() == [rows[0], rows[2]]
