"""Which key to evict next: LRU-K (O'Neil, O'Neil and Weikum, "The LRU-K Page Replacement Algorithm", SIGMOD 1993).

The victim is the key whose K-th last use lies furthest back; a key with fewer than K uses goes before all others, so
a scan of one-offs never displaces what is used again and again. Uses that follow each other within `correlated_s` are
one use (the paper's correlated reference period). Keys are ids of anything; the clock is the caller's.
Invariant: only offered keys are evicted, and what is remembered of keys that nobody holds is at most `max_history`.
"""

import heapq
from collections.abc import Hashable
from itertools import count
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

NEVER = float("-inf")
Entry = tuple[tuple[bool, float], int, int, K]  # rank, -depth, order of pushes, key: never compared up to the key
SPARE_ENTRIES = 64  # dead heap entries that are not worth a rebuild


class _Uses:
    """When a key was used: `times` of counted uses, newest first, at most K; `last` of any use."""

    __slots__ = ("last", "times")

    def __init__(self, now_s: float) -> None:
        self.last = now_s
        self.times = [now_s]

    def add(self, now_s: float, k: int, correlated_s: float) -> None:
        if now_s - self.last > correlated_s:
            burst = self.last - self.times[0]  # the paper's step: older uses move up by the length of the last burst
            self.times = [now_s, *(time + burst for time in self.times[: k - 1])]
        self.last = now_s

    def rank(self, k: int) -> tuple[bool, float]:
        """Smaller is evicted earlier: an infinite distance by its last use, then by the K-th last use."""
        known = len(self.times) == k
        return (known, self.times[-1] if known else self.last)


class LruK(Generic[K]):
    """A key is offered (evictable), held (in use), or only remembered; all three have a history of uses.

    Withdraw a key that is resident and in use: a key that is neither offered nor withdrawn counts as one that nobody
    holds, and its history goes when `max_history` newer ones have come. Not thread-safe.
    """

    def __init__(self, k: int = 3, *, correlated_s: float, max_history: int) -> None:
        if k < 1 or correlated_s < 0 or max_history < 0:
            raise ValueError(
                f"k {k} must be at least 1, correlated_s {correlated_s} and max_history {max_history} 0 or more"
            )
        self._k, self._correlated_s, self._max_history = k, correlated_s, max_history
        self._uses: dict[K, _Uses] = {}
        self._held: set[K] = set()
        self._remembered: dict[K, None] = {}  # the longest untouched first
        self._offered: dict[K, Entry[K]] = {}
        self._heap: list[Entry[K]] = []  # entries that are not `_offered`'s own are dead
        self._order = count()

    def __len__(self) -> int:
        """Offered keys."""
        return len(self._offered)

    def reference(self, key: K, now_s: float) -> None:
        """A use of the key, resident or not."""
        uses = self._uses.get(key)
        if uses is None:
            self._uses[key] = _Uses(now_s)
        else:
            uses.add(now_s, self._k, self._correlated_s)
        offered = self._offered.get(key)
        if offered is not None:
            self._push(key, -offered[1])
        elif key not in self._held:
            self._remember(key)

    def num_uses(self, key: K) -> int:
        """Counted uses that are remembered, K at most."""
        uses = self._uses.get(key)
        return 0 if uses is None else len(uses.times)

    def offer(self, key: K, depth: int = 0) -> None:
        """The key is resident and nobody uses it. Of equal distances the deeper goes first: a chain from its tail."""
        self._held.discard(key)
        self._remembered.pop(key, None)
        self._push(key, depth)

    def withdraw(self, key: K) -> None:
        """The key is resident and in use: not evictable."""
        self._offered.pop(key, None)
        self._remembered.pop(key, None)
        self._held.add(key)

    def victim(self) -> K | None:
        """Take out the offered key with the largest backward K-distance; its history stays. None: none is offered."""
        while self._heap:
            entry = heapq.heappop(self._heap)
            key = entry[3]
            if self._offered.get(key) is entry:
                del self._offered[key]
                self._remember(key)
                return key
        return None

    def forget(self, key: K) -> None:
        """Drop the key and its history."""
        self._offered.pop(key, None)
        self._remembered.pop(key, None)
        self._held.discard(key)
        self._uses.pop(key, None)

    def _push(self, key: K, depth: int) -> None:
        uses = self._uses.get(key)
        rank = (False, NEVER) if uses is None else uses.rank(self._k)
        entry = (rank, -depth, next(self._order), key)
        self._offered[key] = entry
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._offered) + SPARE_ENTRIES:
            self._heap = list(self._offered.values())
            heapq.heapify(self._heap)

    def _remember(self, key: K) -> None:
        if key not in self._uses:
            return
        self._remembered.pop(key, None)
        self._remembered[key] = None
        if len(self._remembered) > self._max_history:
            oldest = next(iter(self._remembered))
            del self._remembered[oldest], self._uses[oldest]
