"""Which of the rows that generate go into the next plain step.

In a round each of them gets one token. Mostly that is one step; but where the buckets leave much of it empty, as 17
rows do in one of 32, and a step's time is that of its rows, a full smaller step and one for the rest take less. The
warm-up measured what steps take, so a device that has a larger one for nothing keeps to it.
"""

from collections.abc import Callable

from serving.batch import Kind

from .buckets import BucketSet
from .costs import StepCosts
from .sequence import Sequence

_WORTH, _WORTH_S = 0.9, 0.001  # less of the time, and less by more than another step costs the host


class Rounds:
    def __init__(self, buckets: BucketSet, costs: StepCosts) -> None:
        self._buckets, self._costs = buckets, costs
        self._counts = buckets.row_counts(Kind.DECODE)
        self._owed: set[Sequence] = set()

    def owed(self, rows: list[Sequence]) -> list[Sequence]:
        """Those of `rows` that wait for their token of this round; [] between two rounds."""
        return [row for row in rows if row in self._owed] if self._owed else []

    def next(self, rows: list[Sequence]) -> list[Sequence]:
        """The rows of the next step; `rows` are all that could have one."""
        waiting = self.owed(rows) or rows
        return waiting[: first_count(len(waiting), self._counts, self._seconds)]

    def taken(self, step: list[Sequence], rows: list[Sequence]) -> None:
        """A step of these, of all `rows`, was formed."""
        self._owed = set(self.owed(rows) or rows).difference(step)

    def _seconds(self, count: int) -> float:
        bucket = self._buckets.fit(Kind.DECODE, count)
        return 0.0 if bucket is None else self._costs.warm_up_s(bucket)


def first_count(num_rows: int, counts: list[int], seconds: Callable[[int], float]) -> int:
    """Rows of the first of the steps that bring `num_rows` through soonest. `counts`: of the buckets, ascending, the
    last no less than `num_rows`; `seconds`: what a step of such a bucket takes, 0 where it is not known."""
    return _best(num_rows, counts, seconds)[0]


def _best(num_rows: int, counts: list[int], seconds: Callable[[int], float]) -> tuple[int, float]:
    whole_s = seconds(next(count for count in counts if count >= num_rows))
    full = max((count for count in counts if count < num_rows), default=0)
    if not full or not seconds(full) or not whole_s:
        return num_rows, whole_s
    split_s = seconds(full) + _best(num_rows - full, counts, seconds)[1]
    worth = split_s < min(_WORTH * whole_s, whole_s - _WORTH_S)
    return (full, split_s) if worth else (num_rows, whole_s)
