"""Expiry in order of deadline, and a heap that does not keep the dead."""

from serving.engine.deadlines import Deadlines
from serving.engine.sequence import Sequence, Stage, make_sequences
from serving.types import Job, Prepared


def row(deadline_s: float | None) -> Sequence:
    (sequence,) = make_sequences(None, Job("j", "t", (Prepared((1,)),), deadline_s=deadline_s))
    return sequence


def test_rows_expire_in_order_and_once() -> None:
    deadlines, rows = Deadlines(), [row(t) for t in (3.0, 1.0, 2.0, 1.0)]
    for r in rows:
        deadlines.push(r)
    assert list(deadlines.expired(0.5)) == []
    assert list(deadlines.expired(2.0)) == [rows[1], rows[3], rows[2]]
    assert list(deadlines.expired(2.0)) == []


def test_rows_without_a_deadline_or_that_are_done_do_not_expire() -> None:
    deadlines, done = Deadlines(), row(1.0)
    deadlines.push(row(None))
    deadlines.push(done)
    done.stage = Stage.DONE
    assert list(deadlines.expired(9.0)) == []


def test_the_heap_stays_in_proportion_to_live_rows() -> None:
    deadlines = Deadlines()
    for i in range(20_000):
        r = row(1e9 + i)
        deadlines.push(r)
        r.stage = Stage.DONE
    assert len(deadlines) <= 1024
