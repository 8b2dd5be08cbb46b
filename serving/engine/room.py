"""Who gets a slot and pages, and who makes room: between the prompts that wait and the rows that run.

A prompt comes in when a slot and pages for all of it are free, and takes more pages as it generates. Where a slot or a
page is lacking, the youngest row of the lowest priority makes room: for a row of a higher class (one that waits for a
slot or pages) or for an older one (that needs a page to go on). It waits again with what it has generated, in its turn.
None is stopped where that would not help, nor for a page while another one runs that gives way to it.
So the oldest row always moves and no deadlock exists; and what has waited for its ageing bound is not stopped for a
higher class again, so no row is stopped for ever.
"""

from itertools import islice

from .running import Running
from .sequence import Sequence
from .waiting import WaitingRows

_LOOK_AHEAD = 32  # rows that are looked at in a turn: more may wait for one prompt


class Room:
    """Times are seconds on the engine's clock."""

    def __init__(self, running: Running, ageing_s: float) -> None:
        self.waiting, self._running, self._ageing_s = WaitingRows(ageing_s), running, ageing_s
        self.num_preempted = 0
        self.num_cached_tokens = 0  # prompt tokens that the prefix cache saved

    def admit(self, now_s: float) -> None:
        """Give slots and pages to those that wait, in order. Nobody overtakes for want of pages: a long row would wait
        for ever behind short ones. Only one whose pages another row, or the disk, will soon bring lets others by."""
        blocked = False
        while not blocked:
            first = islice(self.waiting.in_order(), _LOOK_AHEAD)
            row = next((row for row in first if not self._running.waits_for_pages(row)), None)
            blocked = row is None or not self._make(row, now_s)
            if row is not None and not blocked:
                self.waiting.start(row)
                row.waited_s += now_s - row.queued_s
                self._running.start(row, now_s)
                self.num_cached_tokens += row.num_shared

    def with_pages(self, rows: list[Sequence], most: int, now_s: float) -> list[Sequence]:
        """Those of the running `rows` that have pages for their next step, of `most` tokens a row, once the youngest
        have made room."""
        lacking = self._running.lacking_page(rows, most) if rows else []
        for row in sorted(lacking, key=lambda row: row.rank):
            while row.slot and self._running.lacks_page(row, most):
                if self._running.available:
                    self._running.grow(row)
                else:
                    self.stop(self._worst(), now_s)
        return [row for row in rows if row.slot] if lacking else rows

    def stop(self, row: Sequence, now_s: float) -> None:
        """It makes room."""
        self.num_preempted += 1
        self.put_back(row, now_s)

    def put_back(self, row: Sequence, now_s: float) -> None:
        """Out, and back in the queue in its turn."""
        self._running.stop(row, resumes=True)
        row.rewind()
        row.queued_s = now_s
        self.waiting.push(row)

    def _make(self, row: Sequence, now_s: float) -> bool:
        """Whether `row` can come in, once younger rows of lower priority have made room where that helps."""
        if self._fits(row):
            return True
        lower = [other for other in self._running if self._gives_way(other, row)]
        if not lower or not self._would_fit(row, lower):
            return False
        for other in sorted(lower, key=lambda other: other.rank, reverse=True):
            if not self._fits(row):
                self.stop(other, now_s)
        return True

    def _worst(self) -> Sequence:
        """The one that makes room for a page: the youngest, but none before those that give way to it."""
        worst = self._running.worst()
        while lower := [other for other in self._running if self._gives_way(other, worst)]:
            worst = max(lower, key=lambda other: other.rank)
        return worst

    def _gives_way(self, runs: Sequence, waits: Sequence) -> bool:
        """To a higher class, but not for ever."""
        return runs.waited_s < (runs.priority - waits.priority) * self._ageing_s

    def _fits(self, row: Sequence) -> bool:
        """A slot, the prompt's pages, and one page for each running row to grow: else it would soon go out again."""
        need = self._running.pages_needed(row) + len(self._running)
        return self._running.slots.free > 0 and need <= self._running.available

    def _would_fit(self, row: Sequence, lower: list[Sequence]) -> bool:
        """The same without the rows `lower`: none is stopped in vain."""
        need = self._running.pages_needed(row) + len(self._running) - len(lower)
        most = self._running.available + sum(len(other.pages) for other in lower)  # the cheap answer first
        return need <= most and need <= self._running.available + self._running.pages_gained(lower, row)
