"""KV pages on their way between device and host, in the order in which they were decided.

Whoever decides (an eviction, an admission) queues a move; the loop dispatches what is queued before the next step, so
the device runs moves and steps in one order and a page may be reused the moment its read is queued. Reads are finished
when the loop passes by, without waiting. Invariant: a key is on its way once at most.
"""

import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from serving.batch import PAGES_AT_ONCE, PendingPages, Runner

from .host_tier import Content

_log = logging.getLogger("tidegate.engine")


@dataclass(frozen=True, slots=True)
class _Move:
    page: int
    key: bytes  # of a read
    content: Content | None  # None: a read


class PageMoves:
    def __init__(self) -> None:
        self._queue: list[_Move] = []
        self._out: deque[tuple[tuple[bytes, ...], PendingPages]] = deque()
        self._coming: set[bytes] = set()

    def __len__(self) -> int:
        """Moves queued, and calls of reads that are out."""
        return len(self._queue) + len(self._out)

    @property
    def num_coming(self) -> int:
        """Pages to be read, or being read."""
        return len(self._coming)

    def is_coming(self, key: bytes) -> bool:
        return key in self._coming

    def read(self, key: bytes, page: int) -> None:
        self._coming.add(key)
        self._queue.append(_Move(page, key, None))

    def write(self, page: int, content: Content) -> None:
        self._queue.append(_Move(page, b"", content))

    def dispatch(self, runner: Runner) -> None:
        """Hand over all that is queued. Raises what the runner raises: nothing on the device is sure any more."""
        queue, self._queue = self._queue, []
        for is_read, group in groupby(queue, key=lambda move: move.content is None):
            moves = list(group)
            for start in range(0, len(moves), PAGES_AT_ONCE):
                self._hand_over(runner, moves[start : start + PAGES_AT_ONCE], is_read=is_read)

    def _hand_over(self, runner: Runner, moves: list[_Move], *, is_read: bool) -> None:
        pages = [move.page for move in moves]
        if is_read:
            self._out.append((tuple(move.key for move in moves), runner.read_pages(pages)))
        else:
            runner.write_pages(pages, np.stack([move.content for move in moves if move.content is not None]))

    def finished(self, *, wait: bool) -> Iterator[tuple[bytes, Content]]:
        """What has been read since; `wait`: all that is out. A read that failed is gone: a miss, later."""
        while self._out and (wait or self._out[0][1].done()):
            keys, pending = self._out.popleft()
            self._coming.difference_update(keys)
            try:
                contents = pending.result()
            except Exception as exc:  # border: the step before it failed, and the loop hears of that from the step
                _log.debug("a read of pages failed", exc_info=exc)
            else:
                yield from zip(keys, contents, strict=True)

    def clear(self) -> None:
        """The device's pages are gone."""
        self._queue.clear()
        self._out.clear()
        self._coming.clear()
